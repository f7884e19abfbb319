"""What a projected attention executes besides its attention plan, as data: for each head chunk the
rows of the weights that make it, and its exchanges of tensors that have its heads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ds_usp.attention.plan import AttentionPlan
from ds_usp.attention.projection import QKV_KINDS, Geometry, Rows
from ds_usp.comm.all_to_all import HeadAllToAll, HeadRanges
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.pipeline_schedule import Op, pipeline_schedule
from ds_usp.geometry.projected_schedule import projected_schedule


@dataclass(frozen=True)
class ProjectedChunk:
    """One head chunk. Its tensors have the heads of all ranks in this chunk, one after the other.

    Args:
        rows: of the weights, for queries, keys and values.
        num_heads: of the tensors, likewise.
        qkv: the exchange of q and, with the chunk that exchanges them, k and v; of the gradients
            on their way back.
        kv, q: the same in two exchanges.
        again: the exchange of what backward projects again: of q, and, with the first chunk of a
            KV group in backward, k and v.
        dout: of the output's gradient, of this chunk, and the output, of all heads.
        dout_columns: columns of the output's weight.
    """

    rows: tuple[tuple[Rows, ...], ...]
    num_heads: tuple[int, int, int]
    qkv: HeadAllToAll
    kv: HeadAllToAll
    q: HeadAllToAll
    again: HeadAllToAll
    dout: HeadAllToAll
    dout_columns: tuple[Rows, ...]

    @property
    def kinds(self) -> tuple[int, ...]:
        """Those whose gradients return with this chunk: (0, 1, 2), or (0,) inside a KV group."""
        return QKV_KINDS[: len(self.qkv.ranges)]

    def runs(self, kinds: Sequence[int]) -> tuple[Rows, ...]:
        """Rows of several kinds, one after the other."""
        return tuple(rows for kind in kinds for rows in self.rows[kind])

    def num_rows(self, kinds: Sequence[int]) -> int:
        """Their number: features of a token."""
        return sum(rows.stop - rows.start for rows in self.runs(kinds))


@dataclass(frozen=True)
class ProjectedPlan:
    """An attention plan whose chunks are projected.

    Args:
        attention: its schedules have the products; see :func:`projected_schedule`.
        geometry: of the projection.
        keeps_input: backward projects and exchanges again.
        chunks: one for each of the attention's.
    """

    attention: AttentionPlan
    geometry: Geometry
    keeps_input: bool
    chunks: tuple[ProjectedChunk, ...]

    @classmethod
    def of_plan(
        cls,
        plan: AttentionPlan,
        geometry: Geometry,
        batch: int,
        itemsize: int,
        *,
        keeps_input: bool,
    ) -> ProjectedPlan:
        """Add the projections to a plan.

        Args:
            batch, itemsize: samples, bytes of an element.
        """
        exchanges = plan.chunks
        last_of_group = {x.kv_chunk: index for index, x in enumerate(exchanges)}
        chunks = []
        for index, exchange in enumerate(exchanges):
            queries = exchange.qkv.ranges[0]
            keys = exchanges[exchange.kv_chunk].qkv.ranges[1]
            layout, copies = exchange.out.layouts[0], exchange.out.copies
            first_in_backward = last_of_group[exchange.kv_chunk] == index
            chunks.append(
                _projected_chunk(
                    geometry,
                    _Exchanges(plan, layout, copies),
                    (queries, keys),
                    exchange.has_kv,
                    first_in_backward,
                )
            )
        if keeps_input and plan.backward:
            plan = _projecting_again(plan, chunks, batch, geometry.value_dim, itemsize)
        forward = projected_schedule(plan.forward, backward=False)
        if plan.backward:
            backward = projected_schedule(plan.backward, backward=True, keeps_input=keeps_input)
            plan = replace(plan, backward=backward)
        return cls(replace(plan, forward=forward), geometry, keeps_input, tuple(chunks))

    @cached_property
    def runs(self) -> tuple[Rows, ...]:
        """All rows, chunk by chunk."""
        return tuple(run for chunk in self.chunks for run in chunk.runs(chunk.kinds))

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """The first feature of each chunk among those of all chunks, and their number."""
        edges = [0]
        for chunk in self.chunks:
            edges.append(edges[-1] + chunk.num_rows(chunk.kinds))
        return tuple(edges)


@dataclass(frozen=True)
class _Exchanges:
    """Makes the exchanges of one chunk."""

    plan: AttentionPlan
    layout: TokenLayout
    copies: bool

    def __call__(self, *ranges: HeadRanges) -> HeadAllToAll:
        mesh = self.plan.chunks[0].out.mesh
        return HeadAllToAll(mesh, (self.layout,) * len(ranges), ranges, self.copies)


def _projected_chunk(
    geometry: Geometry,
    exchange: _Exchanges,
    ranges: tuple[HeadRanges, HeadRanges],
    has_kv: bool,
    first_in_backward: bool,
) -> ProjectedChunk:
    """One chunk.

    Args:
        ranges: of query and key/value heads of each rank.
        has_kv: its keys and values are exchanged with it.
        first_in_backward: of the chunks of its KV group.
    """
    (query_heads, queries), (key_heads, keys) = map(_compact, ranges)
    heads = query_heads, key_heads, key_heads
    num_heads = len(query_heads), len(key_heads), len(key_heads)
    kv = (keys, keys)
    return ProjectedChunk(
        tuple(geometry.rows(kind, heads[kind]) for kind in QKV_KINDS),
        num_heads,
        exchange(queries, *(kv if has_kv else ())),
        exchange(*kv),
        exchange(queries),
        exchange(queries, *(kv if first_in_backward else ())),
        exchange(queries, ranges[0]),
        _runs_of_heads(query_heads, geometry.value_dim),
    )


def _compact(ranges: HeadRanges) -> tuple[tuple[int, ...], HeadRanges]:
    """The heads of all ranks, each once, ascending, and the ranges among these."""
    heads = tuple(sorted({head for first, stop in ranges for head in range(first, stop)}))
    places = {head: place for place, head in enumerate(heads)}
    return heads, tuple((places[first], places[stop - 1] + 1) for first, stop in ranges)


def _runs_of_heads(heads: Sequence[int], dim: int) -> tuple[Rows, ...]:
    runs: list[Rows] = []
    for head in heads:
        if runs and runs[-1].stop == head * dim:
            runs[-1] = runs[-1]._replace(stop=(head + 1) * dim)
        else:
            runs.append(Rows(0, head * dim, (head + 1) * dim))
    return tuple(runs)


def _projecting_again(
    plan: AttentionPlan,
    chunks: Sequence[ProjectedChunk],
    batch: int,
    value_dim: int,
    itemsize: int,
) -> AttentionPlan:
    """The plan whose backward exchanges keys and values again, before a ring sends them."""
    stage = any(instr.op is Op.RETURN_STAGE for instr in plan.backward)
    schedule = pipeline_schedule(
        [ring.schedule for ring in plan.ring_calls],
        ulysses=not plan.local_heads,
        backward=True,
        stage_return=stage,
        kv_saved=False,
    )
    staging = dict(plan.staging_bytes)
    if staging:
        dims = value_dim, value_dim
        largest = max(chunk.dout.staging_bytes(batch, dims, itemsize) for chunk in chunks)
        staging["all_to_all"] = max(staging["all_to_all"], largest)
    return replace(plan, backward=schedule, staging_bytes=staging)
