"""Lets Megatron-DeepSpeed start with current torch and CUDA, without apex, or on CPUs: stubs of
missing packages, and patches. Where no docstring says otherwise, a function runs once, when a rank
starts, and communicates nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_patches import missing_modules
from megatron_patches.guards import source_guard
from megatron_patches.missing_modules import Stub
from megatron_patches.patch import Patch

# ------------------------------------------------------------------------------------------------
# The functions of apex that Megatron-DeepSpeed uses on GPUs, in plain torch.


class MixedFusedRMSNorm(torch.nn.RMSNorm):
    """``apex.normalization.MixedFusedRMSNorm`` with Megatron-DeepSpeed's extra keyword."""

    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, sequence_parallel: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class FusedLayerNormAffineFunction:
    """The interface of apex's autograd function; torch differentiates it."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, shape: Sequence[int], eps: float
    ) -> Tensor:
        """``torch.nn.functional.layer_norm``."""
        return F.layer_norm(x, list(shape), weight, bias, eps)

    apply = forward


def multi_tensor_applier(
    op: Callable[..., Any], overflow: Tensor, tensors: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    """``apex.multi_tensor_apply.multi_tensor_applier``."""
    return op(overflow, tensors, *args)


def multi_tensor_l2norm(
    overflow: Tensor, tensors: Sequence[Sequence[Tensor]], per_parameter: bool
) -> tuple[Tensor, Tensor]:
    """``amp_C.multi_tensor_l2norm``: the norm of all of ``tensors[0]``, and each one's, always."""
    norms = torch.stack(torch._foreach_norm([x.float() for x in tensors[0]]))
    return norms.norm(), norms


def multi_tensor_scale(overflow: Tensor, tensors: Sequence[Sequence[Tensor]], scale: float) -> None:
    """``amp_C.multi_tensor_scale``: the second list becomes the first times ``scale``."""
    for source, target in zip(*tensors, strict=True):
        target.copy_(source * scale)


def apex_modules() -> dict[str, ModuleType]:
    """Replacements of apex's modules by name, ready for ``sys.modules``."""
    contents: dict[str, dict[str, Any]] = {
        "apex": {"__path__": []},
        "apex.normalization": {"__path__": [], "MixedFusedRMSNorm": MixedFusedRMSNorm},
        "apex.normalization.fused_layer_norm": {
            "FusedLayerNormAffineFunction": FusedLayerNormAffineFunction
        },
        "apex.optimizers": {
            "FusedAdam": partial(torch.optim.AdamW, fused=True),
            "FusedSGD": partial(torch.optim.SGD, fused=True),
        },
        "apex.multi_tensor_apply": {"multi_tensor_applier": multi_tensor_applier},
        "amp_C": {
            "multi_tensor_l2norm": multi_tensor_l2norm,
            "multi_tensor_scale": multi_tensor_scale,
        },
        "fused_layer_norm_cuda": {},
    }
    stubs = {}
    for name, names in contents.items():
        stubs[name] = ModuleType(name, "Stub of ds_usp.")
        stubs[name].__spec__ = ModuleSpec(name, None)  # find_spec() of other libraries
        vars(stubs[name]).update(names)
    return stubs


# ------------------------------------------------------------------------------------------------
# Functions of Megatron-DeepSpeed that fail with current torch and CUDA, or without GPUs.


_LAST_CUDA_WITH_VOLTA = 12


def switch_off_missing_fusions(args: Any) -> None:
    """Switch off up to three of Megatron's fusions in parsed ``args``, whatever the flags."""
    # Torch no longer fuses this TorchScript, and for a dropout of 0 it still draws random numbers
    # and saves a mask and all inputs for backward.
    args.bias_dropout_fusion = False
    if not _can_build():
        args.masked_softmax_fusion = False
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:  # of apex
        args.gradient_accumulation_fusion = False


def load_fused_kernels(original: Callable[[Any], None], args: Any) -> None:
    """``fused_kernels.load``, where a CUDA compiler accepts its flags."""
    if _can_build():
        original(args)


def set_jit_fusion_options(original: Callable[[], None]) -> None:
    """``set_jit_fusion_options``, whose nvfuser switches newer torch lacks."""
    if hasattr(torch._C, "_jit_set_nvfuser_enabled"):
        original()


def initialize_distributed(original: Callable[[], None]) -> None:
    """``_initialize_distributed``, collective; then ``args.local_rank`` of CPU ranks is that of the
    launcher: the original takes it from NUMA nodes, which DeepSpeed's engine refuses."""
    from megatron import get_args

    original()
    if device_name() == "cpu":
        args = get_args()
        args.local_rank = dist.get_node_local_rank(fallback_rank=args.local_rank)


def _can_build() -> bool:
    """Whether the installed CUDA compiler still targets Volta."""
    from torch.utils import cpp_extension

    # The compiler flags name Volta, which CUDA 13 dropped.
    cuda = int((torch.version.cuda or "0").split(".")[0])
    return cpp_extension.CUDA_HOME is not None and 0 < cuda <= _LAST_CUDA_WITH_VOLTA


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
    if device_name() == "cuda" and not missing_modules.exists("apex"):
        sys.modules.update(apex_modules())
    missing_modules.install_stubs(_STUBS)
    missing_modules.install_extension(_HELPERS, "helpers.cpp")


def compile_helpers(original: Callable[[], None]) -> None:
    """``compile_helper``: build the index builder in torch's extension cache instead, on rank 0."""
    missing_modules.load_extension(_HELPERS)


def device_name() -> str:
    """The type of DeepSpeed's accelerator: ``cuda``, ``cpu``."""
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


wrap = partial(Patch, kind="wrap", purpose="To start with current packages, or without GPUs")


def patches() -> tuple[Patch, ...]:
    """The patches, in the order of application."""
    return (
        wrap(
            "megatron.initialize:_initialize_distributed",
            initialize_distributed,
            guard=source_guard("b6139f69e8c1b6ee"),
            reason="without GPUs: sets the local rank by NUMA nodes, which DeepSpeed refuses",
        ),
        wrap(
            "megatron.data.dataset_utils:compile_helper",
            compile_helpers,
            guard=source_guard("cba729e752fc3c35"),
            reason="builds the index builder outside the checkout, without a pybind11 package",
        ),
        wrap(
            "megatron.fused_kernels:load",
            load_fused_kernels,
            guard=source_guard("5f24da30565fcba1"),
            reason="its compiler flags (sm_70) fail on CUDA 13; skipped there",
        ),
        wrap(
            "megatron.initialize:set_jit_fusion_options",
            set_jit_fusion_options,
            also_in=("megatron.training:set_jit_fusion_options",),
            guard=source_guard("8ada37e0af672f08"),
            reason="sets nvfuser switches that newer torch lacks",
        ),
    )
