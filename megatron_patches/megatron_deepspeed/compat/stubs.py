"""Packages that Megatron-DeepSpeed imports and training does not need."""

from __future__ import annotations

import sys
from collections.abc import Callable

from megatron_patches import missing_modules
from megatron_patches.megatron_deepspeed.compat import apex
from megatron_patches.missing_modules import Stub

_HELPERS = "megatron.data.helpers"
_STUBS = (
    Stub(
        "transformers",
        "transformers",
        "tokenizers of Hugging Face: pip install transformers",
        obsolete_after="megatron.tokenizer",
    ),
    Stub(
        "regex",
        "regex",
        "the tokenizer GPT2BPETokenizer: pip install regex",
        obsolete_after="megatron.tokenizer",
    ),
    Stub(
        "six", "six", "the tokenizers of BERT: pip install six", obsolete_after="megatron.tokenizer"
    ),
    Stub(
        "megatron.model.vision.knn_monitor",
        "torchvision",
        "pretraining vision models: pip install torchvision",
    ),
    Stub(
        "deepspeed.compression.compress",
        "deepspeed.compression.compress",
        "compression training, which newer versions of DeepSpeed lack: use deepspeed 0.19.6",
    ),
)


def install_stubs() -> None:
    """Install a stub for every missing package; the checkout must be importable."""
    if _on_cuda() and not missing_modules.exists("apex"):
        sys.modules.update(apex.modules())
    missing_modules.install_stubs(_STUBS)
    missing_modules.install_extension(_HELPERS, "helpers.cpp")


def compile_helpers(original: Callable[[], None]) -> None:
    """``compile_helper``: build the index builder in torch's extension cache instead."""
    missing_modules.load_extension(_HELPERS)


def _on_cuda() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cuda")
