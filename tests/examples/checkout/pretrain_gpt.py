# Stands for Megatron-DeepSpeed's where a dry run looks for a checkout.
