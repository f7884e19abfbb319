"""Packages that Megatron-LM imports and training does not need, and its data sets' extension."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron_patches import missing_modules
from megatron_patches.missing_modules import Stub

_HELPERS = "megatron.core.datasets.helpers_cpp"
_TOKENIZERS = "megatron.training.tokenizer.tokenizer"
_STUBS = (
    Stub("six", "six", "the tokenizers of BERT: pip install six", obsolete_after=_TOKENIZERS),
    Stub("regex", "regex", "the tokenizer GPT2BPETokenizer: pip install regex", _TOKENIZERS),
    Stub(
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        "triton",
        "--batch-invariant-mode: pip install triton",
    ),
    Stub("megatron.training.yaml_arguments", "yaml", "--yaml-cfg: pip install pyyaml"),
)


def install() -> None:
    """Install a stub for every missing package; the checkout must be importable."""
    missing_modules.install_stubs(_STUBS)
    missing_modules.install_extension(_HELPERS, "helpers.cpp")


def compile_helpers(original: Callable[[], None]) -> None:
    """``compile_helpers``: builds outside the checkout, where it was not built in it."""
    missing_modules.load_extension(_HELPERS)


def results_queue(original: Callable[[], Any]) -> Any:
    """``_get_write_results_queue``: its process does not import the training script, which would
    start without the stubs; it needs nothing of it."""
    main: dict[str, Any] = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {
        name: main.pop(name) for name in ("__file__", "__spec__") if name in main
    }
    try:
        return original()
    finally:
        main.update(hidden)
