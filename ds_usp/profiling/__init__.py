"""Measures a machine for the planner: kernels, links, layers. Collective where there are ranks."""

from ds_usp.profiling.clock import Clock
from ds_usp.profiling.layers import layer_times
from ds_usp.profiling.profile import profile

__all__ = ["Clock", "layer_times", "profile"]
