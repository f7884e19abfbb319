"""Packages that Megatron-LM imports and training does not need, and its data sets' extension."""

from __future__ import annotations

from collections.abc import Callable

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
    """``compile_helpers``, on rank 0: builds outside the checkout, where it was not built in it."""
    missing_modules.load_extension(_HELPERS)
