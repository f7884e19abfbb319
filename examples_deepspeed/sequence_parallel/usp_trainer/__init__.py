"""The trainer behind ``pretrain_gpt_usp.py``: megatron-core layers, DeepSpeed's engine, USP."""
