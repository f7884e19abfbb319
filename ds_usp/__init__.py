"""ds_usp: Unified Sequence Parallel (Ring Attention x DeepSpeed-Ulysses), exact or refused."""
