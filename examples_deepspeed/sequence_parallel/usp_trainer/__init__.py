"""The trainer of ``pretrain_gpt_usp.py``, one story a file."""
