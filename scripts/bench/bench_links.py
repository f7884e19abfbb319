"""Bandwidth and latency of collectives, P2P and copies between GPUs, by message size.

    torchrun --nproc-per-node 4 scripts/bench/bench_links.py --out links.csv

*alone* is the time of one operation on an idle device, launch included (the latency). *in a row* is
the time per operation of several consecutive ones; the rate is the bytes that leave a rank in that
time. Both are the median over rounds of the slowest rank. A message is a rank's full send buffer of
an all-to-all or send, and its local shard of an all-gather or reduce-scatter. Smallest run, on
CPUs: --device cpu --sizes 0.0625.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from bench_harness import Session, Step, Table, common_flags

COLUMNS = ("operation", "mib", "sent_mib", "alone_us", "in_a_row_us", "gb_per_s")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Operation:
    """One kind of transfer: ``make(session, count)`` is a step on messages of ``count`` elements.

    ``messages(world)`` is how many of them leave a rank.
    """

    name: str
    make: Callable[[Session, int], Step]
    messages: Callable[[int], float]


def empty(session: Session, count: int) -> torch.Tensor:
    """A message buffer on the device; zeros, because a reduction reads it."""
    return torch.zeros(count, dtype=DTYPE, device=session.device)


def all_to_all(session: Session, count: int) -> Step:
    """All-to-all."""
    source, target = empty(session, count), empty(session, count)
    return lambda: dist.all_to_all_single(target, source)


def all_gather(session: Session, count: int) -> Step:
    """All-gather."""
    source, target = empty(session, count), empty(session, session.world * count)
    return lambda: dist.all_gather_into_tensor(target, source)


def reduce_scatter(session: Session, count: int) -> Step:
    """Reduce-scatter (sum)."""
    source, target = empty(session, session.world * count), empty(session, count)
    return lambda: dist.reduce_scatter_tensor(target, source)


def ring(session: Session, count: int) -> Step:
    """Send to the next rank, receive from the previous one, in one P2P batch."""
    source, target = empty(session, count), empty(session, count)
    after, before = ((session.rank + step) % session.world for step in (1, -1))

    def step() -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, source, after), dist.P2POp(dist.irecv, target, before)]
        )
        for work in works:
            work.wait()

    return step


def device_copy(session: Session, count: int) -> Step:
    """Device-to-device copy on one GPU."""
    source, target = empty(session, count), empty(session, count)
    return lambda: target.copy_(source)


def pinned(count: int) -> torch.Tensor:
    """A message buffer in pinned host memory."""
    return torch.zeros(count, dtype=DTYPE, pin_memory=True)


def host_to_device(session: Session, count: int) -> Step:
    """Host-to-device copy, on all ranks concurrently."""
    source, target = pinned(count), empty(session, count)
    return lambda: target.copy_(source, non_blocking=True)


def device_to_host(session: Session, count: int) -> Step:
    """Device-to-host copy, on all ranks concurrently."""
    source, target = empty(session, count), pinned(count)
    return lambda: target.copy_(source, non_blocking=True)


def peer_push(session: Session, count: int) -> Step:
    """Write to the next rank's symmetric memory; contiguous, so by a copy engine."""
    import torch.distributed._symmetric_memory as symm

    if not session.on_gpu:
        raise RuntimeError("symmetric memory is between GPUs")
    local = symm.empty(count, dtype=DTYPE, device=session.device)
    handle = symm.rendezvous(local, dist.group.WORLD)
    peer = handle.get_buffer((session.rank + 1) % session.world, (count,), DTYPE)
    source = empty(session, count)

    def step(_kept: object = (local, handle)) -> None:  # the peer's buffer does not keep them
        peer.copy_(source)

    return step


OPERATIONS = (
    Operation("all-to-all", all_to_all, lambda world: (world - 1) / world),
    Operation("all-gather", all_gather, lambda world: world - 1),
    Operation("reduce-scatter", reduce_scatter, lambda world: world - 1),
    Operation("ring send/receive", ring, lambda world: 1),
    Operation("device copy", device_copy, lambda world: 1),
    Operation("host to device", host_to_device, lambda world: 1),
    Operation("device to host", device_to_host, lambda world: 1),
    Operation("copy to next rank", peer_push, lambda world: 1),
)


def measure_row(
    session: Session, operation: Operation, mib: float, args: argparse.Namespace
) -> list[str] | str:
    """A row of the table, or the reason why there is none."""
    element = DTYPE.itemsize * session.world  # divisible by the number of ranks
    count = max(1, round(mib * 2**20) // element) * session.world

    def make() -> Step:
        step = operation.make(session, count)
        for _ in range(2):
            step()
        return step

    step = session.try_all_ranks(make)
    if isinstance(step, str):
        return step
    alone = session.medians({"": step}, args.rounds)[""]
    in_a_row = session.medians({"": step}, args.rounds, args.repeats)[""]
    sent = count * DTYPE.itemsize * operation.messages(session.world)
    figures = (mib, sent / 2**20, alone * 1e6, in_a_row * 1e6, sent / in_a_row / 1e9)
    return [operation.name, *(f"{x:.5g}" for x in figures)]


def main() -> None:
    """Measure every operation at every size; rank 0 prints and writes."""
    args = parse()
    session = Session.start(args.device)
    if session.world < 2:
        raise SystemExit("a link has two ends: run at least two ranks")
    table = Table(session, args.out, COLUMNS, "bf16, MiB = 2^20 bytes, GB = 10^9 bytes")
    session.print0("{:20} {:>8} {:>9} {:>10} {:>12} {:>9}".format(*COLUMNS))
    for operation in OPERATIONS:
        for mib in args.sizes:
            row = measure_row(session, operation, mib, args)
            if isinstance(row, str):
                session.print0(f"{operation.name:20} left out, {row}")
                break
            table.add(row)
            session.print0("{:20} {:>8} {:>9} {:>10} {:>12} {:>9}".format(*row))
    session.close()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    parser.add_argument(
        "--sizes", nargs="+", type=float, default=[1, 4, 16, 64, 256], help="MiB of a message"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=10, help="operations in a row")
    return parser.parse_args()


if __name__ == "__main__":
    main()
