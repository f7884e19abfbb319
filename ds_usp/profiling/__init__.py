"""Measures a machine for the planner, and reports where a step's time goes; collective."""

from ds_usp.profiling import exposed
from ds_usp.profiling.profile import layer_times, profile
from ds_usp.profiling.step_timer import StepTimer
from ds_usp.profiling.this_machine import solved_ratio, this_cluster

__all__ = ["StepTimer", "exposed", "layer_times", "profile", "solved_ratio", "this_cluster"]
