"""The kernels of other libraries: which a layer's function runs, as ``recurrences.py`` asks; and
delta rules by flash-linear-attention, all pieces of a rank in one call, each from the state that
comes into it.

Read of ``fla-core`` 0.6: its kernels' own context parallelism has a seam for what we need, and we
put chains of pieces in the place of its contiguous ranks. So layouts, uneven pieces and documents
are ours, and kernels, what they save and what they recompute are fla's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from packaging.version import Version

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.state_chains import Piece, StateChains
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.recurrence.exchange import ExchangeCall
from ds_usp.recurrence.scan import Map, PieceMaps, Recurrence, Transfer, no_autocast

READ_OF = 0, 6  # the version of fla
MAX_KEY_DIM = 256  # fla asserts it

_GATED, _KIMI = "fla.ops.gated_delta_rule.chunk", "fla.ops.kda.chunk"
_DELTA_RULES = MappingProxyType({"chunk_gated_delta_rule": _GATED, "chunk_kda": _KIMI})
# What the kernels call around a state that comes from other ranks, and where their modules keep it.
_SEAMS = MappingProxyType(
    {
        "chunk_gated_delta_rule_fwd_h_pre_process": "states_before",
        "chunk_gated_delta_rule_bwd_dhu_pre_process": "gradients_after",
        "compress_h0": "saved",
        "expand_h0": "restored",
    }
)
_SEAM_MODULES = (_GATED, "fla.ops.kda.chunk_fwd", "fla.ops.kda.chunk_bwd")


def implementation_of(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a function of transformers runs: the library's or torch's, as its decorator chose
    when the model's module was imported. Another kernel is its own."""
    code = getattr(kernel, "__code__", None)
    cells = getattr(kernel, "__closure__", None)
    if code is None or not cells or "implementation" not in code.co_freevars:
        return kernel
    return cells[code.co_freevars.index("implementation")].cell_contents


def library_of(kernel: Callable[..., Any]) -> str:
    """The package that an implementation is of, ``fla`` or ``mamba_ssm``; empty: none of them."""
    package = str(getattr(kernel, "__module__", "")).partition(".")[0]
    return package if package in ("fla", "mamba_ssm") else ""


def takes_states(kernel: Callable[..., Any], like: torch.Tensor) -> bool:
    """Whether :func:`delta_rule` runs this implementation where ``like`` is; patches fla first."""
    module = _DELTA_RULES.get(getattr(kernel, "__name__", ""))
    is_delta_rule = module is not None and getattr(kernel, "__module__", "") == module
    return is_delta_rule and like.is_cuda and _patch_kernels()


@functools.cache
def _patch_kernels() -> bool:
    """Let the kernels take a :class:`PieceStates` for a context, once; False where they cannot, and
    run as any kernel."""
    try:
        if Version(importlib.import_module("fla").__version__).release[:2] != READ_OF:
            return False  # it may compute other things by the same names
        modules = [importlib.import_module(name) for name in _SEAM_MODULES]
        forward = importlib.import_module("fla.ops.cp.chunk_fwd").chunk_cp_fwd_kernel_h
        backward = importlib.import_module("fla.ops.cp.chunk_bwd").chunk_cp_bwd_kernel_dh
    except Exception:  # a library may raise anything where it is not whole
        return False
    if "MULTI_SEQS" not in forward.arg_names or "dhm" not in backward.arg_names:
        return False
    if not all(any(hasattr(module, name) for module in modules) for name in _SEAMS):
        return False
    for module in modules:
        for name, method in _SEAMS.items():
            if hasattr(module, name):
                setattr(module, name, _seam(getattr(module, name), method))
    return True


def _seam(original: Callable[..., Any], method: str) -> Callable[..., Any]:
    """The function, but that it is a method of its ``context`` where that is our PieceStates."""

    @functools.wraps(original)
    def seam(*args: Any, **kwargs: Any) -> Any:
        context = kwargs.get("context")
        if isinstance(context, PieceStates):
            return getattr(context, method)(*args, **kwargs)
        return original(*args, **kwargs)

    return seam


