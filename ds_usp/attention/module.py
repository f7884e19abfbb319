"""The drop-in for ``deepspeed.sequence.layer.DistributedAttention``. Constructing a module and
calling it are collective over its mesh: the ranks compare both before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from ds_usp.attention.custom_ops import graph_break, traced_attention
from ds_usp.attention.functional import UnifiedAttention, cast_by_autocast, head_exchange
from ds_usp.attention.local_attention import (
    NO_ARGUMENTS,
    FrameworkArgumentChecks,
    LocalAttention,
    check_overrides,
    detect_local_attention,
    read_attributes,
    resolve_ring_attention,
)
from ds_usp.attention.plan import AttentionOptions, AttentionPlan, plan_call
from ds_usp.attention.scores import Scores
from ds_usp.attention.tuning import AUTO_TUNING, Tuning, check_tuning
from ds_usp.attention.validation import (
    ChunkExchanges,
    check_default_layout,
    check_dims,
    check_layout_kind,
    check_tensors,
    module_text,
    plan_local_attention,
    returned_text,
    same_ranks,
    token_layout,
)
from ds_usp.comm.call_record import Signature
from ds_usp.comm.keywords import explain_keywords
from ds_usp.comm.mesh import SequenceMesh, check_on_all_ranks
from ds_usp.errors import ConfigError, warn_once
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, TokenLayout
from ds_usp.geometry.masks import MaskSpec, normalize_documents
from ds_usp.kernels.registry import AUTO, check_kernel_name
from ds_usp.kernels.rotary import Rotary, apply_rotary
from ds_usp.memory.saved_attention import (
    check_only_inputs_require_grad,
    compute_or_replay,
    is_saving,
)


class CallArguments(NamedTuple):
    """The arguments of a call besides q, k and v."""

    batch_dim_idx: int | torch.Tensor | None
    rotary: Rotary | None
    documents: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class DropInPlan:
    """The validated plan of one drop-in call."""

    batch_second: bool  # the tensors are [s, b, h, d], else [b, s, h, d]
    args: tuple[Any, ...]  # what the local attention is called with behind q, k and v
    # Cos and sin [tokens, r], of this rank's tokens with ``attention``, else of all.
    rotary: Rotary | None
    call: AttentionPlan | ChunkExchanges  # over the mesh, or around a local attention's call
    attention: LocalAttention | None  # what is computed over the mesh; None: it is called


def batch_dim_text(dim: object) -> str:
    """The batch dim in the call signature."""
    return f"batch dim {dim}"


def hashable_documents(documents: Any) -> object:
    """Documents as a value that ``keep_attention`` compares; None for what is refused later."""
    try:
        return None if documents is None else normalize_documents(documents)
    except ConfigError:
        return None


def warn_not_called(local_attention: object, attention: LocalAttention, condition: str) -> None:
    """Warn, once for each class and condition, that a local attention is not called, but
    computed."""
    scale = "head_dim ** -0.5" if attention.softmax_scale is None else attention.softmax_scale
    warn_once(
        f"USPAttention does not call the local attention {type(local_attention).__name__} "
        f"{condition}: ds_usp's own kernels compute it, with mask {attention.mask.band}, "
        f"softmax_scale {scale}, dropout {attention.dropout_p} in training",
        rank=dist.get_rank() if dist.is_initialized() else 0,
    )


# Note [two ways through the drop-in]
#
#   ring 1      q, k, v --a2a--> [all tokens, own heads] --> local_attn --> --a2a--> out
#   with a ring q, k, v ------------------ attention over the mesh ----------------> out
#
# Without a ring any attention is right, as it sees all tokens of its heads; it runs as it is, with
# DeepSpeed's bits. With a ring no rank ever has all keys, and a partial result can be merged only
# by its log-sum-exp, which a module does not return: so the package computes what the module would,
# as far as that can be known (local_attention.py), and refuses what cannot. Documents take the
# second way at any degree: no framework's module takes their borders in the form of this package.


class USPAttention(torch.nn.Module):
    """Sequence-parallel attention around any local attention (drop-in for DeepSpeed-Ulysses).

    Constructor and call are those of ``deepspeed.sequence.layer.DistributedAttention``, and so is
    the order of tokens, unless ``layout`` is another one: rank ``r`` of the group holds the
    ``r``-th shard. Without a ring the local attention runs on all tokens of this rank's heads, and
    the result is DeepSpeed's bit for bit.

    **With a ring the local attention is never called.** The package's own kernels compute what it
    would: its mask, scale and dropout are read from it where its class is known, and must be
    arguments otherwise; a compiled graph keeps those with which it was traced. Whatever else it
    does (hooks, a bias, counters) does not happen. A warning says so once.

    Args:
        local_attention: module called as ``local_attention(q, k, v, *args, **kwargs)``; it may
            return ``[b, s, h, d]`` / ``[s, b, h, d]`` or ``[b, s, h * d]`` / ``[s, b, h * d]``.
        sequence_process_group: the sequence-parallel group; None: the default group.
        scatter_idx: dim of the heads: 2.
        gather_idx: dim of the tokens, 0 or 1, for calls without a batch dim. None: every call
            gives it, or passes a mask instead, and tokens are dim 0 then.
        sp_stream: the stream that Megatron-DeepSpeed's overlap computes q and k on; it is waited
            for, forward and backward.
        num_kv_heads: if given, checked against the keys.
        ulysses_degree: ranks that exchange heads, the ring takes the rest; None: all ranks.
        mesh: instead of a group and a degree. Without one, modules of one group and degree share a
            mesh.
        layout: which tokens the shards hold: a kind, every rank with equally many, or a
            :class:`TokenLayout`. None is ``contiguous``, DeepSpeed's order, in which a causal ring
            waits for its last rank; batches that ``SequenceParallelDataLoader`` gave in another one
            are refused then. ``"zigzag"`` balances it, if tokens, labels and positions are sharded
            by it: ``attn.mesh.layout("zigzag", seq_len).shard(x, dim, attn.mesh.rank)``.
        mask, softmax_scale, dropout_p: what the local attention computes, where the ring cannot
            read it; ``softmax_scale`` None is ``head_dim ** -0.5``. Where it can, they must agree.
        kernel: name of the ring's kernel; ``tuning``: how its work is divided.
        order: which axis of the mesh has its ranks next to each other; None: that of ``mesh``, or
            ``ulysses-ring``.

    Raises:
        ConfigError, LayoutError, MeshError, UnsupportedAttentionError: what is not supported, at
            construction or at the first call, on every rank.

    Source: the interface is DeepSpeed's (deepspeed.sequence.layer, 0.19).
    """

    @explain_keywords
    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: dist.ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int | None = None,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
        *,
        ulysses_degree: int | None = None,
        mesh: SequenceMesh | None = None,
        layout: str | TokenLayout | None = None,
        mask: MaskSpec | None = None,
        softmax_scale: float | None = None,
        dropout_p: float | None = None,
        kernel: str = AUTO,
        order: str | None = None,
        tuning: Tuning = AUTO_TUNING,
    ) -> None:
        super().__init__()
        self._names_layout = layout is not None
        self._layout = layout = TokenLayout.CALLERS_KIND if layout is None else layout
        if mesh is None:
            order = order or DEFAULT_SP_ORDER
            mesh = SequenceMesh.shared(sequence_process_group, ulysses_degree, order)
        elif any(x is not None for x in (ulysses_degree, sequence_process_group, order)):
            raise ConfigError(
                "a mesh was given, which has its group, degrees and order; leave "
                "sequence_process_group, ulysses_degree and order out"
            )

        def check() -> tuple[Signature, FrameworkArgumentChecks | None]:
            """Check the module's options, which each call compares; with a ring returns what will
            check the arguments that frameworks give a call."""
            check_dims(scatter_idx, gather_idx)
            check_layout_kind(layout, mesh)
            check_kernel_name(kernel)
            check_tuning(tuning)
            if mesh.ring_degree == 1:
                check_overrides(detect_local_attention(local_attention), *self._overrides)
                if not callable(local_attention):
                    raise ConfigError(
                        f"local_attention={local_attention!r} is called without a ring, and must "
                        "be a module or function of q, k and v"
                    )
                return Signature(("a USPAttention",)), None
            return Signature(("a USPAttention",)), self._read_local_attention(mesh)

        self.local_attn = local_attention
        self._overrides = mask, softmax_scale, dropout_p
        self._framework = check_on_all_ranks(mesh, check)
        # Modules are made on all ranks at once, so it is the same there. A tensor, which is no
        # constant in a graph: layers share compiled code.
        number = next(mesh.module_numbers)
        self._number, self._text = torch.tensor(number, device="cpu"), module_text(number)
        if self._framework is not None:
            warn_not_called(local_attention, self._framework.attention, "with a ring")
        self.mesh = mesh
        self.gather_idx = gather_idx or 0
        self._batch_dim_required = gather_idx is None  # every call gives it
        self.sp_stream = sp_stream
        self.num_kv_heads = num_kv_heads
        self.kernel, self.tuning = kernel, tuning

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int | torch.Tensor | None = None,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        *args: Any,
        documents: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of this rank's tokens with the whole sequence. Collective over the mesh.

        Shapes:
            query ``[b, s_local, h, d]``, key and value ``[b, s_local, h_kv, d]`` with
            ``batch_dim_idx`` 0, or ``[s_local, b, ...]`` with 1 -> the same order of dims, 4-D or
            3-D (``h * d``) as the local attention returns.

        Under autocast query, key and value are cast to its dtype before they are exchanged, except
        where they have one dtype and the local attention is called: it runs under autocast itself.

        Args:
            batch_dim_idx: dim of the batch; it may be left out where ``gather_idx`` was given. A
                tensor here is an attention mask, as Megatron-DeepSpeed's path without flash
                attention passes it; the batch dim is then the one other than ``gather_idx``.
            rotary_pos_emb: cos and sin ``[tokens, 1, 1, rot_dim]`` of the whole sequence.
            documents: borders of packed documents, as of ``MaskSpec``. The package's kernels
                compute attention then, with and without a ring.
            args, kwargs: passed to the local attention; with a ring checked against what it
                computes.
        """
        arguments = CallArguments(batch_dim_idx, rotary_pos_emb, documents, args, kwargs)
        if torch.compiler.is_compiling():
            out = self._forward_traced(query, key, value, arguments)
            if out is not None:
                return out
        return self._forward(query, key, value, arguments)

    def _forward_traced(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: CallArguments
    ) -> torch.Tensor | None:
        """:meth:`forward` in a graph, where the op replays kept attention too; None if it cannot be
        there: it calls the local attention, or a value is not plain (``attention_values``)."""
        if self._framework is None or arguments.args or arguments.kwargs:
            return None
        query, key, value = self._cast(query, key, value, arguments)
        dim: Any = arguments.batch_dim_idx
        if dim is None and not self._batch_dim_required:
            dim = 1 - self.gather_idx
        plain = (
            type(dim) is int
            and dim in (0, 1)
            and query.ndim == key.ndim == value.ndim == 4
            and self.num_kv_heads in (None, key.shape[2])
        )
        outside = (arguments.rotary, arguments.documents, self.sp_stream)
        if not plain or any(each is not None for each in outside):
            return None
        q, k, v = (x.transpose(0, 1) if dim else x for x in (query, key, value))
        attention, named = self._framework.attention, self._names_layout
        # As _plan's signature begins, a field a line: ranks with and without the op are equal.
        prefix = "\n".join((batch_dim_text(dim), *NO_ARGUMENTS.fields))
        options = self._options(attention, q.device)
        traced = traced_attention(q, k, v, options, self._number, named=named, prefix=prefix)
        if traced is None:
            return None
        out, _lse = traced
        out = out.flatten(2) if attention.flat_output else out
        return out.transpose(0, 1) if dim else out

    @graph_break
    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: CallArguments
    ) -> torch.Tensor:
        """:meth:`forward` outside of graphs: computed, or replayed under ``keep_attention``."""

        def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
            return (self._run_checked(q, k, v, arguments),)

        comparable = self._computed(arguments) if is_saving() else None
        _wait_for_stream(self.sp_stream, query, key, value)
        query, key, value = self._cast(query, key, value, arguments)
        (out,) = compute_or_replay(compute, (query, key, value), comparable)
        return out

    def _cast(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: CallArguments
    ) -> tuple[torch.Tensor, ...]:
        called = self._framework is None and arguments.documents is None
        return cast_by_autocast(q, k, v, only_mixed=called)

    def _computed(self, arguments: CallArguments) -> dict[str, object]:
        """Return all that decides what a call computes, which ``keep_attention`` compares in both
        runs; the second one may have made the module anew."""
        # A new option of the module that changes results belongs here.
        dim = arguments.batch_dim_idx if isinstance(arguments.batch_dim_idx, int) else None
        names = "_overrides", "_layout", "_names_layout", "_batch_dim_required"
        settings = {
            name: getattr(self, name) for name in (*names, "gather_idx", "kernel", "tuning")
        }
        return settings | {
            "local_attn": self.local_attn,
            "mesh": same_ranks(self.mesh),
            "batch_dim_idx": dim,
            "documents": hashable_documents(arguments.documents),
        }

    def _run_checked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: CallArguments
    ) -> torch.Tensor:
        """Check a call on all ranks, then compute it, in the order of dims of the query."""

        shared_tensors: dict[str, torch.Tensor] = {}  # filled by check, then compared

        def check() -> tuple[Signature, DropInPlan]:
            extra = (*arguments.args, *arguments.kwargs.values(), arguments.batch_dim_idx)
            check_only_inputs_require_grad(self.local_attn, extra)
            signature, plan = self._plan(query, key, value, arguments)
            sinks = None if plan.attention is None else plan.attention.sinks(query.device)
            shared_tensors.update({} if sinks is None else {"sinks": sinks})
            if arguments.rotary is not None:
                shared_tensors["cos"], shared_tensors["sin"] = arguments.rotary
            return signature, plan

        plan = check_on_all_ranks(self.mesh, check, query, self._layout, shared_tensors)
        call_number = self.mesh.consistency.number  # of this call, for its backward pass
        q, k, v = (x.transpose(0, 1) if plan.batch_second else x for x in (query, key, value))
        if isinstance(plan.call, ChunkExchanges):
            q, k, v = head_exchange(plan.call.qkv, True, call_number, q, k, v)  # to heads
            # The caller's code may run out of memory here, or return another dtype, on one rank;
            # the others must not wait for it in the exchange that follows.
            consistency, arguments = self.mesh.consistency, arguments._replace(args=plan.args)
            with consistency.raising_everywhere():
                out, flat = self._attend_locally(q, k, v, plan.batch_second, plan.rotary, arguments)
                text = returned_text(out)
            consistency.check_part(text, wait=out.device.type == "cpu")
            (out,) = head_exchange(plan.call.out, False, call_number, out)  # back to shards
            out = out.flatten(2) if flat else out
        else:
            out = self._ring(q, k, v, plan)
        return out.transpose(0, 1) if plan.batch_second else out

    def _plan(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: CallArguments
    ) -> tuple[Signature, DropInPlan]:
        """Check a call on this rank and plan it; nothing is sent. Reads the local attention again
        where its attributes have changed."""
        # _forward_traced writes the signature's beginning too, for ranks that run a graph.
        batch_dim_idx, rotary, documents, args, kwargs = arguments
        if batch_dim_idx is None and self._batch_dim_required:
            raise ConfigError(
                f"which dim of {list(query.shape)} is the batch? Call "
                "attn(q, k, v, 0) for [b, s, h, d], attn(q, k, v, 1) for [s, b, h, d], or give "
                "gather_idx, the dim of the tokens, to USPAttention"
            )
        if batch_dim_idx is None or isinstance(batch_dim_idx, torch.Tensor):
            args = args if batch_dim_idx is None else (batch_dim_idx, *args)
            batch_dim_idx = 1 - self.gather_idx
        if batch_dim_idx not in (0, 1):
            raise ConfigError(
                f"batch_dim_idx={batch_dim_idx!r} must be 0 for [b, s, h, d] or 1 for [s, b, h, d]"
            )
        if self.num_kv_heads is not None and key.shape[2:3] != (self.num_kv_heads,):
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads}, but the keys are {list(key.shape)}: their "
                "dim 2 is the heads"
            )
        batch_second = batch_dim_idx == 1 and query.ndim == key.ndim == value.ndim == 4
        q, k, v = (x.transpose(0, 1) if batch_second else x for x in (query, key, value))
        tensors = check_tensors(q, k, v)
        signature: list[Signature | str] = [batch_dim_text(batch_dim_idx)]
        layout = token_layout(self._layout, q, self.mesh)
        if not self._names_layout:
            check_default_layout(self.mesh, layout)
        framework = self._framework
        if framework is not None and read_attributes(self.local_attn) != framework.attributes:
            framework = self._framework = self._read_local_attention(self.mesh)
        framework = framework if documents is None else self._with_documents(documents)
        if rotary is not None:
            if q.shape[1] != k.shape[1]:
                raise ConfigError(
                    f"rotary_pos_emb turns queries and keys by one table, and there are "
                    f"{q.shape[1]} queries and {k.shape[1]} keys on this rank: turn them before"
                )
            _check_rotary(rotary, layout.seq_len, q.shape[3])
            signature.append("rotary")
            rotary = _local_rotary(rotary, layout, None if framework is None else self.mesh.rank)
        if framework is not None and self._framework is None:
            warn_not_called(self.local_attn, framework.attention, "with documents=")
        call: AttentionPlan | ChunkExchanges
        if framework is None:
            kv_layout = token_layout(self._layout, k, self.mesh)
            text, call = plan_local_attention(q, k, self.mesh, layout, kv_layout)
            signature += [tensors, text]
        else:
            signature.append(framework.check(layout.seq_len, q.shape[3], args, kwargs))
            options = self._options(framework.attention, q.device)
            text, call = plan_call(q, k, v, options, recomputed=is_saving())
            signature.append(text)
        attention = None if framework is None else framework.attention
        plan = DropInPlan(batch_second, args, rotary, call, attention)
        return Signature.of(*signature, self._text), plan

    def _resolve_local_attention(self) -> LocalAttention:
        detected = detect_local_attention(self.local_attn)
        check_overrides(detected, *self._overrides)
        return resolve_ring_attention(self.local_attn, detected, *self._overrides)

    def _read_local_attention(self, mesh: SequenceMesh) -> FrameworkArgumentChecks:
        attributes = read_attributes(self.local_attn)
        return FrameworkArgumentChecks(self._resolve_local_attention(), mesh.readings, attributes)

    def _with_documents(self, documents: Any) -> FrameworkArgumentChecks:
        """The ring's attention with these documents in its mask, for one call, at any degree."""
        checks = self._framework
        attention = checks.attention if checks else self._resolve_local_attention()
        mask = replace(attention.mask, documents=documents)
        return FrameworkArgumentChecks(replace(attention, mask=mask), self.mesh.readings)

    def _options(self, attention: LocalAttention, device: torch.device) -> AttentionOptions:
        """The options with which ``attention`` is computed over the mesh. Keys are in the layout of
        the queries, or in one of the same kind and their own length."""
        training = getattr(self.local_attn, "training", self.training)
        return AttentionOptions(
            self.mesh,
            self._layout,
            attention.mask,
            attention.softmax_scale,
            attention.dropout_p if training else 0.0,
            self.kernel,
            tuning=self.tuning,
            scores=Scores(sinks=attention.sinks(device)),
            kv_layout=self._layout,
        )

    def _attend_locally(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch_second: bool,
        rotary: Rotary | None,
        arguments: CallArguments,
    ) -> tuple[torch.Tensor, bool]:
        """Call the local attention between two exchanges, of all tokens of this rank's heads; of
        ``arguments`` args and kwargs are used. Returns the output ``[b, s, h, e]``, and whether
        ``h * e`` was one dim of it."""
        if rotary is not None:
            q, k = apply_rotary((q, k), *rotary, token_dim=1)
        heads, want = q.shape[2], q.shape[:3]
        if batch_second:
            q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        returned = self.local_attn(q, k, v, *arguments.args, **arguments.kwargs)
        flat = returned.ndim == 3
        out = returned.unflatten(2, (heads, -1)) if flat else returned
        out = out.transpose(0, 1) if batch_second and out.ndim == 4 else out
        if out.ndim != 4 or out.shape[:3] != want:
            raise ConfigError(
                f"the local attention returned {list(returned.shape)} for queries "
                f"{list(q.shape)}: it must keep their first three dims, or join the last two"
            )
        return out, flat

    def _ring(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: DropInPlan
    ) -> torch.Tensor:
        """Compute over the mesh what the local attention would, of this rank's tokens ``[b, s, h,
        d]``; collective, right after the ranks' comparison."""
        if plan.rotary is not None:
            q, k = apply_rotary((q, k), *plan.rotary, token_dim=1)
        call, attention = cast(AttentionPlan, plan.call), cast(LocalAttention, plan.attention)
        sinks, grad_enabled = attention.sinks(q.device), torch.is_grad_enabled()
        out, _ = UnifiedAttention.apply(self.mesh, call, grad_enabled, q, k, v, sinks)
        return out.flatten(2) if attention.flat_output else out


