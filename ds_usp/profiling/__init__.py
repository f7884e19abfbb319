"""Measures a machine for the planner: kernels, links, layers; on several ranks collectively."""

from ds_usp.profiling.layers import layer_times
from ds_usp.profiling.profile import profile
from ds_usp.profiling.step_timer import StepTimer

__all__ = ["StepTimer", "layer_times", "profile"]
