"""Adapters that put ds_usp into Megatron's training stacks, from outside and without edits."""
