"""A loader's batches in one layout, and attention that was given none: refused, not computed as if
the tokens were others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import RankContext, WorkerPool
from sample_attentions import Local

import ds_usp
from ds_usp import MaskSpec, SequenceMesh, USPAttention
from ds_usp.training import SequenceParallelDataLoader

WORLD, TOKENS = 4, 16


def attempts(ctx: RankContext, ulysses: int, kind: str) -> dict[str, str]:
    """The message of each entry point after a batch of ``TOKENS`` tokens in a layout of this kind;
    nothing where it is computed."""
    group = torch.distributed.new_group(list(range(ctx.world)))  # no other test's batches
    batch = {"input_ids": torch.arange(2 * TOKENS).view(2, -1)}
    mesh = SequenceMesh.from_group(group, ulysses)
    computed: dict[str, Any] = {"mask": MaskSpec.causal(), "dropout_p": 0.0}

    def attention(**options: Any) -> USPAttention:
        """On a mesh of its own, over the loader's ranks."""
        return USPAttention(
            Local(0), group, gather_idx=1, ulysses_degree=ulysses, **computed, **options
        )

    def compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch._dynamo.reset()
        attend = torch.compile(attention(), backend="aot_eager", fullgraph=True)
        out: torch.Tensor = attend(q, k, v)
        return out

    modes: dict[str, tuple[str, int, Callable[..., torch.Tensor]]] = {
        "default": (kind, TOKENS, attention()),
        "compiled": (kind, TOKENS, compiled),
        "named": (kind, TOKENS, attention(layout=kind)),
        "other tokens, named": (kind, TOKENS, attention(layout="contiguous")),
        "another length": (kind, 2 * TOKENS, attention()),
        "a later batch": ("contiguous", TOKENS, attention()),
    }
    message_of = {}
    for mode, (layout, tokens, attend) in modes.items():
        list(SequenceParallelDataLoader([batch], mesh, layout))
        q, k, v = (torch.randn(2, tokens // ctx.world, 4, 16) for _ in range(3))
        try:
            attend(q, k, v)
            message_of[mode] = ""
        except ds_usp.LayoutError as error:
            message_of[mode] = str(error)
    return message_of


def test_a_default_layout_is_checked_against_the_loaders(pool: WorkerPool) -> None:
    for message_of in pool.run(attempts, WORLD, ulysses=2, kind="zigzag"):
        wrong = [message_of.pop(mode) for mode in ("default", "compiled")]
        assert all("in the layout 'zigzag'" in text and "'contiguous'" in text for text in wrong)
        assert not any(message_of.values()), message_of


def test_layouts_of_equal_positions_are_no_difference(pool: WorkerPool) -> None:
    for message_of in pool.run(attempts, WORLD, ulysses=4, kind="zigzag"):
        assert not any(message_of.values()), message_of


def test_without_a_ring_the_order_matters_where_it_differs(pool: WorkerPool) -> None:
    for message_of in pool.run(attempts, WORLD, ulysses=4, kind="context_parallel"):
        assert message_of["default"] and message_of["compiled"] and not message_of["named"]
