"""Process groups, made at start with a mesh: sub-groups that only their members create, a few bytes
from every rank, which ranks are on one node; and an error that all ranks raise, printed once."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Before there is a default group: default arguments of its functions hold the one of its first
# import, which torch._dynamo would do later, and destroying that group would not end its threads.
import torch.distributed.nn.functional
from torch.distributed import distributed_c10d as c10d

from ds_usp.config import environment
from ds_usp.errors import USPError
from ds_usp.geometry.ranks import RankGrid

_STORE_TIMEOUT_S = 2.0  # how long a rank that ends waits for the answer of the job's store


def subgroup(
    parent: dist.ProcessGroup, ranks: list[int], backend: str | None = None
) -> dist.ProcessGroup | None:
    """A communicator of its own over some global ranks of a group, with the group's timeout, and
    its backend if None; None for one rank. Collective over these ranks only; before it
    :func:`align_group_counters`, over all of them."""
    if len(ranks) == 1:
        return None
    parent_backend = dist.get_backend(parent)
    # Only members call: the ranks of other sequence-parallel groups need not take part.
    group = new_local_group(
        ranks,
        timeout=timeout_of(parent),
        backend=backend or (None if parent_backend == "undefined" else parent_backend),
    )
    # Point-to-point messages need a communicator that all its ranks have joined.
    dist.all_reduce(torch.zeros(1, device=transport_device(group)), group=group)
    return group


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long a group's collectives wait for a rank."""
    # torch gives each new group its own default instead, half an hour with gloo. A user who raised
    # it for slow storage, or lowered it to end soon when a host is lost, meant her collectives,
    # whichever communicator they run on: groups that are made of hers keep it.
    return group._get_backend(transport_device(group)).options._timeout


def new_local_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """``dist.new_group(ranks, **options)`` that only its members call, named after these ranks and
    the number of groups that a process is in: :func:`align_group_counters` first."""
    # So torch itself names it up to 2.13. From 2.14 on it takes the number of groups that were
    # asked for, and counts this one on its members alone: the next group that the whole world
    # creates would have another name on each side, and both would wait. Our groups therefore bring
    # their own number, below zero, where torch has none, and leave torch's as it was.
    world = c10d._world
    before = world.group_count
    world.group_count = -1 - len(world.pg_names)
    try:
        return dist.new_group(ranks, use_local_synchronization=True, **options)
    finally:
        world.group_count = before


def align_group_counters(group: dist.ProcessGroup) -> None:
    """Create one-rank groups until all ranks are in as many groups as any of them: a
    :func:`new_local_group` is named after that number. Collective."""
    count = len(c10d._world.pg_names)
    counts = all_gather_bytes(count.to_bytes(8, "big"), group)
    for _ in range(max(int.from_bytes(data, "big") for data in counts) - count):
        new_local_group([dist.get_rank()])


def all_gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """``data`` of every rank, in the group's order; as many bytes on each. Collective."""
    local = byte_tensor(data, group)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    received = bytearray(len(gathered) * len(data))
    torch.frombuffer(received, dtype=torch.uint8).copy_(torch.cat(gathered))
    return [bytes(received[i : i + len(data)]) for i in range(0, len(received), len(data))]


def byte_tensor(data: bytes, group: dist.ProcessGroup) -> torch.Tensor:
    """A copy of the bytes ``[n]`` on a device from which the group can send."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(transport_device(group))


def transport_device(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors the group can send; the CPU if that is one."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds.pop(), torch.accelerator.current_device_index())


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End a program with one line where the user can mend what it reports, instead of a traceback
    for each rank:

        with ds_usp.one_line_errors():
            main()

    Every rank exits with code 1. One of them prints a line that several have, those that differ are
    all printed; before there are process groups rank 0 prints.

    Raises:
        SystemExit: for a :class:`~ds_usp.USPError`. Other errors pass, with their tracebacks.
    """
    try:
        yield
    except USPError as error:
        text = f"{type(error).__name__}: {error}"
        raise SystemExit(text if _is_speaker(text) else 1) from error


def _is_speaker(text: str) -> bool:
    if not dist.is_initialized():
        return environment(("RANK",)).get("RANK", "0") == "0"
    key, store = f"usp error {hashlib.sha256(text.encode()).hexdigest()}", c10d._get_default_store()
    ranks_with_it: list[int] = []
    ask_store(lambda: ranks_with_it.append(store.add(key, 1))).join(_STORE_TIMEOUT_S)
    return not ranks_with_it or ranks_with_it[0] == 1


def ask_store(request: Callable[[], object]) -> threading.Thread:
    """Start a thread that makes a request to a store, and ends without a word if the store is gone.
    Whoever has to raise in time joins it with a timeout."""
    # A request to a store whose host cannot be reached ends when TCP gives up, after a quarter of
    # an hour, and requests of other threads over the same connection wait for it, even `set`.

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            request()

    thread = threading.Thread(target=ask, name="ds_usp store", daemon=True)
    thread.start()
    return thread


def node_ids(group: dist.ProcessGroup) -> list[bytes]:
    """A digest of the node of each rank of a group; collective over it."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    node = boot_id.read_text() if boot_id.exists() else platform.node()
    return all_gather_bytes(hashlib.sha256(node.encode()).digest(), group)


def ulysses_ranks_share_node(nodes: Sequence[bytes], grid: RankGrid) -> bool:
    """Whether the Ulysses ranks of each ring rank are on one node."""
    peers = (grid.group_of(rank, "ulysses") for rank in range(len(nodes)))
    return all(len({nodes[rank] for rank in ranks}) == 1 for ranks in peers)
