"""``usp_attention``, ``usp_joint_attention``: differentiable attention over a mesh of ranks. All
calls and backward passes here are collective over it.

Letters of the shapes: b batch, s tokens of this rank, S tokens of its ring rank, t of this rank's
keys, h query heads, g key/value heads; d head dim, e that of values and outputs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch

from ds_usp.attention.custom_ops import graph_break, traced_attention
from ds_usp.attention.passes import BackwardPass, ForwardPass
from ds_usp.attention.plan import AttentionOptions, AttentionPlan, plan_call
from ds_usp.attention.scores import PLAIN_SCORES, Scores
from ds_usp.attention.tuning import AUTO_TUNING, Tuning
from ds_usp.attention.validation import check_layout, exchange_label, same_ranks, token_layout
from ds_usp.comm.all_to_all import HeadAllToAll
from ds_usp.comm.call_record import Signature
from ds_usp.comm.keywords import explain_keywords
from ds_usp.comm.mesh import SequenceMesh, check_on_all_ranks
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.joint import ConcatenatedShards, JointLayout
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.kernels.registry import AUTO
from ds_usp.lowlevel import refuse_second_derivative
from ds_usp.memory.saved_attention import compute_or_replay, current_run

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack


# Note [two autograd functions]
#
# UnifiedAttention is the whole call. Were each chunk, or the all-to-all and the ring, a function of
# its own, autograd would run their backwards one after the other, and nothing would overlap there:
# dout of the next chunk is received while this one is computed only if one function sees both.
#
# SeqAllToAll is the exchange alone: around the local attention of the drop-in at ring degree 1,
# whose own graph autograd runs in between, and for the outputs of joint tokens. Both ask the ranks
# to compare the backward pass before they post anything, and both post it even if this rank's
# gradient is None: it is collective.


class SeqAllToAll(torch.autograd.Function):
    """:func:`head_exchange` of several Ulysses ranks; its backward is the reverse exchange."""

    @staticmethod
    def forward(
        ctx: Any, exchange: HeadAllToAll, to_heads: bool, call_number: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.to_heads, ctx.call_number = exchange, to_heads, call_number
        if to_heads:
            return tuple(x.contiguous() for x in exchange.to_heads(tensors))
        outs = exchange.alloc_outputs(tensors)
        exchange.to_sequence(tensors, outs)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """The reverse exchange; gradients of a head that several ranks use are summed."""
        consistency, label = ctx.exchange.mesh.consistency, exchange_label(ctx.to_heads)
        consistency.check_backward(ctx.call_number, label, wait=grads[0].device.type == "cpu")
        exchanged = SeqAllToAll.apply(ctx.exchange, not ctx.to_heads, ctx.call_number, *grads)
        return None, None, None, *exchanged


class UnifiedAttention(torch.autograd.Function):
    """Attention of this rank's tokens with the whole sequence (Ulysses exchange and ring)."""

    @staticmethod
    def forward(
        ctx: Any,
        mesh: SequenceMesh,
        plan: AttentionPlan,
        grad_enabled: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q ``[b, s, h, d]``, k ``[b, t, g, d]``, v ``[b, t, g, e]``, sinks ``[h]`` -> the output
        ``[b, s, h, e]`` and, if the plan returns it, the log-sum-exp ``[b, h, s]``. Collective,
        right after ``check_on_all_ranks``. ``mesh``: the plan's, which refers to it weakly;
        ``grad_enabled``: the caller's grad mode, off here."""
        save = grad_enabled and any(ctx.needs_input_grad)
        run = ForwardPass(plan, sinks, (q, k, v), save=save)
        run.execute(plan.forward)
        out, lse, saved = run.out, run.lse, run.saved
        ctx.set_materialize_grads(False)  # the log-sum-exp never has one
        if out._is_view():  # of a kernel's result. torch would refuse changes in place here only,
            out = out.data  # and other ranks, whose result is merged, would wait in backward
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        if not save:
            return out, lse
        ctx.mesh, ctx.plan = mesh, plan
        ctx.call_number, ctx.is_on_cpu = mesh.consistency.number, q.device.type == "cpu"
        ctx.shapes, ctx.out_shape = (q.shape, k.shape, v.shape), out.shape
        # By save_for_backward, not on ctx: hooks of checkpoints and of offload see these only.
        ctx.save_for_backward(sinks, *plan.pack_saved(saved, (q, k, v, out)))
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, _: None) -> tuple[Any, ...]:
        plan: AttentionPlan = ctx.plan
        consistency = ctx.mesh.consistency
        consistency.ranks_know = False  # as raising_everywhere() does, in less of the host's time
        try:
            refuse_second_derivative("attention", UnsupportedAttentionError)
            # May recompute, which is compared, or raise: before this rank says that it is ready.
            sinks, *saved = ctx.saved_tensors
        except Exception as error:
            consistency.raise_everywhere(error)
            raise
        consistency.check_backward(ctx.call_number, wait=ctx.is_on_cpu)
        if dout is None:  # the other ranks wait for this one's exchanges
            dout = saved[0].new_zeros(ctx.out_shape)
        run = BackwardPass(plan, sinks, dout.contiguous(), ctx.shapes, saved)
        del saved
        run.execute(plan.backward)
        return None, None, None, *run.grads, run.dsinks


