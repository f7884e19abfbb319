"""The server that forks worlds of Megatron-DeepSpeed, where a checkout of it is named."""

from checkout_runs import fixtures

checkout, server, pytest_collection_modifyitems = fixtures(
    "mds_adapter", "MEGATRON_DEEPSPEED_PATH", "megatron_deepspeed"
)
