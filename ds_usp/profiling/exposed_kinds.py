"""Kinds of communication, by the process group that a call used and by what the call does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from ds_usp.errors import ConfigError

ALL_TO_ALL, RING = "all-to-all", "ring"
GRADIENTS, PARAMETERS = "gradient reduction", "parameter gather"
TENSOR, PIPELINE = "tensor parallel", "pipeline"
P2P, OTHER = "point to point", "other collectives"
FROM_HOST, TO_HOST = "copies from the host", "copies to the host"
COMPUTE = "kernels"
# In the order of the table.
KINDS = (
    *(ALL_TO_ALL, RING, GRADIENTS, PARAMETERS, TENSOR, PIPELINE, P2P, OTHER),
    *(FROM_HOST, TO_HOST),
)
BETWEEN_RANKS = KINDS[:-2]
ROLES = ("tensor", "pipeline", "sequence", "data")

# The ledger's kinds, which name the ranges of ds_usp's own exchanges.
_OF_LEDGER: Mapping[str, str] = MappingProxyType(
    {
        "all_to_all": ALL_TO_ALL,
        "ring_kv": RING,
        "ring_dkv": RING,
        "ring_kv_outer": RING,
        "ring_dkv_outer": RING,
    }
)
# Operations by what their names contain without underscores; the first that matches. The names are
# those of c10d's methods, of NCCL's metadata in traces, and of NCCL's kernels.
_OPERATIONS = (
    *("reducescatter", "allreduce", "allgather", "alltoall", "sendrecv", "send", "recv"),
    *("broadcast", "barrier", "gather", "scatter", "reduce", "coalesced"),
)
_POINT_TO_POINT = ("sendrecv", "send", "recv", "coalesced")
_REDUCTIONS = ("reducescatter", "allreduce", "reduce")
# Kernels that communicate: the kind by name, "" where the operation in the name decides. The first
# that matches; TransformerEngine's, DeepEP's and vLLM's run without NCCL.
_KERNELS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (TENSOR, r"userbuffers|cross_device_reduce"),
        (ALL_TO_ALL, r"deep_ep"),
        ("", r"nccl|symm_mem|multimem|(one|two)_shot_(all|reduce)"),
        (OTHER, r"nvshmem|symmetric_memory|(wait|put)_signal_kernel"),
    )
)
# Up to so many bytes: norms, losses and flags, no gradients and no parameters.
_SCALARS_BYTES = 4096
# Descriptions of groups, as megatron-core and torch's DeviceMesh give them; the first that matches.
_DESCRIPTIONS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (role, re.compile(pattern, re.IGNORECASE))
    for role, pattern in (
        ("", r"^TENSOR_AND_|^EXPERT_MODEL|TENSOR_MODEL_PIPELINE|^mesh_\w+_tp\b|^mesh_tp_"),
        ("data", r"data_parallel|embedding_group|_(dp|fsdp|hsdp|ddp)\b|_dp_|^mesh_data\b"),
        ("data", r"^mesh_(shard|replicate)\b"),
        ("tensor", r"tensor_model|tensor_parallel|_tp\b|^mesh_tensor\b"),
        ("pipeline", r"pipeline|_pp\b"),
        (
            "sequence",
            r"context_parallel|sequence_parallel|\bulysses|_ulysses|_(cp|sp|ring)\b|\bring(\b|_)",
        ),
    )
)


def operation_of(name: str) -> str:
    """The operation that a method, a metadata entry or a kernel names; "" for none."""
    text = name.lower().replace("_", "")
    return next((operation for operation in _OPERATIONS if operation in text), "")


def role_of_description(description: str) -> str:
    """What a group is for, by the description that its program gave it; "" if it names no role."""
    return next((role for role, pattern in _DESCRIPTIONS if pattern.search(description)), "")


def kind_of_kernel(name: str) -> str | None:
    """The kind of a kernel by its name alone; None for one that computes."""
    kind = next((kind for kind, pattern in _KERNELS if pattern.search(name)), None)
    return kind_of_call("", operation_of(name), None) if kind == "" else kind


def check_role(role: str) -> str:
    """The role.

    Raises:
        ConfigError: it is none.
    """
    if role not in ROLES:
        raise ConfigError(f"a group's role must be one of {', '.join(ROLES)}, not {role!r}")
    return role


def kind_of_call(role: str, operation: str, num_bytes: int | None) -> str:
    """The kind of a collective or transfer of NCCL or gloo.

    Args:
        role: of its group, one of :data:`ROLES`; "": unknown.
        operation: as :func:`operation_of` returns it.
        num_bytes: of the call; None: unknown.
    """
    if role == "tensor":
        return TENSOR
    if operation in _POINT_TO_POINT:
        return {"pipeline": PIPELINE, "sequence": RING}.get(role, P2P)
    if operation == "alltoall":
        return ALL_TO_ALL
    if operation in ("", "barrier") or (num_bytes is not None and num_bytes <= _SCALARS_BYTES):
        return OTHER
    if role == "sequence":  # all-gathered KV, and its gradients
        return RING
    return GRADIENTS if operation in _REDUCTIONS else PARAMETERS


def kind_of_range(name: str) -> str:
    """The kind in the name of a range, from the ledger's or a report's."""
    return _OF_LEDGER.get(name, name if name in KINDS else OTHER)


def gathered_bytes(operation: str, input_bytes: int, ranks: int, floating: bool) -> int:
    """The size by which :func:`kind_of_call` tells parameters from flags: for an all-gather of
    floating-point numbers that of all ranks' parts, as parts of parameters become small where the
    ranks are many; integers are objects and flags."""
    return input_bytes * ranks if operation == "allgather" and floating else input_bytes


def sent_bytes(operation: str, input_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends to others in a call, by the algorithm that sends least: a ring.

    Args:
        input_bytes: of this rank's input.
        ranks: of the group.
    """
    if ranks < 2 or operation in ("recv", "barrier", "coalesced"):
        return 0
    others = ranks - 1
    factors = {
        "allreduce": 2 * others / ranks,
        "reducescatter": others / ranks,
        "alltoall": others / ranks,
        "scatter": others / ranks,  # of the root; the input of other ranks is empty
        "allgather": others,
    }
    return round(input_bytes * factors.get(operation, 1))
