"""Counts what attention sends between two hosts, beside the ledger's bytes: run by test_hosts.py.

    torchrun ... tests/bytes_between_hosts.py FILE INTERFACE

Of every mesh of Ulysses x ring, either axis inside the hosts, and of layers that carry a state.
Rank 0 writes a JSON list of rows to the file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import ds_usp
from ds_usp.geometry.degrees import divisors
from ds_usp.recurrence.scan import PieceMap, Recurrence, affine_scan

TOKENS, HEADS, HEAD_DIM = 1024, 8, 128
STATE = (8, 64, 64)


def meshes() -> Iterator[tuple[str, ds_usp.SequenceMesh]]:
    """All Ulysses x ring meshes of the ranks, and those with the ring inside a host."""
    world = dist.get_world_size()
    for ulysses in divisors(world):
        name = f"{ulysses} x {world // ulysses}"
        yield name, ds_usp.SequenceMesh.from_group(None, ulysses)
        if 1 < ulysses < world:
            mesh = ds_usp.SequenceMesh.from_group(None, ulysses, "ring-ulysses")
            yield f"{name}, ring inside", mesh


def calls(mesh: ds_usp.SequenceMesh) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """What is computed on a mesh, by name."""
    layout = mesh.layout("zigzag", TOKENS)
    tokens = layout.length(mesh.rank)
    for kv_heads in (HEADS, 2):
        heads = HEADS, kv_heads, kv_heads
        qkv = (torch.randn(1, tokens, n, HEAD_DIM, requires_grad=True) for n in heads)
        attend = partial(ds_usp.usp_attention, *qkv, mesh=mesh, layout=layout)
        yield f"{kv_heads} KV heads", partial(attend, mask=ds_usp.MaskSpec.causal())
    x = torch.rand(1, tokens, 8, requires_grad=True)
    recurrence = Recurrence(with_states, STATE, STATE, True, piecewise=True)
    where = {"mesh": mesh, "layout": layout, "dims": (1,), "out_dim": 1}
    yield "states", partial(affine_scan, recurrence, [x], **where)


def with_states(inputs: list[torch.Tensor], piece: object) -> PieceMap:
    """A scan that sends what a layer of 8 heads with matrices as states and transitions sends."""
    (x,) = inputs
    whole = x.mean().expand(1, *STATE)
    exported, across = whole if piece.exports else None, piece.exports and piece.imports
    respond = (lambda state: x * state.mean()) if piece.imports else None
    return PieceMap(x, exported, whole if across else None, respond)


def counted(mesh: ds_usp.SequenceMesh, interface: str, step: Callable[[], object]) -> list[tuple]:
    """Return by rank its host, the ledger's bytes to the other host, those that its interface sent,
    and at most how many of these TCP sent again, since it took them for lost."""
    mesh.ledger.reset()
    dist.barrier()
    before, resent_before = sent_by(interface), resent()
    step()
    dist.barrier()
    row = int(os.environ["GROUP_RANK"]), sum(mesh.ledger.between_nodes.values())
    rows: list = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (*row, sent_by(interface) - before, resent() - resent_before))
    return rows


def sent_by(interface: str) -> int:
    """Bytes that a network interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            return int(fields.split()[8])
    raise LookupError(interface)


def resent() -> int:
    """Bytes of the segments that TCP of this host has sent again, each as long as can be."""
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")]) * 1514  # with the headers of 1500 bytes of IP


def main() -> None:
    """Count on every mesh."""
    path, interface = sys.argv[1:]
    dist.init_process_group("gloo")
    table = []
    for name, mesh in meshes():
        for case, call in calls(mesh):
            call().sum().backward()  # the first one opens connections
            outs: list[torch.Tensor] = []
            forward = counted(mesh, interface, lambda call=call, outs=outs: outs.append(call()))
            backward = counted(mesh, interface, outs[0].sum().backward)
            for way, rows in (("forward", forward), ("backward", backward)):
                for host in range(2):
                    of_host = [row for row in rows if row[0] == host]
                    _, ledger, *counts = zip(*of_host, strict=True)
                    table.append([name, case, way, host, sum(ledger), *map(max, counts)])
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(table))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
