"""What Megatron-DeepSpeed needs to start with current torch and CUDA, without apex, or on CPUs.

It has nothing to do with sequence parallelism: stubs of missing packages, and these patches.
"""

from __future__ import annotations

from functools import partial

from megatron_patches.guards import source_guard
from megatron_patches.megatron_deepspeed.compat import runtime, stubs
from megatron_patches.patch import Patch

wrap = partial(Patch, kind="wrap", purpose="To start with current packages, or without GPUs")


def patches() -> tuple[Patch, ...]:
    """The patches, in the order of application."""
    return (
        wrap(
            "megatron.initialize:_initialize_distributed",
            runtime.initialize_distributed,
            guard=source_guard("b6139f69e8c1b6ee"),
            reason="without GPUs: sets the local rank by NUMA nodes, which DeepSpeed refuses",
        ),
        wrap(
            "megatron.data.dataset_utils:compile_helper",
            stubs.compile_helpers,
            guard=source_guard("cba729e752fc3c35"),
            reason="builds the index builder outside the checkout, without a pybind11 package",
        ),
        wrap(
            "megatron.fused_kernels:load",
            runtime.load_fused_kernels,
            guard=source_guard("5f24da30565fcba1"),
            reason="its compiler flags (sm_70) fail on CUDA 13; skipped there",
        ),
        wrap(
            "megatron.initialize:set_jit_fusion_options",
            runtime.set_jit_fusion_options,
            also_in=("megatron.training:set_jit_fusion_options",),
            guard=source_guard("8ada37e0af672f08"),
            reason="sets nvfuser switches that newer torch lacks",
        ),
    )
