"""Optimizer states that wait in host memory: the same training, and bytes that really leave."""

from typing import Any
from unittest import mock

import pytest
from harness import RankContext, fork_world
from trainer_runs import ADAM, degrees, start

ON_HOST = " --usp-states-on-host"
# Grid, more flags, and bytes of each parameter of a rank's share that leave: Adam's two states, and
# the master weight, which at ZeRO-0 is the parameter itself.
CASES = [
    ({"sp": 2, "zero": 0}, "", 8),
    ({"sp": 2, "zero": 1}, " --bf16", 12),
    ({"sp": 2, "zero": 3}, " --bf16", 12),
    ({"pp": 2, "zero": 1}, "", 12),  # the optimizer of ZeRO-2
]


def trained(
    ctx: RankContext, *, flags: list[str], output_dir: str
) -> list[tuple[list[Any], set[int], int, int]]:
    """Of each run: losses, norms and the sum of weights, bytes that are away in its forward passes
    after the first step, bytes away after a step, and the parameters of this rank."""
    return [_train(run, f"{output_dir}/{number}") for number, run in enumerate(flags)]


def _train(flags: str, folder: str) -> tuple[list[Any], set[int], int, int]:
    """Two steps, and validation. With states in host memory also a checkpoint between the steps,
    and a run that loads it, whose second step must equal this one's."""
    with mock.patch("ds_usp.memory.offload._MIN_BYTES", 1):
        run = start(flags + f" --save {folder}", folder)
        away, states = [], run.trainer.states
        run.trainer.engine.module.register_forward_hook(
            lambda *_: away.append(states.bytes_away if states else 0)
        )
        rows = [run.step()]
        away.clear()
        if states:
            run.save()
        rows.append(run.step())
        after = states.bytes_away if states else 0
        numbers = [row[name] for row in rows for name in ("loss", "grad_norm")]
        numbers.append(run.validate())
        parameters = [getattr(p, "ds_tensor", p) for p in run.trainer.engine.module.parameters()]
        numbers.append(sum(p.detach().double().sum().item() for p in parameters))
        if states:
            resumed = start(flags + f" --load {folder}", folder).step()
            assert [resumed["loss"], resumed["grad_norm"]] == numbers[2:4]
        return numbers, set(away), after, sum(p.numel() for p in parameters)


def test_it_trains_alike_and_the_bytes_leave(tmp_path):
    flags = [degrees(**grid) + ADAM + more + on for grid, more, _ in CASES for on in ("", ON_HOST)]
    for rank in fork_world(trained, 2, flags=flags, output_dir=str(tmp_path)):
        for (grid, _, each), plain, on_host in zip(CASES, rank[::2], rank[1::2], strict=True):
            numbers, away, after, parameters = on_host
            assert numbers == plain[0], grid
            assert plain[1] == {0} and after == 0
            shares = 2 if grid["zero"] in (1, 2) and "sp" in grid else 1
            assert max(away) == pytest.approx(each * parameters / shares, rel=0.02), grid
