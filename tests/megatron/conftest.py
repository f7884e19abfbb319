"""Tests of the trainer and of what is patched in megatron-core and DeepSpeed."""

import harness

# Imported once by the server that ranks are forked from: alone, each rank takes 0.1 s to 0.2 s.
harness.PRELOAD = (
    *harness.PRELOAD,
    "trainer_runs",  # puts the trainer on the path
    "compared_sources",
    "pretrain_gpt_usp",
    "pydoc_data.topics",
    "stock_megatron_core",
    "deepspeed.sequence.layer",
)
