"""A rank that raises, skips, sleeps, is stopped or killed anywhere in a step: no wrong number, no
hang, and the next step is exact on every rank but after a kill."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import RankContext, Team
from torch import Tensor, nn

import ds_usp
from ds_usp import testing as oracle

STEPS, ATTACKED = 4, 1
TOKENS, HEADS, DIM, BOUND = 21, 4, 8, 1e-10
TIMEOUT_S = 60.0
HOWS = ("none", "raise", "skip", "sleep", "stop", "kill")


@dataclass(frozen=True)
class Attack:
    """On a rank, at an event of its second step: ``place``, a fraction of all of them."""

    how: str
    world: int
    rank: int
    place: float
    ulysses: int
    layout: str

    @classmethod
    def draw(cls, seed: int) -> "Attack":
        draw = random.Random(seed)
        world = draw.choice((2, 3, 4))
        ulysses = draw.choice([degree for degree in (1, 2, 4) if world % degree == 0])
        layout = draw.choice(("contiguous", "zigzag", "striped"))
        how, rank = HOWS[seed % len(HOWS)], draw.randrange(world)
        return cls(how, world, rank, draw.random(), ulysses, layout)


class SkippedError(Exception):
    """This rank leaves out the rest of a step."""


def act(how: str) -> None:
    if how in ("raise", "skip"):
        raise RuntimeError("attack") if how == "raise" else SkippedError
    if how == "sleep":
        time.sleep(1.2)
    if how == "stop":
        subprocess.Popen(["sh", "-c", f"sleep 1.2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


class Attention(nn.Module):
    """Two layers of attention whose calls are alike, on a shard. Each layer that begins its forward
    or its backward pass is an event."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HEADS * DIM, HEADS * DIM) for _ in range(3))
        self.events, self.at, self.how = 0, -1, "none"
        for layer in self.layers:
            layer.register_forward_pre_hook(self._event)
            layer.register_full_backward_pre_hook(self._event)

    def _event(self, *_: Any) -> None:
        self.events += 1
        if self.events - 1 == self.at:
            act(self.how)

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Shapes: x ``[1, s, 4, 8]``."""
        for layer in self.layers[:2]:
            x = attend(layer(x.flatten(2)).view(x.shape))
        out: Tensor = self.layers[2](x.flatten(2))
        return out


def attacked_steps(ctx: RankContext, attack: Attack) -> list[str]:
    """What each step gave: "exact", by how much it was wrong, or what was raised. A mesh that has
    failed for good is replaced by a new one."""
    module, mask = Attention().double(), ds_usp.MaskSpec.causal()
    allowed = oracle.causal(range(TOKENS), range(TOKENS))
    outcomes, events = list[str](), 0
    for step in range(STEPS):
        mesh = ds_usp.SequenceMesh.from_group(ctx.group, attack.ulysses)
        layout = mesh.layout(attack.layout, TOKENS)
        generator = torch.Generator().manual_seed(step)
        whole = torch.randn(1, TOKENS, HEADS, DIM, generator=generator, dtype=torch.float64)
        attend = lambda q: ds_usp.usp_attention(q, q, q, mesh=mesh, layout=layout, mask=mask)  # noqa: B023, E731
        hits = step == ATTACKED and ctx.rank == attack.rank
        module.at = int(attack.place * events) if hits else -1
        module.events, module.how = 0, attack.how
        module.zero_grad()
        try:
            with mesh.agreeing(f"step {step}"):
                out = module(layout.shard(whole, 1, mesh.rank), attend)
                out.square().sum().backward()
            module.at, events = -1, module.events
            (want,) = oracle_gradients(module, whole, allowed)
            have = module.layers[0].weight.grad.clone()
            torch.distributed.all_reduce(have)
            error = oracle.relative_error(have, want)
            outcomes.append("exact" if error < BOUND else f"WRONG by {error}")
        except (RuntimeError, SkippedError, ds_usp.MeshError) as raised:
            outcomes.append(f"{type(raised).__name__}: {raised}")
            if attack.how == "kill":  # no collective is left to make another mesh by
                break
    return outcomes


def oracle_gradients(module: Attention, whole: Tensor, allowed: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the first layer's weight of the whole sequence, on one rank."""
    out = module(whole, lambda q: oracle.dense_attention(q, q, q, allowed)[0])
    return torch.autograd.grad(out.square().sum(), [module.layers[0].weight])


@pytest.mark.parametrize("seed", range(2 * len(HOWS)), ids=lambda x: f"{x}-{HOWS[x % len(HOWS)]}")
def test_an_attacked_rank_gives_no_wrong_number_and_no_hang(seed):
    attack, killed = Attack.draw(seed), HOWS[seed % len(HOWS)] == "kill"
    team = Team(attack.world)
    try:
        results = team.call(attacked_steps, {"attack": attack}, TIMEOUT_S, TIMEOUT_S)
    finally:
        team.close()
    for rank, outcome in enumerate(results):
        if killed and rank == attack.rank:
            assert "the process died" in str(outcome.error)
            continue
        assert outcome.error is None, outcome.traceback
        first, second, *later = outcome.value
        assert first == "exact" and later == ([] if killed else ["exact"] * 2), (attack, outcome)
        if killed:
            assert "has ended" in second and "failed for good" in second, (attack, second)
        elif attack.how in ("none", "sleep", "stop"):
            assert second == "exact", (attack, second)
        else:  # by its own error on the rank, which the others quote
            assert ("attack" in second) == (attack.how == "raise"), (attack, second)
            assert second.startswith("MeshError") == (rank != attack.rank), (attack, second)
