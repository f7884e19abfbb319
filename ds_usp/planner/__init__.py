"""Which degrees, how fast, will it fit: sums on paper, before a GPU is asked.

Geometry and the standard library only; ``python -m ds_usp.planner`` is the way in for people.
"""

from ds_usp.planner.engines import engine
from ds_usp.planner.explain import explain
from ds_usp.planner.hardware import Cluster, load_cluster
from ds_usp.planner.models import ModelShape, load_model
from ds_usp.planner.search import Found, Plan, search
from ds_usp.planner.split import Split, Workload

__all__ = [
    "Cluster",
    "Found",
    "ModelShape",
    "Plan",
    "Split",
    "Workload",
    "engine",
    "explain",
    "load_cluster",
    "load_model",
    "search",
]
