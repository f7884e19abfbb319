"""``projected_attention``: self-attention with its projections, each chunk of heads projected just
before it is exchanged.

Letters of the shapes as in :mod:`ds_usp.attention.projection`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from ds_usp.attention.functional import usp_attention
from ds_usp.attention.passes import NO_KV
from ds_usp.attention.plan import AttentionOptions, SavedChunk, check_on_all_ranks, plan_call
from ds_usp.attention.projected_backward import Needed, ProjectedBackward
from ds_usp.attention.projected_forward import Inputs, ProjectedForward
from ds_usp.attention.projected_plan import ProjectedPlan
from ds_usp.attention.projection import Geometry, Projection
from ds_usp.attention.rotary import Rotary, check_local_rotary, rotate
from ds_usp.attention.score_mod import NO_SCORE_MOD, Scores
from ds_usp.attention.tuning import AUTO_TUNING, Tuning
from ds_usp.comm.call_record import Signature
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, UnsupportedAttentionError, warn_once
from ds_usp.geometry.heads import HeadSplit
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.kernels.registry import AUTO
from ds_usp.kernels.rotary_positions import RotaryPositions
from ds_usp.lowlevel import refuse_second_derivative
from ds_usp.memory.saved_attention import is_saving

Keep = Literal["arrivals", "input"]
KEEPS = ("arrivals", "input")


class _Call(NamedTuple):
    """A call besides its tensors.

    Attributes:
        biases: of queries, keys and values.
        out_bias, rotary: there is one.
        positions: rotary is :class:`RotaryPositions`.
        grad_enabled: the caller's grad mode.
    """

    mesh: SequenceMesh
    plan: ProjectedPlan
    scores: Scores
    biases: bool
    out_bias: bool
    rotary: bool
    positions: bool
    grad_enabled: bool


class ProjectedAttention(torch.autograd.Function):
    """Attention from the layer's input to the output of its last projection."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> torch.Tensor:
        """x ``[b, s, c]`` -> ``[b, s, c_out]``; for the tensors see :func:`_unpack`."""
        mesh, plan, scores = call.mesh, call.plan, call.scores
        save = call.grad_enabled and any(ctx.needs_input_grad)
        inputs, _ = _unpack(call, tensors)
        stand_ins = _stand_ins(inputs.x, plan.geometry)
        run = ProjectedForward(plan, scores, inputs, stand_ins, save=save)
        run.execute(plan.attention.forward)
        if save:
            out = run.out.flatten(2)
            if scores.sinks is not None:  # autograd keeps them
                scores = replace(scores, sinks=None)
            ctx.call = call._replace(scores=scores)
            ctx.call_number, ctx.is_on_cpu = mesh.consistency.number, inputs.x.device.type == "cpu"
            ctx.num_tensors = len(tensors)
            ctx.save_for_backward(*tensors, out, *_pack_saved(plan, run.saved))
        return run.y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of all tensors; see :class:`ProjectedBackward`."""
        refuse_second_derivative("projected_attention", UnsupportedAttentionError)
        call: _Call = ctx.call
        mesh, plan = call.mesh, call.plan
        mesh.consistency.check_backward(ctx.call_number, wait=ctx.is_on_cpu)
        all_saved = ctx.saved_tensors  # once, or hooks would unpack them again
        tensors, (out, *of_chunks) = all_saved[: ctx.num_tensors], all_saved[ctx.num_tensors :]
        saved = _unpack_saved(plan, of_chunks, out)
        inputs, sinks = _unpack(call, tensors)
        scores = call.scores if sinks is None else replace(call.scores, sinks=sinks)
        names = _names(call)
        needs = dict.fromkeys(Needed.__dataclass_fields__, False)
        for name, need in zip(names, ctx.needs_input_grad[1:], strict=False):
            if name in needs:
                needs[name] |= need
        # Under autocast products would change dtype, which is the plan's in every exchange.
        with torch.autocast(inputs.x.device.type, enabled=False):
            run = ProjectedBackward(plan, scores, inputs, Needed(**needs), dy, out, saved)
            run.execute(plan.attention.backward)
        results, grads = run.results, list[torch.Tensor | None]()
        weights, biases = iter(results.weights or ()), iter(results.biases or ())
        for name in names:
            if name == "x":
                grads.append(None if results.x is None else results.x.view(inputs.x.shape))
            elif name in ("weights", "biases"):
                grads.append(next(weights if name == "weights" else biases, None))
            elif name == "sinks":
                grads.append(run.dsinks)
            else:
                grads.append({"out": results.out, "out_bias": results.out_bias}.get(name))
        return None, *grads


def _names(call: _Call) -> list[str]:
    """What each tensor of a call is, in their order."""
    count = call.plan.geometry.num_weights
    names = ["x", *["weights"] * count, *["biases"] * (count if call.biases else 0), "out"]
    names += ["out_bias"] if call.out_bias else []
    return [*names, *(["cos", "sin"] if call.rotary else []), "sinks"]


def _unpack(call: _Call, tensors: Sequence[torch.Tensor]) -> tuple[Inputs, torch.Tensor | None]:
    """The inputs and the sinks, of the tensors of a call."""
    by_name: dict[str, list[torch.Tensor]] = {}
    for name, x in zip(_names(call), tensors, strict=False):  # without sinks it has no last one
        by_name.setdefault(name, []).append(x)
    rotary: Rotary | None = (by_name["cos"][0], by_name["sin"][0]) if call.rotary else None
    if rotary is not None and call.positions:
        rotary = RotaryPositions(*rotary)
    (x,), (out,) = by_name["x"], by_name["out"]
    weights, biases = tuple(by_name["weights"]), tuple(by_name.get("biases", ()))
    out_bias, sinks = (by_name.get(name, [None])[0] for name in ("out_bias", "sinks"))
    return Inputs(x, weights, biases, out, rotary, out_bias), sinks


def _stand_ins(x: torch.Tensor, geometry: Geometry) -> list[torch.Tensor]:
    """Of q, k and v: one element each, expanded to the shape."""
    b, s = x.shape[:2]
    h, g, d, e = geometry[:4]
    return [x.new_empty(()).expand(b, s, *shape) for shape in ((h, d), (g, d), (g, e))]


def _pack_saved(plan: ProjectedPlan, saved: Sequence[SavedChunk]) -> list[torch.Tensor]:
    """What backward takes of the chunks, without what others or the output have."""
    if plan.keeps_input:
        return [chunk.lse for chunk in saved]
    if plan.attention.local_heads:
        return [x for chunk in saved for x in (chunk.q, chunk.k, chunk.v, chunk.lse)]
    return plan.attention.pack_saved(saved)


def _unpack_saved(
    plan: ProjectedPlan, tensors: Sequence[torch.Tensor], out: torch.Tensor
) -> list[SavedChunk]:
    """The reverse; ``out`` is the attention output ``[b, s, h e]``."""
    empty, attention = NO_KV[0], plan.attention
    if plan.keeps_input:
        return [SavedChunk(empty, empty, empty, empty, lse) for lse in tensors]
    if not attention.local_heads:
        return attention.unpack_saved(tensors)
    saved, heads = [], out.unflatten(-1, (plan.geometry.heads, -1))
    for index, chunk in enumerate(attention.chunks):
        q, k, v, lse = tensors[4 * index : 4 * index + 4]
        (of_chunk,) = chunk.out.to_heads((heads,))
        saved.append(SavedChunk(q, k, v, of_chunk, lse))
    return saved


def projected_attention(
    x: torch.Tensor,
    projection: Projection,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout | str,
    mask: MaskSpec,
    rotary: Rotary | None = None,
    keep: Keep = "arrivals",
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    kernel: str = AUTO,
    tuning: Tuning = AUTO_TUNING,
    scores: Scores = NO_SCORE_MOD,
    plain: Callable[[], torch.Tensor] | None = None,
    why_plain: str | None = None,
) -> torch.Tensor:
    """Self-attention with its projections, over a sequence sharded over a mesh: what
    :func:`ds_usp.usp_attention` between linear layers computes, with matrix products under its
    exchanges. Collective over the mesh.

    A chunk of heads is projected just before its exchange, under that of the chunk before; with one
    chunk, and in a ring, the queries are projected under the exchange of keys and values. In
    backward the output weight's gradient is computed under the first exchange, that of the other
    weights under the last.

    Shapes:
        x ``[b, s_local, c]`` -> ``[b, s_local, c_out]``; the weights' in :class:`Projection`.

    Args:
        projection: the weights. Their gradients are returned once a pass.
        rotary: cos and sin ``[s_local, r]`` of this rank's tokens, which turn queries and keys
            (:func:`ds_usp.training.apply_rotary`), or :class:`ds_usp.training.RotaryPositions`
            of the tokens, without a table.
        keep: what is kept for backward besides x and the attention output: ``"arrivals"``, the
            exchanged queries, keys and values, as plain attention does; ``"input"``, nothing:
            backward projects and exchanges them again, one chunk at a time, which takes one more
            exchange of them and of the output. ``Tuning(chunks="auto")`` then is the number of
            :func:`ds_usp.geometry.heads.HeadSplit.memory_chunks`.
        softmax_scale, dropout_p, kernel, tuning, scores: as of :func:`ds_usp.usp_attention`.
        mesh, layout, mask: likewise.
        plain: what computes the plain path, as a framework's own layers; None: linear layers of
            these weights around :func:`ds_usp.usp_attention`.
        why_plain: a reason of the caller's to take it.

    The plain path is taken, with one line in the log that names the reason: under
    ``keep_attention``, ``torch.compile`` (no line) and autocast, and with weights of another dtype
    or a tensor subclass (fp8, DTensor), or partitioned by ZeRO-3. On a single rank it is taken too:
    nothing is exchanged.

    Raises:
        ConfigError: tensors that do not fit the projection.
        LayoutError, UnsupportedAttentionError, MeshError: as :func:`ds_usp.usp_attention`.

    Every rank raises in all of these cases, before any data is sent.
    """
    options = AttentionOptions(
        mesh, layout, mask, softmax_scale, dropout_p, kernel, False, tuning, scores
    )
    alone = isinstance(mesh, SequenceMesh) and mesh.sp_degree == 1
    usable = isinstance(projection, Projection)  # else every rank raises, below
    reason = None if alone or not usable else why_plain or plain_reason(x, projection)
    if (alone and usable) or reason is not None:
        if reason and not torch.compiler.is_compiling():
            warn_plain(reason, mesh)
        return plain() if plain else plain_attention(x, projection, rotary, options)
    check = partial(_plan, x, projection, rotary, keep, options)
    plan = check_on_all_ranks(mesh, check, x, layout)
    has_bias = bool(projection.biases), projection.out_bias is not None
    of_rotary = rotary is not None, isinstance(rotary, RotaryPositions)
    call = _Call(mesh, plan, scores, *has_bias, *of_rotary, torch.is_grad_enabled())
    tensors = [x, *projection.tensors, *(rotary or ())]
    tensors += [] if scores.sinks is None else [scores.sinks]
    y: torch.Tensor = ProjectedAttention.apply(call, *tensors)
    return y


def warn_plain(reason: str, mesh: SequenceMesh) -> None:
    """Say once why projections are not computed under their exchange."""
    text = f"projections are computed before attention, not under its exchanges: {reason}"
    warn_once(text, rank=mesh.rank if isinstance(mesh, SequenceMesh) else 0)


def plain_reason(x: torch.Tensor, projection: Projection) -> str | None:
    """Why a call takes the plain path; None if it need not."""
    if torch.compiler.is_compiling():
        return "torch.compile traces plain attention"
    if is_saving():
        return "keep_attention keeps attention without its projections"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on; convert the weights instead"
    return weights_reason(projection.tensors, x.dtype, gathered=projection.gathered)


def weights_reason(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, *, gathered: bool = False
) -> str | None:
    """Why only their own layers can multiply these weights and biases; None if others can.

    Args:
        gathered: as of :class:`Projection`.
    """
    for weight in tensors:
        if hasattr(weight, "ds_id") and not gathered:
            return "weights are partitioned (ZeRO-3), and gathered by their own layers"
        if type(weight) not in (torch.Tensor, torch.nn.Parameter):
            return f"a weight is a {type(weight).__name__}"
        if weight.dtype != dtype:
            return f"a weight is {weight.dtype}, the input {dtype}"
    return None


def plain_attention(
    x: torch.Tensor, projection: Projection, rotary: Rotary | None, options: AttentionOptions
) -> torch.Tensor:
    """The same as :func:`projected_attention`, one after the other."""
    q, k, v = projection.plain(x)
    out = attend_rotated(q, k, v, rotary, options)
    return torch.nn.functional.linear(out.flatten(2), projection.out, projection.out_bias)


def attend_rotated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of queries and keys that are still to be rotated."""
    if rotary is not None:
        q, k = rotate(q, k, rotary)
    out: torch.Tensor = usp_attention(q, k, v, **options._asdict())
    return out


