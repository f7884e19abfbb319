"""FlashAttention 2 to 4 and torch's CUDA kernels on CPUs: their signatures, computed in fp64, so
that a wrong argument shows in the results. tests/gpu compares the signatures with real libraries.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ds_usp import testing as oracle

# ------------------------------------------------------------------ signatures

_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_GRADS = "dout q k v out softmax_lse dq dk dv"
_LEFT_RIGHT = "window_size_left window_size_right"
_FLAGS_26 = "dropout_p softmax_scale causal window_size"
_FLAGS_28 = f"dropout_p softmax_scale causal {_LEFT_RIGHT}"
_MORE = "block_table=None leftpad_k=None seqused_k=None"
FORWARD, BACKWARD = "_flash_attn_forward", "_flash_attn_backward"
VARLEN_FORWARD, VARLEN_BACKWARD = "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"
# Of each module at each version, as lambdas' parameters.
SIGNATURES: dict[str, dict[str, str]] = {
    "flash_attn 2.6": {
        FORWARD: f"q k v {_FLAGS_26} softcap alibi_slopes return_softmax",
        BACKWARD: f"{_GRADS} {_FLAGS_26} softcap alibi_slopes deterministic rng_state=None",
        VARLEN_FORWARD: f"q k v {_LENGTHS} {_FLAGS_26}=(-1,-1) softcap=0.0 alibi_slopes=None "
        f"return_softmax=False {_MORE}",
        VARLEN_BACKWARD: f"{_GRADS} {_LENGTHS} {_FLAGS_26} softcap alibi_slopes deterministic "
        "rng_state=None",
    },
    "flash_attn 2.8": {
        FORWARD: f"q k v {_FLAGS_28} softcap alibi_slopes return_softmax",
        BACKWARD: f"{_GRADS} {_FLAGS_28} softcap alibi_slopes deterministic rng_state=None",
        VARLEN_FORWARD: f"q k v {_LENGTHS} dropout_p softmax_scale causal window_size_left=-1 "
        f"window_size_right=-1 softcap=0.0 alibi_slopes=None return_softmax=False {_MORE} "
        "zero_tensors=False",
        VARLEN_BACKWARD: f"{_GRADS} {_LENGTHS} {_FLAGS_28} softcap alibi_slopes deterministic "
        "rng_state=None zero_tensors=False",
    },
    "flash_attn_interface 2025": {
        FORWARD: "q k v k_new v_new out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q "
        "seqused_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos "
        "rotary_sin q_descale k_descale v_descale softmax_scale causal window_size=(-1,-1) "
        "sink_token_length=0 softcap=0.0 rotary_interleaved=True num_splits=1 pack_gqa=None "
        "sm_margin=0",
        BACKWARD: "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k "
        "max_seqlen_q max_seqlen_k dq dk dv softmax_scale causal window_size=(-1,-1) "
        "sink_token_length=0 softcap=0.0 deterministic=False sm_margin=0",
    },
    "flash_attn_interface 2026": {
        FORWARD: "q k v k_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None "
        "max_seqlen_q=None max_seqlen_k=None page_table=None softmax_scale=None causal=False "
        "window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 num_splits=1 "
        "pack_gqa=None sm_margin=0",
        BACKWARD: "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None "
        "sequed_k=None max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None "
        "softmax_scale=None is_causal=False window_size_left=-1 window_size_right=-1 softcap=0.0 "
        "deterministic=False sm_margin=0",
    },
    "flash_attn.cute 4.0": {
        "_flash_attn_fwd": "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None seqused_q=None "
        "seqused_k=None max_seqlen_q=None max_seqlen_k=None * softmax_scale=None causal=False "
        "softcap=None window_size_left=None window_size_right=None return_lse=False",
        "_flash_attn_bwd": "q k v out dout lse softmax_scale=None causal=False softcap=0.0 "
        "window_size_left=None window_size_right=None * cu_seqlens_q=None cu_seqlens_k=None "
        "max_seqlen_q=None max_seqlen_k=None deterministic=False dq=None dk=None dv=None",
    },
}


def signature_of(parameters: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {', '.join(parameters.split())}: None"))


def library(version: str) -> dict[str, Callable[..., Any]]:
    """The functions of a library; from 2.7 on those of FlashAttention-2 and 3 are operators, which
    hide their signature and keep the function that they were."""
    functions = {}
    for name, parameters in SIGNATURES[version].items():
        plain = _function(version, name, signature_of(parameters))
        if version in ("flash_attn 2.8", "flash_attn_interface 2026"):

            def operator(*args: Any, _init_fn: Any = plain, **kwargs: Any) -> Any:
                return _init_fn(*args, **kwargs)

            operator._init_fn = plain  # type: ignore[attr-defined]
            functions[name] = operator
        else:
            functions[name] = plain
    return functions


def _function(version: str, name: str, signature: inspect.Signature) -> Callable[..., Any]:
    compute = _forward if name.endswith(("forward", "fwd")) else _backward

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        for unused in values.keys() - _READ:
            default = signature.parameters[unused].default
            assert values[unused] in (None, False, 0.0, default), (unused, values[unused])
        assert values.get("num_splits", 1) == 1 and values.get("return_lse", True)
        passed = [values.get(length) is not None for length in _LENGTHS.split()]
        assert all(passed) if "varlen" in name else all(passed) == any(passed)
        return compute(version, values)

    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__qualname__ = name
    return function


# ------------------------------------------------------------------ what they compute

_READ = {
    *f"{_LENGTHS} {_GRADS} {_LEFT_RIGHT} window_size lse softmax_scale causal is_causal softcap "
    "deterministic num_splits return_lse".split()
}  # fmt: skip


def _forward(version: str, a: dict[str, Any]) -> tuple[Any, ...]:
    out, lse = attend(a, version)
    return (
        (out, *[None] * 4, lse, None, None) if version.endswith("2.6") else (out, lse, None, None)
    )


def _backward(version: str, a: dict[str, Any]) -> tuple[Tensor, ...]:
    assert a["deterministic"] == torch.are_deterministic_algorithms_enabled()
    grouped = a["q"].shape[-2] != a["k"].shape[-2]
    assert "cute" not in version or not grouped or a["k"].shape[-1] == a["v"].shape[-1]
    grads = gradients(a, version)
    buffers = [a[name] for name in ("dq", "dk", "dv")]
    assert "cute" in version or all(buffer is not None for buffer in buffers)
    pairs = list(zip(buffers, grads, strict=True))
    assert all(buffer is None or buffer.dtype == grad.dtype for buffer, grad in pairs)
    return tuple(grad if buffer is None else buffer.copy_(grad) for buffer, grad in pairs)


def visible(version: str, a: dict[str, Any], rows: int, columns: int, max_k: int) -> Tensor:
    """The mask of a version's arguments, aligned to the bottom right: ``[rows, columns]`` bool."""
    causal = a["causal"] if "causal" in a else a["is_causal"]
    left, right = a.get("window_size") or (a["window_size_left"], a["window_size_right"])
    if "cute" in version:
        assert not causal or (left, right) == (None, None)
    elif version.startswith("flash_attn_interface"):
        left, right = (None if bound < 0 else bound for bound in (left, right))
    else:  # FlashAttention-2: a bound of all keys or more is none; none beside a bound is all keys
        left, right = (-1 if bound >= max_k else bound for bound in (left, right))
        right = 0 if causal else right
        either = left >= 0 or right >= 0
        left, right = ((max_k if either else None) if x < 0 else x for x in (left, right))
    right = 0 if causal else right
    return oracle.window(range(columns - rows, columns), range(columns), left, right)


