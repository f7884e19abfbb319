"""A checkpoint of one split of ranks resumes on another as if nothing had been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_runs import TrainingServer, flags, losses_of, relative_difference, reported_kinds
from test_lm_parity import MODELS

LIMIT = 1e-5
ADAM = "--optimizer adam --lr 1e-2 --min-lr 1e-2"
DISTRIBUTED = f"{ADAM} --use-distributed-optimizer"
ANY_SPLIT = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
TORCH, TORCH_DIST = "--ckpt-format torch", "--ckpt-format torch_dist"
V = {"pp": 2, "virtual": 1}

# name: optimizer and format, degrees that save, degrees that resume; the rest of 4 ranks is data
# parallel. --dist-ckpt-optim-fully-reshardable is for other tensor- or pipeline-parallel degrees.
CASES: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "u2r2 to r4": (f"{ADAM} {TORCH}", {"u": 2, "r": 2}, {"r": 4}),
    "u2r2 to u4, distributed": (f"{DISTRIBUTED} {TORCH}", {"u": 2, "r": 2}, {"u": 4}),
    "u2 dp2 to r4, distributed": (f"{DISTRIBUTED} {TORCH_DIST}", {"u": 2}, {"r": 4}),
    "u2 dp2 to r2 tp2": (f"{ANY_SPLIT} {TORCH_DIST}", {"u": 2}, {"r": 2, "tp": 2}),
    "u2r2 to r2 pp2v": (f"{ANY_SPLIT} {TORCH_DIST}", {"u": 2, "r": 2}, {"r": 2, **V}),
    "tp2 pp2 to u4": (f"{ANY_SPLIT} {TORCH_DIST}", {"tp": 2, "pp": 2}, {"u": 4}),
    "u2 pp2 to r2 tp2": (f"{ADAM} {TORCH_DIST}", {"u": 2, "pp": 2}, {"r": 2, "tp": 2}),
    "bf16": (f"{ANY_SPLIT} {TORCH_DIST} --bf16", {"u": 2, "r": 2}, {"r": 4}),
}
FAST = ("u2 dp2 to r2 tp2", "u2r2 to u4, distributed")


def check(server: TrainingServer, folder: Path, name: str) -> None:
    """Train 4 steps without a break, and 2 + 2 with a checkpoint between."""
    text, before, after = CASES[name]
    text = f"{MODELS['llama']} {text}"

    def train(degrees: dict[str, int], more: str, **options: Any) -> list[dict[str, Any]]:
        return server.run(4, flags(more=f"{text} {more}", **degrees), **options)

    expected = losses_of(train(before, ""))
    report = "--usp-report-communication 2"
    saved = train(before, f"--save {folder} --save-interval 2 --exit-interval 2 {report}")
    kinds = {"gradient reduction"} | ({"all-to-all"} if "u" in before else set())
    kinds |= {"parameter gather"} if DISTRIBUTED in text else set()
    assert kinds <= reported_kinds(folder, 4)
    resumed = losses_of(train(after, f"--load {folder}", own_weights=True))
    assert losses_of(saved)[:2] == expected[:2]
    limit = 1e-3 if "bf16" in text else LIMIT
    assert relative_difference(resumed, expected[2:]) < limit


@pytest.mark.parametrize("name", FAST)
def test_it_resumes_on_another_split(server: TrainingServer, tmp_path: Path, name: str) -> None:
    check(server, tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in FAST])
def test_every_format_resumes(server: TrainingServer, tmp_path: Path, name: str) -> None:
    check(server, tmp_path, name)