@disable_in_compile("a layer that carries a state is not in a graph: its exchanges are compared")
def delta_rule(
    kernel: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    documents: Any = (),
    **options: Any,
) -> torch.Tensor:
    """Compute the ``delta_rule`` of ``recurrences.py`` by a kernel that :func:`takes_states`.

    Shapes: query and key may have fewer heads than value, which divide its.
    """
    tensors = (query, key, value, g, beta)
    call = ExchangeCall("delta_rule", "states", tensors, (1,) * 5, mesh, layout, documents)

    def check(inputs: list[torch.Tensor]) -> tuple[list[str], list[torch.Tensor]]:
        heads, dk = key.shape[2:]
        if dk > MAX_KEY_DIM or value.shape[2] % heads:
            raise ConfigError(
                f"keys of {heads} heads of {dk} and values of {value.shape[2]} heads: flash-linear-"
                f"attention takes keys of at most {MAX_KEY_DIM}, and heads that divide those of "
                "values"
            )
        return [f"by fla's kernels with {sorted(options)}"], inputs

    inputs = call.begin(check)
    states = PieceStates(call, value.shape[2], key.shape[3], value.shape[3], key.device)
    rows = inputs[0].shape[0]
    q, k, v, decay, b = (x.flatten(0, 1)[None] for x in inputs)
    with mesh.consistency.raising_everywhere():
        out, _ = kernel(q, k, v, g=decay, beta=b, **states.arguments(), **options)
    return call.leave(out[0].unflatten(0, (rows, -1)), 1)


