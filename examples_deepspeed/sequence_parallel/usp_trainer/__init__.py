"""The trainer behind ``pretrain_gpt_usp.py``: megatron-core layers in DeepSpeed's engine."""
