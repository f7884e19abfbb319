"""ds_usp in an unedited checkout of Megatron-DeepSpeed."""
