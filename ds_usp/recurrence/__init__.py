"""Layers that carry a state from token to token, over a sharded sequence."""

from ds_usp.recurrence.recurrences import delta_rule, mamba2

__all__ = ["delta_rule", "mamba2"]