# Note [states inside a kernel]
#
#     forward    w, u of all pieces -> maps (A, B) of those that export -> exchange -> states before
#                the pieces -> chunk states, outputs
#     backward   dv of all pieces -> maps (A^T, dB) of those that import -> exchange along chains
#                from their ends -> gradients of the states after the pieces -> all other gradients
#
# A kernel runs once from the state itself, as on one device: nothing is rounded twice, and no
# output is computed for a response. Both exchanges are the kernel's, not autograd's, but every rank
# is in both and in the same order: the kernel is one node of the graph, between the ends of the
# call. A is not computed where nothing comes before a piece, and once for both.
class PieceStates:
    """A context for fla's kernels: the states before a rank's pieces, and their gradients after.
    Forward calls :meth:`states_before` and :meth:`saved`, backward the other two.

    Pieces lie one after the other in each row, rows one after the other: so they are numbered.
    """

    def __init__(
        self, call: ExchangeCall, heads: int, key_dim: int, value_dim: int, device: torch.device
    ) -> None:
        self.call = call
        self.pieces = call.chains.by_rank[call.mesh.rank]
        self.rows = call.chains.rows_of_piece
        state, transition = (heads, key_dim, value_dim), (heads, key_dim, key_dim)
        self.recurrence = Recurrence(_no_run, state, transition, matrix=True)
        lengths = tuple(piece.length for piece in self.pieces)
        self.cu_seqlens, self.cu_seqlens_cpu = borders_of(lengths, self.rows, device)
        self._transitions: dict[int, torch.Tensor] = {}  # A by the number of a piece

    def arguments(self) -> dict[str, Any]:
        """Return the kernel's arguments: documents; this context where states go between pieces."""
        if self.call.chains.rounds:
            return {"cp_context": self}
        return {"cu_seqlens": self.cu_seqlens, "cu_seqlens_cpu": self.cu_seqlens_cpu}

    def states_before(
        self, k: torch.Tensor, w: torch.Tensor, u: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor | None:
        """Return the states before all pieces ``[rows * pieces, heads, dk, dv]``; None: none comes
        in. Collective.

        Shapes: w ``[1, tokens, heads, dk]``, u ``[1, tokens, heads, dv]``.
        """
        g, gk, chunk_size = (kwargs.get(name) for name in ("g", "gk", "chunk_size"))
        maps: dict[int, Map] = {}
        lengths = tuple(piece.length for _, piece in self._numbered())
        for first, stop, imports in self._runs():
            states = _states(k, w, u, g, gk, chunk_size, self.cu_seqlens[first : stop + 1])
            transitions: Iterable[torch.Tensor | None] = [None] * (stop - first)
            if imports:
                transitions = _transitions(k, w, g, gk, chunk_size, lengths, slice(first, stop))
            maps |= zip(range(first, stop), map(Map, transitions, states), strict=True)
        self._transitions = {n: a for n, (a, _) in maps.items() if a is not None}
        return self._exchange(self.call.chains, maps)

    def gradients_after(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        w: torch.Tensor,
        do: torch.Tensor,
        dv: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, None]:
        """Return the gradients of the states after all pieces, of the same shape or None; and None
        for fla's own initial state. Collective. Shapes: do, dv ``[1, tokens, heads, dv]``."""
        g, gk = kwargs.get("g"), kwargs.get("gk")
        sizes = kwargs.get("scale"), kwargs.get("chunk_size")
        maps: dict[int, Map] = {}
        for n, piece in self._numbered():
            if piece.imports:
                borders = self.cu_seqlens[n : n + 2]
                gradient = _gradient_of_state(q, k, w, do, dv, g, gk, sizes, borders)
                maps[n] = Map(self._transitions[n].mT if piece.exports else None, gradient)
        return self._exchange(self.call.chains.mirrored, maps), None

    def saved(self, states: torch.Tensor | None, **_: Any) -> torch.Tensor | None:
        """Return what backward needs: the states that are not zero."""
        if states is None:
            return None
        return torch.cat([states[begin:end] for begin, end in self._incoming()])

    def restored(self, states: torch.Tensor | None, **_: Any) -> torch.Tensor | None:
        """The states before all pieces again, zeros where none comes in; undoes :meth:`saved`."""
        if states is None:
            return None
        out = states.new_zeros(self.rows * len(self.pieces), *states.shape[1:])
        spans = self._incoming()
        parts = states.split([end - begin for begin, end in spans])
        for (begin, end), part in zip(spans, parts, strict=True):
            out[begin:end] = part
        return out

    def _numbered(self) -> Iterator[tuple[int, Piece]]:
        return enumerate(self.pieces * self.rows)

    def _incoming(self) -> list[tuple[int, int]]:
        """Pieces that import, as half-open ranges: an index would wait for the device."""
        runs = groupby(self._numbered(), lambda item: item[1].imports)
        numbers = ([n for n, _ in run] for imports, run in runs if imports)
        return [(run[0], run[-1] + 1) for run in numbers]

    def _runs(self) -> Iterator[tuple[int, int, bool]]:
        """Pieces that export, as half-open ranges; whether they import, and so have an A too."""
        for (exports, imports), run in groupby(
            self._numbered(), lambda item: (item[1].exports, item[1].imports)
        ):
            numbers = [n for n, _ in run]
            if exports:
                yield numbers[0], numbers[-1] + 1, imports

    def _exchange(self, chains: StateChains, maps: dict[int, Map]) -> torch.Tensor | None:
        """The states that come into all pieces along ``chains``, of maps by number. Collective."""
        local_pieces = chains.by_rank[self.call.mesh.rank]
        states: list[torch.Tensor | None] = []
        transitions: list[torch.Tensor | None] = []
        for index, piece in enumerate(local_pieces):
            numbers = range(index, self.rows * len(local_pieces), len(local_pieces))
            rows = [maps[n] for n in numbers if piece.exports]
            of_rows = [a for a, _ in rows if a is not None]
            states.append(torch.stack([b for _, b in rows]) if rows else None)
            transitions.append(torch.stack(of_rows) if of_rows else None)
        transfer = Transfer(self.recurrence, self.call, chains, torch.float32)
        with no_autocast(self.cu_seqlens.device):
            incoming = transfer.states(local_pieces, PieceMaps(states, transitions, _no_run))
        if not incoming:
            return None
        shape = self.rows, len(local_pieces), *self.recurrence.state_shape
        out = next(iter(incoming.values())).new_zeros(shape)
        for index, piece in enumerate(local_pieces):
            if piece in incoming:
                out[:, index] = incoming[piece]
        return out.flatten(0, 1)


def _no_run(*_: Any) -> torch.Tensor:
    raise RuntimeError("the kernel runs, not the recurrence")


@functools.lru_cache(maxsize=64)
def borders_of(
    lengths: tuple[int, ...], rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """``cu_seqlens`` of a rank's pieces of all rows, one row after the other: on the device, where
    fla's caches know it by identity, and in host memory."""
    with torch.inference_mode(False):  # kept: a later training pass saves them
        host = torch.tensor(lengths * rows).cumsum(0)
        host = torch.cat([host.new_zeros(1), host])
        return host.to(device), host


@functools.lru_cache(maxsize=64)
def numbers_of(lengths: tuple[int, ...], rows: int, device: torch.device) -> torch.Tensor:
    """``seq_idx`` of pieces: the number of each token's piece ``[rows, tokens]``."""
    with torch.inference_mode(False):  # as borders_of
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        line = numbers.repeat_interleave(torch.tensor(lengths))
        return line.expand(rows, -1).to(device).contiguous()


def _states(
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
    chunk_size: int | None,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """B ``[pieces, heads, dk, dv]`` of the pieces between these borders."""
    from fla.ops.cp.chunk_fwd import chunk_cp_fwd_kernel_h

    heads, dk, dv = k.shape[2], k.shape[3], u.shape[3]
    pieces, value_heads = len(cu_seqlens) - 1, u.shape[2]
    out = k.new_empty(pieces, value_heads, dk, dv + dk, dtype=torch.float32)
    block = _block(dk)
    chunk_cp_fwd_kernel_h[-(-dv // block), value_heads, pieces](
        k=k, v=u, w=w, g=g, gk=gk, bg=None, u=u, hm=out, cu_seqlens=cu_seqlens, T=0,
        H=heads, HV=value_heads, K=dk, V=dv, BT=chunk_size, BV=block, BK=_power_of_2(dk),
        MULTI_SEQS=True,
    )  # fmt: skip
    return out[..., :dv]


# By the kernel that computes states on one device, from the unit matrix and without values: it
# rounds A as it rounds a state. fla's own for A multiplies matrices of dk x dk in fp32, chunk by
# chunk: on an H100, 32 heads of 128 and two pieces of 32K tokens, 13.5 ms beside 1.6 for B.
def _transitions(
    k: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
    chunk_size: Any,
    lengths: tuple[int, ...],
    numbers: slice,
) -> torch.Tensor:
    """A ``[pieces, heads, dk, dk]`` of the pieces of these numbers; ``lengths``: of all pieces."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
    from fla.ops.utils.index import prepare_chunk_indices

    before, selected = sum(lengths[: numbers.start]), lengths[numbers]
    k, w = (x.narrow(1, before, sum(selected)) for x in (k, w))
    g, gk = (None if x is None else x.narrow(1, before, sum(selected)) for x in (g, gk))
    borders, host_borders = borders_of(selected, 1, k.device)
    unit = torch.eye(k.shape[3], dtype=torch.float32, device=k.device)
    _, _, out = chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=torch.zeros_like(w), g=g, gk=gk,
        initial_state=unit.repeat(len(selected), w.shape[2], 1, 1), output_final_state=True,
        save_new_value=False, chunk_size=chunk_size, cu_seqlens=borders,
        chunk_indices=prepare_chunk_indices(borders, chunk_size, cu_seqlens_cpu=host_borders),
    )  # fmt: skip
    return out


def _gradient_of_state(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    do: torch.Tensor,
    dv: torch.Tensor,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
    sizes: tuple[float | None, int | None],
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """dB ``[heads, dk, dv]`` of one piece: of the state before it if no later piece had one.

    Args:
        sizes: the scale of queries, and tokens of a chunk.
    """
    from fla.ops.cp.chunk_bwd import chunk_cp_bwd_kernel_dh

    heads, dk, value_heads, width = *q.shape[2:], *do.shape[2:]
    scale, chunk_size = sizes
    out = q.new_empty(value_heads, dk, width + dk, dtype=torch.float32)
    block = _block(dk)
    chunk_cp_bwd_kernel_dh[-(-width // block), value_heads](
        q=q, k=k, w=w, g=g, gk=gk, do=do, dhm=out, dv=dv, cu_seqlens=cu_seqlens, scale=scale,
        T=q.shape[1], H=heads, HV=value_heads, K=dk, V=width, BT=chunk_size, BV=block,
        BK=_power_of_2(dk), USE_BG=False,
    )  # fmt: skip
    return out[..., :width]


def _block(key_dim: int) -> int:
    return 32 if key_dim <= 64 else 64  # columns of a thread block, as fla launches them


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