def sequences(x: Tensor, cu_seqlens: Tensor | None, longest: int | None) -> list[Tensor]:
    """``[S, heads, D]`` of each sample, or of each sequence of a varlen call."""
    assert x.stride(-1) == 1 and x.shape[-1] % 8 == 0
    if cu_seqlens is None:
        assert longest in (None, x.shape[1])
        return list(x)
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens[0] == 0 and cu_seqlens[-1] == len(x)
    spans = list(pairwise(cu_seqlens.tolist()))
    assert max(stop - start for start, stop in spans) == longest
    assert all(stop > start for start, stop in spans), "libraries differ in what is empty"
    return [x[start:stop] for start, stop in spans]


def joined(outputs: list[Tensor], packed: bool, dim: int = 0) -> Tensor:
    return torch.cat(outputs, dim) if packed else torch.stack(outputs)


def scores(q: Tensor, k: Tensor, scale: float, mask: Tensor, softcap: float) -> Tensor:
    """``[H, rows, columns]`` in fp64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("shd,thd->hst", q.double(), k.double()).mul(scale)
    return (softcap * (logits / softcap).tanh() if softcap else logits).where(mask, -math.inf)


def sides(a: dict[str, Any], *names: str) -> Iterator[tuple[Tensor, ...]]:
    """The sequences of some tensors, each with its lengths of queries or keys."""
    lengths = {x: (a.get(f"cu_seqlens_{x}"), a.get(f"max_seqlen_{x}")) for x in "qk"}
    sides = [sequences(a[name], *lengths["k" if name in "kv" else "q"]) for name in names]
    return zip(*sides, strict=True)


def attend(a: dict[str, Any], version: str) -> tuple[Tensor, Tensor]:
    """Out in the queries' dtype, and the natural log-sum-exp in fp32."""
    packed, outs, lses = a.get("cu_seqlens_q") is not None, [], []
    longest = a.get("max_seqlen_k") or a["k"].shape[1]
    for q, k, v in sides(a, "q", "k", "v"):
        mask = visible(version, a, len(q), len(k), longest)
        logits = scores(q, k, a["softmax_scale"], mask, a.get("softcap") or 0.0)
        lse = logits.logsumexp(-1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1).double()
        outs.append(torch.einsum("hst,thd->shd", (logits - lse[..., None]).exp(), v).to(q.dtype))
        lses.append(lse.float())
    return joined(outs, packed), joined(lses, packed, 1)


