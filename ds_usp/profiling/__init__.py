"""Reports where a step's time goes; collective."""

from ds_usp.profiling import exposed

__all__ = ["exposed"]
