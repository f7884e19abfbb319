"""The patches of machines without a GPU, for megatron-core and for Megatron-LM's training loop;
``PatchSet`` leaves them out where there is one, but for those of ``without_apex.py``."""

from __future__ import annotations

from functools import partial

from megatron_patches.guards import megatron_core_guard, source_guard
from megatron_patches.megatron_core import cpu_fallbacks, without_apex
from megatron_patches.patch import Patch

_PURPOSE = "Without a GPU"
_wrap = partial(Patch, kind="wrap", without_gpu=True, purpose=_PURPOSE)
_replace = partial(Patch, kind="replace", without_gpu=True, purpose=_PURPOSE)
_FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "eye", "linspace"),
    *("rand", "randn", "randint", "empty_like", "zeros_like", "ones_like"),
    *("full_like", "rand_like", "randn_like"),
)
_RANDOM = "megatron.core.tensor_parallel.random"
_INITIALIZE = "megatron.training.initialize"


def without_gpu() -> tuple[Patch, ...]:
    """ "cuda" means the CPU: torch, and megatron-core's random states. The rows of
    :mod:`without_apex` are among them, which apply with a GPU too."""
    p2p = _wrap(
        "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
        cpu_fallbacks.p2p_ops,
        guard=megatron_core_guard("c1708840a6b63c32"),
        reason="the schedule frees outputs whose sends are in flight, which gloo still reads",
    )
    splits = _wrap(
        "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        cpu_fallbacks.move_to_host,
        also_in=("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",),
        guard=megatron_core_guard("12f153572964a09b"),
        reason="leaves the sizes of the experts' all-to-alls, which are on the CPU already, as "
        "tensors, which gloo's all-to-all does not take",
    )
    return (*_tensors(), *_streams(), *_random_states(), p2p, splits, *without_apex.patches())


def training_without_gpu() -> tuple[Patch, ...]:
    """Megatron-LM's training loop, beside :func:`without_gpu`."""
    return (
        _wrap(
            f"{_INITIALIZE}:initialize_megatron",
            cpu_fallbacks.initialize_megatron,
            guard=source_guard("45ba58a56c2e051f"),
            also_in=(
                "megatron.training.training:initialize_megatron",
                "megatron.training:initialize_megatron",
            ),
            reason="asserts that there is a GPU",
        ),
        _wrap(
            f"{_INITIALIZE}:_initialize_distributed",
            cpu_fallbacks.with_one_device,
            guard=source_guard("fef4857cb6c0eb47"),
            reason="makes no groups where it counts no GPU",
        ),
        _wrap(
            f"{_INITIALIZE}:_set_random_seed",
            cpu_fallbacks.with_one_device,
            guard=source_guard("a21efeb519781bd0"),
            reason="seeds no random states where it counts no GPU",
        ),
        _wrap(
            "megatron.training.utils:get_device_arch_version",
            cpu_fallbacks.architecture,
            guard=source_guard("40859c655bbed9e2"),
            also_in=("megatron.training.arguments:get_device_arch_version",),
            reason="asks CUDA; decides whether CUDA_DEVICE_MAX_CONNECTIONS=1 is demanded",
        ),
        _wrap(
            f"{_INITIALIZE}:set_jit_fusion_options",
            cpu_fallbacks.nothing,
            also_in=("megatron.training.training:set_jit_fusion_options",),
            guard=source_guard("ff3d3ec4c77d43e7"),
            reason="compiles fused functions, used or not",
        ),
        _wrap(
            "megatron.legacy.fused_kernels:load",
            cpu_fallbacks.nothing,
            guard=source_guard("923b6f4e4a433618"),
            reason="asks nvcc for its version",
        ),
    )


def _tensors() -> tuple[Patch, ...]:
    return (
        *(
            _wrap(f"torch:{name}", cpu_fallbacks.create, reason="makes tensors on CUDA")
            for name in _FACTORIES
        ),
        _wrap("torch:Tensor.to", cpu_fallbacks.to, reason="moves tensors to CUDA"),
        _wrap("torch:Tensor.cuda", cpu_fallbacks.to_cuda, reason="moves tensors to CUDA"),
        _wrap("torch:Tensor.pin_memory", cpu_fallbacks.to_cuda, reason="needs CUDA"),
        _wrap(
            "torch:Tensor.type",
            cpu_fallbacks.type_name,
            reason="Megatron's optimizers want weights whose type is torch.cuda.FloatTensor",
        ),
    )


def _streams() -> tuple[Patch, ...]:
    reason = "nothing to wait for"
    return (
        _wrap(
            "torch.cuda:current_device",
            cpu_fallbacks.current_device,
            also_in=("torch.cuda.random:current_device",),
            reason="the device of buffers and rotary frequencies",
        ),
        _wrap("torch.cuda:set_device", cpu_fallbacks.nothing, reason=reason),
        _wrap("torch.cuda:synchronize", cpu_fallbacks.nothing, reason=reason),
        *(
            _replace(
                f"torch.cuda:{kind.__name__}",
                kind,
                also_in=(f"torch.cuda.streams:{kind.__name__}",),
                reason=reason,
            )
            for kind in (cpu_fallbacks.Stream, cpu_fallbacks.Event)
        ),
        _wrap("torch.cuda:current_stream", cpu_fallbacks.current_stream, reason=reason),
        _wrap("torch.cuda:default_stream", cpu_fallbacks.current_stream, reason=reason),
        _wrap("torch.cuda:stream", cpu_fallbacks.stream_context, reason=reason),
    )


def _random_states() -> tuple[Patch, ...]:
    reason = "there is no CUDA generator; initialization, dropout and recomputation ask for it"
    of_torch = (
        _wrap(f"torch.cuda.random:{name}", function, also_in=(f"torch.cuda:{name}",), reason=reason)
        for name, function in (
            ("get_rng_state", cpu_fallbacks.get_random_state),
            ("set_rng_state", cpu_fallbacks.set_random_state),
            ("manual_seed", cpu_fallbacks.seed),
        )
    )
    return (
        *of_torch,
        _wrap(
            f"{_RANDOM}:_set_cuda_rng_state",
            cpu_fallbacks.set_random_state,
            guard=megatron_core_guard("3e3539caa0117e64"),
            reason=reason,
        ),
        _wrap(
            f"{_RANDOM}:CudaRNGStatesTracker.fork",
            cpu_fallbacks.fork_random_state,
            guard=megatron_core_guard("7e6ef87700cf958d"),
            reason="warns that the CPU's generator was used, which is the only one",
        ),
    )
