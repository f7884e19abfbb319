"""Names the collectives of one step in the profiler's trace: kind, and bytes sent.

For one step the methods of torch's ProcessGroup are replaced by ones that open a range and call the
original: NCCL's kernels do not hold for which of a program's groups they run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from ds_usp.comm.channel import PREFIX, exchange_range, profiler_enabled
from ds_usp.profiling.exposed_kinds import (
    OTHER,
    gathered_bytes,
    kind_of_call,
    operation_of,
    role_of_description,
    sent_bytes,
)

LAUNCH = "launch"  # in place of a range's bytes: it launches what ranges before it counted
# Methods of ProcessGroup: the number of the argument that this rank sends.
_METHODS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("allreduce", "allreduce_coalesced", "reduce", "broadcast"), 0),
        **dict.fromkeys(("send", "recv", "recv_anysource", "barrier"), 0),
        **dict.fromkeys(("allgather", "_allgather_base", "all_gather_single"), 1),
        **dict.fromkeys(("allgather_coalesced", "allgather_into_tensor_coalesced"), 1),
        **dict.fromkeys(("all_gather_single_coalesced", "reduce_scatter"), 1),
        **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), 1),
        **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), 1),
        **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), 1),
        **dict.fromkeys(("gather", "scatter"), 1),
    }
)


@contextlib.contextmanager
def named_calls(roles: Mapping[str, str]) -> Iterator[list[tuple[str, int]]]:
    """Within this context every call that Python makes of a process group has a range.

    The profiler records ranges on the thread that started it and on autograd's. Calls on other
    threads are in the list: kind and sent bytes. Calls of C++ (DistributedDataParallel's reducer,
    functional collectives) pass these methods by.

    Args:
        roles: what groups are for, by ``ProcessGroup.group_name``.

    Yields:
        The calls on threads that the profiler does not record.
    """
    unrecorded: list[tuple[str, int]] = []
    last_kinds: dict[str, str] = {}  # of the last call by group: that of the launch after it
    originals = {
        name: vars(dist.ProcessGroup)[name]
        for name in (*_METHODS, "_end_coalescing")
        if name in vars(dist.ProcessGroup)
    }
    try:
        for name in originals:
            if name == "_end_coalescing":
                wrapped = _named_launch(getattr(dist.ProcessGroup, name), last_kinds)
            else:
                method = getattr(dist.ProcessGroup, name)
                wrapped = _named_call(method, name, roles, last_kinds, unrecorded)
            setattr(dist.ProcessGroup, name, wrapped)
        yield unrecorded
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def _named_call(
    original: Callable[..., Any],
    name: str,
    roles: Mapping[str, str],
    last_kinds: dict[str, str],
    unrecorded: list[tuple[str, int]],
) -> Callable[..., Any]:
    """The method with a range around each call."""
    operation, number = operation_of(name), _METHODS[name]

    @functools.wraps(original)
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        inputs = args[number] if len(args) > number else None
        # Only the root has a scatter's input: the output tells every rank the same kind.
        num_bytes = _num_bytes(args[0] if operation == "scatter" and args else inputs)
        role = roles.get(group.group_name) or role_of_description(group.group_desc)
        size = gathered_bytes(operation, num_bytes, group.size(), _is_floating(inputs))
        kind = kind_of_call(role, operation, size) if group.size() > 1 else OTHER
        last_kinds[group.group_name] = kind
        sent = _sent_bytes(operation, group, inputs, args)
        if not profiler_enabled():
            unrecorded.append((kind, sent))
        with exchange_range(kind, sent):
            return original(group, *args, **kwargs)

    return call


def _sent_bytes(operation: str, group: dist.ProcessGroup, inputs: Any, args: Sequence[Any]) -> int:
    """What this rank sends to others in a call with these arguments."""
    num_bytes, ranks = _num_bytes(inputs), group.size()
    if operation == "alltoall" and isinstance(inputs, (list, tuple)):
        return num_bytes - _num_bytes(inputs[group.rank()])
    if operation == "alltoall" and len(args) > 3 and args[3] and num_bytes:
        own_rows = int(args[3][group.rank()])  # args[3]: rows for each rank; empty: even
        return num_bytes - own_rows * (num_bytes // inputs.shape[0])
    if operation == "gather" and len(args) > 2 and args[2].rootRank == group.rank():
        return 0
    return sent_bytes(operation, num_bytes, ranks)


def _named_launch(
    original: Callable[..., Any], last_kinds: Mapping[str, str]
) -> Callable[..., Any]:
    """``_end_coalescing``, in which NCCL launches the kernel of the calls before it."""

    @functools.wraps(original)
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        kind = last_kinds.get(group.group_name)
        if kind is None:
            return original(group, *args, **kwargs)
        with record_function(f"{PREFIX}{kind}/{LAUNCH}"):
            return original(group, *args, **kwargs)

    return call


def _num_bytes(value: Any) -> int:
    """Of a tensor, or of all tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_num_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _is_floating(value: Any) -> bool:
    """Whether a tensor, or the first one in nested lists, holds floating-point numbers."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, (list, tuple)) and bool(value) and _is_floating(value[0])
