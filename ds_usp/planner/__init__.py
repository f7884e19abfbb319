"""Which degrees, how fast, will it fit: sums on paper, before a GPU is asked.

Geometry and the standard library only; ``python -m ds_usp.planner`` is the way in for people.
"""

from ds_usp.planner.choose_degree import AUTO, Choice, choose_ulysses, cluster_of, degree_or_auto
from ds_usp.planner.explain import explain
from ds_usp.planner.formulas import model_flop_per_token
from ds_usp.planner.frameworks import engine
from ds_usp.planner.hardware import Cluster, load_cluster
from ds_usp.planner.model_files import load_model
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import Split, Workload
from ds_usp.planner.search import Found, Plan, search

__all__ = [
    "AUTO",
    "Choice",
    "Cluster",
    "Found",
    "ModelShape",
    "Plan",
    "Split",
    "Workload",
    "choose_ulysses",
    "cluster_of",
    "degree_or_auto",
    "engine",
    "explain",
    "load_cluster",
    "load_model",
    "model_flop_per_token",
    "search",
]
