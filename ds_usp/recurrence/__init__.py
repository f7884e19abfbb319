"""Layers that carry a state from token to token, over a sharded sequence."""
