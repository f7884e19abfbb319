"""Token by token in torch: what megatron-core's recurrent layers call of mamba_ssm and
flash-linear-attention, which need a GPU.

`install()` makes modules of these names; nothing in here knows of ds_usp."""

import sys
from copy import deepcopy
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """``mamba_ssm.ops.triton.layernorm_gated.RMSNorm``: of groups of features, gated before."""

    def __init__(
        self, size: int, eps: float, group_size: int, norm_before_gate: bool, **factory: Any
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(size, **factory))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        x = x if z is None else x * F.silu(z)
        groups = x.unflatten(-1, (-1, self.group_size))
        scale = (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (groups * scale).flatten(-2) * self.weight


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **unused: Any,
) -> Any:
    """``[b, l, h, p]``, ``[b, l, h]``, ``[h]``, ``[b, l, g, n]`` twice; D ``[h]`` or ``[h, p]``."""
    assert not any(value for value in unused.values() if value is not None), unused
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    repeats = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(repeats, 2), C.repeat_interleave(repeats, 2)
    state = x.new_zeros(*x[:, 0].shape, B.shape[3]) if initial_states is None else initial_states
    out = []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * A).exp()[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        out.append((state * C[:, t, :, None]).sum(-1))
    y = torch.stack(out, 1)
    if D is not None:
        y = y + x * (D if D.ndim == 2 else D[:, None])
    y = y if z is None else y * F.silu(z)
    return (y, state) if return_final_states else y


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    activation: str,
    headdim: int | None,
    ngroups: int,
    norm_before_gate: bool,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """A mixer between its projections, without its norm."""
    assert activation == "silu" and not norm_before_gate and seq_idx is None
    heads = len(A)
    headdim = headdim or D.shape[1]
    inner, conv_dim = heads * headdim, len(conv1d_weight)
    z, xBC, dt = zxbcdt.split([inner, conv_dim, heads], -1)
    taps = conv1d_weight.shape[1]
    xBC = F.pad(xBC.transpose(1, 2), (taps - 1, 0))
    xBC = F.silu(F.conv1d(xBC, conv1d_weight[:, None], conv1d_bias, groups=conv_dim))
    state = (conv_dim - inner) // (2 * ngroups)
    x, B, C = xBC.transpose(1, 2).split([inner, ngroups * state, ngroups * state], -1)
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, headdim)),
        dt,
        A,
        B.unflatten(-1, (ngroups, state)),
        C.unflatten(-1, (ngroups, state)),
        chunk_size,
        D,
        z.unflatten(-1, (heads, headdim)),
        dt_bias,
        dt_softplus=True,
    )
    return y.flatten(2)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``[b, t, h, k]`` twice, ``[b, t, h, v]``, ``[b, t, h]`` twice."""
    assert not use_qk_l2norm_in_kernel
    if cu_seqlens is not None:
        return _of_documents(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = v.new_zeros(*k[:, 0].shape, v.shape[3]) if initial_state is None else initial_state
    out = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None, None] * state
        read = (state * k[:, t, :, :, None]).sum(-2)
        write = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * write[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(-2) * scale)
    return torch.stack(out, 1), state if output_final_state else None


def _of_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """One state a document, of one row of tokens."""
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(x.split(lengths, 1) for x in (q, k, v, g, beta)), strict=True)
    ran = [
        chunk_gated_delta_rule(
            *part, scale, None if initial_state is None else initial_state[i : i + 1], True
        )
        for i, part in enumerate(parts)
    ]
    states = torch.cat([state for _, state in ran if state is not None])
    return torch.cat([out for out, _ in ran], 1), states if output_final_state else None


def l2norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _never(*args: Any) -> None:
    raise AssertionError("a kernel of inference")


INFERENCE = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")
MODULES: dict[str, tuple[Any, ...]] = {
    "mamba_ssm.ops.triton.layernorm_gated": (RMSNorm,),
    "mamba_ssm.ops.triton.ssd_combined": (
        mamba_chunk_scan_combined,
        mamba_split_conv1d_scan_combined,
    ),
    "fla.modules.l2norm": (l2norm,),
    "fla.ops.gated_delta_rule": (chunk_gated_delta_rule,),
}


def install() -> None:
    """Make them importable, before megatron-core looks for them."""
    for name, functions in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                module = sys.modules[parent] = ModuleType(parent)
                module.__spec__ = ModuleSpec(parent, None, is_package=True)
                module.__path__ = []
        for function in functions:
            setattr(sys.modules[name], function.__name__, function)
    # megatron-core's own kernels of inference, which import triton.
    name = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(dict.fromkeys(INFERENCE, _never))


def stack_spec(attention: Any) -> Any:
    """The spec of a hybrid model with layers that need no TransformerEngine, of which a layer with
    attention is given: ``M`` is a Mamba mixer, ``*`` attention, ``E`` a gated delta net in its
    place."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    norm, delta = attention.submodules.input_layernorm, deepcopy(attention)
    mixer = MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm, ModuleSpec(MambaMixer, submodules=mixer), get_bias_dropout_add
    )
    parts = GatedDeltaNetSubmodules(ColumnParallelLinear, norm, RowParallelLinear)
    delta.submodules.self_attention = ModuleSpec(GatedDeltaNet, submodules=parts)
    stack = MambaStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        attention_layer=attention,
        moe_layer=delta,
    )
    return ModuleSpec(MambaStack, params={"post_layer_norm": False}, submodules=stack)
