"""Says which degrees, how fast, and whether it fits: cost formulas, before a GPU is used.

Geometry and the standard library only; ``python -m ds_usp.planner`` is the command line. Nothing
here communicates: a command is one process, and each rank plans by itself.
"""

from ds_usp.planner.answer import Answer, answer
from ds_usp.planner.choose_degree import AUTO, Choice, choose_ulysses, cluster_of, degree_or_auto
from ds_usp.planner.formulas import LEAST_BUCKET_ELEMENTS, bucket_elements, model_flop_per_token
from ds_usp.planner.hardware import Cluster, load_cluster
from ds_usp.planner.memory import offload_needed
from ds_usp.planner.models import ModelShape, load_model
from ds_usp.planner.parallel_config import ParallelConfig, Workload, framework_caps
from ds_usp.planner.search import Plan, SearchResult, search

__all__ = [
    "AUTO",
    "LEAST_BUCKET_ELEMENTS",
    "Answer",
    "Choice",
    "Cluster",
    "ModelShape",
    "ParallelConfig",
    "Plan",
    "SearchResult",
    "Workload",
    "answer",
    "bucket_elements",
    "choose_ulysses",
    "cluster_of",
    "degree_or_auto",
    "framework_caps",
    "load_cluster",
    "load_model",
    "model_flop_per_token",
    "offload_needed",
    "search",
]