def head_exchange(
    exchange: HeadAllToAll, to_heads: bool, call_number: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Differentiable head exchange of the tensors that ``exchange`` is of; with one Ulysses rank
    the tensors themselves. Collective over its Ulysses ranks, forward and backward.

    Args:
        to_heads: ``[b, s, h, d]`` -> all tokens of the ring rank, ``[b, S, heads of this rank,
            d]``; else back.
        call_number: ``consistency.number`` of its call, which the ranks compare in backward.
    """
    if exchange.mesh.ulysses_degree == 1:
        return tensors
    return SeqAllToAll.apply(exchange, to_heads, call_number, *tensors)


# Note [autocast]
#
# Norms and rotary embeddings leave queries and keys in fp32 beside values in bf16. torch's own
# attention takes part in autocast: it casts all of them, fp64 excepted. So do all calls here,
# before anything is checked, compared or sent: ranks exchange the cast tensors, and gradients
# return through the casts, to each tensor in its own dtype. The kernels see autocast no more.


def cast_by_autocast(*tensors: Any, only_mixed: bool = False) -> tuple[Any, ...]:
    """The tensors, under autocast of their device floating ones but fp64 in its dtype; with
    ``only_mixed`` tensors of one dtype stay as they are: for a local attention that is called, and
    runs under autocast itself."""
    if not torch._C._is_any_autocast_enabled():  # 0.1 us of each call
        return tensors
    if only_mixed and len({getattr(x, "dtype", None) for x in tensors}) == 1:
        return tensors
    return tuple(_cast_by_autocast(x) for x in tensors)


def _cast_by_autocast(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.is_meta:
        return x  # to be refused
    casts = torch.is_autocast_enabled(x.device.type) and x.is_floating_point()
    if not casts or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


if TYPE_CHECKING:

    class _Options(TypedDict, total=False):
        """Options of :func:`usp_attention` that do not change what it returns."""

        mesh: Required[SequenceMesh]
        layout: Required[TokenLayout | str]
        mask: Required[MaskSpec]
        softmax_scale: float | None
        dropout_p: float
        kernel: str
        tuning: Tuning
        scores: Scores
        kv_layout: TokenLayout | str | None
        label: str


@overload
def usp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> torch.Tensor: ...


@overload
def usp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@explain_keywords
def usp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout | str,
    mask: MaskSpec,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    kernel: str = AUTO,
    return_lse: bool = False,
    tuning: Tuning = AUTO_TUNING,
    scores: Scores = PLAIN_SCORES,
    kv_layout: TokenLayout | str | None = None,
    label: str = "",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over a sequence whose tokens are sharded over the ranks of a mesh.

    Collective over the mesh: all its ranks make the same call with their own tokens.

    Shapes:
        q ``[b, s_local, h, d]``, k ``[b, s_local, h_kv, d]``, v ``[b, s_local, h_kv, e]`` ->
        ``[b, s_local, h, e]``; ``e`` may be another head dim than ``d`` (MLA, arXiv 2405.04434).
        With ``return_lse`` also the log-sum-exp of the scores, and the sinks, as the softmax takes
        them, ``[b, h, s_local]`` in fp32 (fp64 for fp64), which carries no gradient.

    Args:
        mesh: the process groups.
        layout: which tokens each rank holds, made by ``mesh.layout(kind, seq_len)``. A kind alone
            (``"zigzag"``) means ``s_local`` tokens on every rank.
        mask: who sees whom, in global positions.
        softmax_scale: factor of the scores; None is ``d ** -0.5``.
        dropout_p: must be 0: which weights are dropped would depend on the degrees.
        kernel: ``"auto"`` or the name of a row of ``ds_usp.kernels.registry.KERNELS``.
        tuning: how the work is divided, where the default is not the fastest.
        scores: soft cap and sinks.
        kv_layout: where the tokens of k and v are, if they are another sequence than q's
            (cross-attention). The mask must be full.
        label: compared on all ranks, as ``f"layer {i}, step {n}"``: without one, a rank that skips
            a call takes its next equal one for it. Under ``torch.compile`` each label is compiled
            anew.

    Under autocast q, k and v are cast to its dtype, all but fp64, as by torch's
    ``scaled_dot_product_attention``. Elsewhere they must have one dtype. Under
    ``torch.use_deterministic_algorithms(True)`` only kernels with a deterministic backward are
    used. Under ``torch.compile`` it is the op ``ds_usp::attention``; documents break the graph.

    Raises:
        LayoutError, ConfigError, UnsupportedAttentionError: this call cannot be served.
        MeshError: the ranks disagree about the call.

    Every rank raises, before any data is sent. On GPUs a rank whose call differs, after calls on
    which all agreed, is reported a few calls later or when the backward pass begins
    (``ConsistencyChecker``).

    Source: USP, arXiv 2405.07719, algorithm 1.
    """
    options = AttentionOptions(
        mesh,
        layout,
        mask,
        softmax_scale,
        dropout_p,
        kernel,
        return_lse,
        tuning,
        scores,
        kv_layout,
        label,
    )
    q, k, v = cast_by_autocast(q, k, v)
    if torch.compiler.is_compiling():
        traced = traced_attention(q, k, v, options)
        if traced is not None:
            out, lse = traced
            return out if lse is None else (out, lse)
    return _usp_attention(q, k, v, options)


@graph_break
def _usp_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`usp_attention` outside of graphs: computed, or replayed under ``keep_attention``."""
    # An argument that is no Scores is refused with the others, on every rank.
    scores = options.scores if isinstance(options.scores, Scores) else PLAIN_SCORES
    inputs = (q, k, v) if scores.sinks is None else (q, k, v, scores.sinks)
    recomputed = current_run() is not None  # under keep_attention
    if recomputed:
        comparable = {"mesh": same_ranks(options.mesh), "scores": scores.static_values}
        key = options._asdict() | comparable  # must be equal in both runs of the checkpoint
        outputs = compute_or_replay(partial(_attend, options, recomputed), inputs, key)
    else:
        outputs = _attend(options, recomputed, *inputs)
    return (outputs[0], outputs[1]) if options.return_lse else outputs[0]


def _attend(
    options: AttentionOptions, recomputed: bool, *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The output, and the log-sum-exp if it is asked for, of the inputs q, k, v and, if the options
    have any, sinks: the call's, or ``keep_attention``'s stand-ins, whose q, k and v are
    ``recomputed`` for backward."""
    q, k, v, *sinks = inputs
    if sinks:
        options = options._replace(scores=replace(options.scores, sinks=sinks[0]))
    check = partial(plan_call, q, k, v, options, recomputed=recomputed)
    shared_tensors = {"sinks": sinks[0]} if sinks else None
    plan = check_on_all_ranks(options.mesh, check, q, options.layout, shared_tensors)
    grad_enabled = torch.is_grad_enabled()
    out, lse = UnifiedAttention.apply(options.mesh, plan, grad_enabled, *inputs)
    return (out, lse) if options.return_lse else (out,)


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# Note [joint tokens]
#
#   rank 0   [text 0:2][image 0:8 ]      text is on every rank, and its output must be again; the
#   rank 1   [text 2:4][image 8:16]      image is sharded
#
# Attending to the text on every rank would count it once a rank in the softmax of the image, and
# its own attention would be computed sp times. So a rank takes its shard of the text, and the two
# are one sequence of a layout of their own (JointLayout); only the text's output is gathered.


@explain_keywords
@graph_break
def usp_joint_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    joint_q: torch.Tensor,
    joint_k: torch.Tensor,
    joint_v: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout | str,
    mask: MaskSpec,
    joint_front: bool = True,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    kernel: str = AUTO,
    tuning: Tuning = AUTO_TUNING,
    scores: Scores = PLAIN_SCORES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`usp_attention` over a sharded sequence and replicated tokens, as one sequence, as in
    diffusion transformers, where an image is sharded and its text is not. Collective over the mesh.

    Each rank joins its shard of the joint tokens to its shard of the sequence; at the end the joint
    tokens' outputs are all-gathered. With Ulysses ranks the head exchange is packed run by run and
    sent by NCCL/gloo P2P.

    Shapes:
        q ``[b, s_local, h, d]``, k ``[b, s_local, h_kv, d]``, v ``[b, s_local, h_kv, e]``, joint_q,
        joint_k, joint_v likewise with ``[b, joint]`` tokens, the same values on every rank -> out
        ``[b, s_local, h, e]`` and joint_out ``[b, joint, h, e]``, the same on every rank.

    Gradients of the joint tensors are local to each rank: their sum over the ranks of the mesh is
    the gradient, as it is for weights; gradients of joint_out are summed likewise. So the
    all-reduce of weights' gradients is right for layers that every rank computes on the joint
    tokens, too.

    Args:
        layout: of the sequence without the joint tokens, which are laid out by the same kind.
        mask: over all tokens, in positions of the joined sequence.
        joint_front: joint tokens come first, else last.

    The other arguments and errors are those of :func:`usp_attention`.

    Raises:
        LayoutError: fewer joint tokens than ranks.
    """

    q, k, v, joint_q, joint_k, joint_v = cast_by_autocast(q, k, v, joint_q, joint_k, joint_v)

    def check() -> tuple[Signature, JointLayout]:
        """Check the call on this rank; returns its signature and the joined sequence's layout."""
        joint = _validate((q, k, v), (joint_q, joint_k, joint_v))
        main = token_layout(layout, q, mesh)
        check_layout(q, "queries", mesh, main)
        if not isinstance(joint_front, bool):
            raise ConfigError(f"joint_front={joint_front!r} must be True or False")
        combined = JointLayout.of(main, joint, joint_front)
        added, _ = combined.layouts
        lengths = ((main.kind, main.seq_len), (added.kind, added.seq_len))
        return Signature((str(combined), str(added)), lengths), combined

    combined = check_on_all_ranks(mesh, check, q, layout)
    call_number = mesh.consistency.number  # of this comparison; usp_attention makes its own
    joint_layout, _ = combined.layouts
    step = 1 if joint_front else -1  # from (joint, main) to the order of the sequence, and back
    pieces = [
        (joint_layout.shard(joint_x, 1, mesh.rank), x)[::step]
        for joint_x, x in ((joint_q, q), (joint_k, k), (joint_v, v))
    ]
    joined = [torch.cat(pair, dim=1) for pair in pieces]
    options = AttentionOptions(
        mesh, combined, mask, softmax_scale, dropout_p, kernel, False, tuning, scores
    )
    out: torch.Tensor = usp_attention(*joined, **options._asdict())
    joint_out, main = out.split([piece.shape[1] for piece in pieces[0]], dim=1)[::step]
    # Every rank takes every head: an all-gather, whose backward sums the ranks' gradients.
    every_head = ((0, out.shape[2]),) * mesh.sp_degree
    gather = HeadAllToAll(mesh.flat(), (ConcatenatedShards.of(joint_layout),), (every_head,))
    (joint_shards,) = head_exchange(gather, True, call_number, joint_out)
    lengths = [joint_layout.length(rank) for rank in range(mesh.sp_degree)]
    return main, joint_layout.gather(joint_shards.split(lengths, dim=1), 1)


def _validate(main: QKV, joint: QKV) -> int:
    """The number of joint tokens, all of them; ConfigError if their tensors do not fit q, k, v."""
    if not all(isinstance(x, torch.Tensor) for x in (*main, *joint)):
        names = ", ".join(type(x).__name__ for x in (*main, *joint))
        raise ConfigError(f"q, k, v and the joint q, k, v must be tensors, got {names}")
    tokens = {x.shape[1] for x in joint if x.ndim == 4}
    fits = all(
        x.ndim == y.ndim == 4
        and (x.shape[0], *x.shape[2:], x.dtype, x.device)
        == (y.shape[0], *y.shape[2:], y.dtype, y.device)
        for x, y in zip(main, joint, strict=True)
    )
    if not fits or len(tokens) != 1:
        shown = "; ".join(
            f"{name} {list(x.shape)}, joint_{name} {list(y.shape)}"
            for name, x, y in zip("qkv", main, joint, strict=True)
        )
        raise ConfigError(
            "joint tensors must share everything but the tokens with q, k and v, dtype and device "
            f"too, and be as long as each other: {shown}"
        )
    return tokens.pop()
