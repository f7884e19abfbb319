"""Tests of other packages' names and functions, in whatever version of transformers is there."""

import harness

# Imported once by the server that ranks are forked from; what is not installed is skipped by it.
harness.PRELOAD = (
    *harness.PRELOAD,
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "flash_forward_runs",
    "verl_runs",
)