def _wait_for_stream(stream: Any, *tensors: torch.Tensor) -> None:
    """Let the current stream wait for another one (None: nothing), and in backward the other one
    for the current one, once that has a tensor's gradient."""
    if stream is None or tensors[0].device.type == "cpu":
        return
    device = torch.get_device_module(tensors[0].device)
    device.current_stream().wait_stream(stream)

    def wait_in_backward(grad: torch.Tensor) -> None:
        stream.wait_stream(device.current_stream())

    for x in tensors:
        if x.requires_grad:
            x.register_hook(wait_in_backward)


def _check_rotary(rotary: Sequence[torch.Tensor], seq_len: int, head_dim: int) -> None:
    """ConfigError if these are not cos and sin ``[tokens, 1, 1, rot_dim]`` of the whole
    sequence."""
    shape: Any = getattr(rotary, "shape", None)  # not a pair, but a tensor of something else
    if shape is not None or len(rotary) != 2:
        size = len(rotary) if shape is None else list(shape)
        raise ConfigError(
            "the argument behind batch_dim_idx is rotary_pos_emb, cos and sin (as in DeepSpeed), "
            f"and got {type(rotary).__name__} {size}. Give what the local attention takes, such "
            "as a mask, behind it, attn(q, k, v, 0, None, mask), or by name"
        )
    cos, sin = rotary
    if cos.ndim != 4 or cos.shape != sin.shape or cos.shape[1:3] != (1, 1):
        raise ConfigError(
            "rotary_pos_emb must be cos and sin of shape [tokens, 1, 1, rot_dim], got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    if cos.shape[0] < seq_len or cos.shape[3] > head_dim or cos.shape[3] % 2:
        raise ConfigError(
            f"rotary_pos_emb {list(cos.shape)} does not fit {seq_len} tokens of the whole "
            f"sequence and head dim {head_dim}"
        )


def _local_rotary(rotary: Rotary, layout: TokenLayout, rank: int | None) -> Rotary:
    """Cos and sin ``[s, rot_dim]`` of a rank's tokens (before a head exchange), or, with no rank,
    of the whole sequence (after it)."""
    cos, sin = (table[: layout.seq_len, 0, 0] for table in rotary)
    if rank is None:
        return cos, sin
    return layout.shard(cos, 0, rank), layout.shard(sin, 0, rank)