def gradients(a: dict[str, Any], version: str) -> tuple[Tensor, ...]:
    """From the output and log-sum-exp that are passed, of whichever keys these are."""
    packed, grads = a.get("cu_seqlens_q") is not None, []
    longest = a.get("max_seqlen_k") or a["k"].shape[1]
    softcap, scale = a.get("softcap") or 0.0, a["softmax_scale"]
    lse = a["softmax_lse"] if "softmax_lse" in a else a["lse"]
    heads, tokens = a["q"].shape[-2], a["q"].shape[:-2]
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    assert lse.shape == ((heads, *tokens) if packed else (tokens[0], heads, *tokens[1:]))
    start = 0
    for index, (dout, q, k, v, out) in enumerate(sides(a, "dout", "q", "k", "v", "out")):
        rows = lse[:, start : start + len(q)] if packed else lse[index]
        start += len(q)
        mask = visible(version, a, len(q), len(k), longest)
        capped = scores(q, k, scale, mask, softcap)
        weights = (capped - rows.double()[..., None]).exp()
        keys, values = (x.repeat_interleave(heads // x.shape[1], 1).double() for x in (k, v))
        delta = (dout.double() * out.double()).sum(-1).T[..., None]
        dscores = (
            torch.einsum("shd,thd->hst", dout.double(), values).sub(delta).mul(weights) * scale
        )
        if softcap:
            dscores = dscores * (1 - (capped / softcap) ** 2).where(mask, 0.0)
        dq = torch.einsum("hst,thd->shd", dscores, keys)
        dk = torch.einsum("hst,shd->thd", dscores, q.double()).unflatten(1, (k.shape[1], -1))
        dv = torch.einsum("hst,shd->thd", weights, dout.double()).unflatten(1, (k.shape[1], -1))
        grads.append((dq.to(q.dtype), dk.sum(2).to(k.dtype), dv.sum(2).to(v.dtype)))
    return tuple(joined(list(x), packed) for x in zip(*grads, strict=True))


# ------------------------------------------------------------------ torch's own, by their schemas


def torch_flash_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, **unused,
):  # fmt: skip
    assert (dropout_p, return_debug_mask) == (0.0, False) and not any(unused.values())
    a = torch_args(q, k, v, (cu_q, cu_k, max_q, max_k), is_causal, scale)
    out, lse = attend({**a, "window_size": bounds(window_size_left, window_size_right)}, "torch")
    return out, lse, *(q.new_empty(0) for _ in range(3))


def torch_flash_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert dropout_p == 0.0
    a = torch_args(q, k, v, (cu_q, cu_k, max_q, max_k), is_causal, scale)
    a |= {"dout": dout, "out": out, "lse": lse}
    return gradients({**a, "window_size": bounds(window_size_left, window_size_right)}, "torch")


def torch_args(q, k, v, lengths, causal, scale):
    a = dict(zip(_LENGTHS.split(), lengths, strict=True))
    return {**a, "q": q, "k": k, "v": v, "causal": causal, "softmax_scale": scale}


def bounds(*window: int | None) -> list[int]:
    return [-1 if bound is None else bound for bound in window]


def check_efficient(mask_type: int, *tensors: Tensor) -> dict[str, Any]:
    """Causal masks: 1 from the top left, 2 from the bottom right, 0 none."""
    assert mask_type in (0, 2)
    assert len({x.shape[2] for x in tensors}) == 1, "no grouped heads"
    for x in tensors:
        assert x.data_ptr() % 16 == 0
        assert not any(stride * x.element_size() % 16 for stride in x.stride()[:3])
    return {"causal": mask_type == 2, "window_size_left": None, "window_size_right": None}


def torch_efficient_forward(
    q, k, v, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    custom_mask_type, compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    unused = (bias, cu_seqlens_q, cu_seqlens_k, seqlen_k, window_size)
    assert all(x is None for x in unused) and not dropout_p and compute_log_sumexp
    a = check_efficient(custom_mask_type, q, k, v)
    out, lse = attend({**a, "q": q, "k": k, "v": v, "softmax_scale": scale}, "cute")
    lse = torch.nn.functional.pad(lse, (0, -q.shape[1] % 32), value=math.inf)
    return out, lse, q.new_empty(0), q.new_empty(0), q.shape[1], k.shape[1]


def torch_efficient_backward(
    dout, q, k, v, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, lse,
    dropout_p, philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *, scale=None,
    num_splits_key=None, window_size=None, shared_storage_dqdkdv=False,
):  # fmt: skip
    unused = (bias, cu_seqlens_q, cu_seqlens_k, num_splits_key, window_size)
    assert all(x is None for x in unused) and not dropout_p and not bias_requires_grad
    a = check_efficient(custom_mask_type, q, k, v, dout, out)
    rows = q.shape[1]
    assert (max_seqlen_q, max_seqlen_k) == (rows, k.shape[1]) and out.is_contiguous()
    assert lse.is_contiguous() and lse.shape[2] == rows + -rows % 32
    assert bool((lse[:, :, rows:] == math.inf).all())
    a |= {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse[:, :, :rows].contiguous()}
    return *gradients({**a, "softmax_scale": scale}, "cute"), q.new_empty(0)


ATEN = {
    "_flash_attention_forward": torch_flash_forward,
    "_flash_attention_backward": torch_flash_backward,
    "_efficient_attention_forward": torch_efficient_forward,
    "_efficient_attention_backward": torch_efficient_backward,
}