def _rotary_text(rotary: Rotary | None) -> str:
    if isinstance(rotary, RotaryPositions):
        return f"rotary by positions ({rotary.inverse_frequencies.dtype})"
    return "no rotary" if rotary is None else "rotary"


def _plan(
    x: torch.Tensor,
    projection: Projection,
    rotary: Rotary | None,
    keep: str,
    options: AttentionOptions,
) -> tuple[Signature, ProjectedPlan]:
    """Check a call on this rank; its signature and plan."""
    if keep not in KEEPS:
        raise ConfigError(f"keep={keep!r} must be one of {', '.join(KEEPS)}")
    if not isinstance(projection, Projection):
        raise ConfigError(f"projection={projection!r} must be a Projection of the weights")
    geometry, weights = projection.geometry, projection.weights
    if x.ndim != 3 or x.shape[2] != weights[0].shape[1]:
        raise ConfigError(
            f"x must be [batch, tokens, {weights[0].shape[1]}] for these weights, got "
            f"{list(x.shape)}"
        )
    if rotary is not None:
        check_local_rotary(rotary, x.shape[1], geometry.dim)
    requires_grad = x.requires_grad or any(w.requires_grad for w in projection.tensors)
    if keep == "input" and options.tuning.chunks == "auto":
        split = HeadSplit(geometry.heads, geometry.kv_heads, options.mesh.ulysses_degree)
        chunks = split.memory_chunks(options.mesh.ring_degree)
        options = options._replace(tuning=replace(options.tuning, chunks=chunks))
    q, k, v = (y.requires_grad_(requires_grad) for y in _stand_ins(x, geometry))
    text, attention = plan_call(q, k, v, options)
    backward = requires_grad and torch.is_grad_enabled()
    signature = Signature.of(
        text,
        f"projected by {len(weights)} weights ({geometry.order})",
        f"{len(projection.biases)} biases",
        _rotary_text(rotary),
        f"keeps {keep}",
    )
    key = "projected", id(attention), geometry, keep, backward, x.shape[0], x.dtype
    plans = options.mesh.plans
    if key not in plans:
        plans[key] = ProjectedPlan.of_plan(
            attention, geometry, x.shape[0], x.element_size(), keeps_input=keep == "input"
        )
    plan: ProjectedPlan = plans[key]
    return signature, plan
