"""Received keys and values: two buffers serve a ring of any size, one in use, one being filled."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_usp import MaskSpec, TokenLayout
from ds_usp.attention.kv_exchange import _pack_run
from ds_usp.attention.passes import KV_HANDLERS, ChunkState, Pass
from ds_usp.attention.plan import RingCall
from ds_usp.comm.channel import RecvSpec, StagingBuffer
from ds_usp.comm.consistency import ConsistencyChecker
from ds_usp.geometry.pipeline_schedule import Instr, Op, pipeline_schedule
from ds_usp.geometry.ring_schedule import ring_schedule


def memory_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Recorder:
    """A channel that receives nothing and knows which memory is being filled."""

    def __init__(self) -> None:
        self.filling: set[int] = set()
        self.buffers: set[int] = set()

    def acquire_staging(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype
    ) -> StagingBuffer:
        return StagingBuffer(like.new_empty(*shape, dtype=dtype))

    def post(
        self, packed: object, sends: object, recvs: Sequence[RecvSpec], *, overlapped: bool
    ) -> None:
        assert not self.filling
        self.filling = {memory_of(recv.out) for recv in recvs}
        self.buffers |= self.filling

    def wait(self) -> None:
        assert self.filling
        self.filling = set()


class Walk(Pass[ChunkState]):
    """Notes of each ring step whether its keys are memory that is being filled."""

    in_use: list[bool]

    def attend(self, chunk: ChunkState, instr: Instr) -> None:
        self.begin_step(chunk, instr.number)
        channel: Any = chunk.channels[0]
        self.in_use.append(memory_of(chunk.kv[0]) in channel.filling)

    handlers = dict(KV_HANDLERS) | {Op.ATTN: attend}


@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_is_packed_as_gpus_do_without_triton(batch):
    k, v = torch.randn(batch, 9, 6, 4)[:, :, ::2], torch.randn(batch, 9, 2, 8)
    staging = torch.full((9, batch, 3 * 4 + 2 * 8), float("nan"))
    _pack_run(staging, (2, 7), k, v)
    packed = torch.cat([x.transpose(0, 1).flatten(2) for x in (k, v)], 2)
    assert torch.equal(staging[2:7], packed[2:7])
    assert staging[:2].isnan().all() and staging[7:].isnan().all()


@pytest.mark.parametrize("ring", [2, 3, 12])
def test_two_buffers_serve_any_number_of_ranks(ring):
    layout, k = TokenLayout("contiguous", 4 * ring, 1, ring), torch.zeros(1, 4, 2, 8)
    for rank in range(ring):
        plan, channel = ring_schedule(layout, MaskSpec.full(), rank), Recorder()
        mesh = SimpleNamespace(
            channel=lambda *_, channel=channel: channel, consistency=ConsistencyChecker()
        )
        call: Any = RingCall(mesh, plan, None, 1.0)  # type: ignore[arg-type]
        whole: Any = SimpleNamespace(mesh=mesh, chunks=[None], ring_calls=[call], staging_bytes={})
        chunk = ChunkState(whole, 0)
        chunk.local_kv = k, k
        walk = Walk(whole, None, [chunk], k.device, frozenset())
        walk.in_use = []
        schedule = pipeline_schedule([plan], ulysses=False, backward=False)
        walk.execute(tuple(instr for instr in schedule if instr.op in Walk.handlers))
        assert walk.in_use == [False] * ring
        assert len(channel.buffers) == min(2, ring - 1)
