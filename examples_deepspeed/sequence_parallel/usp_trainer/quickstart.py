"""``--quickstart``: train a small GPT on 4 forked ranks, then prove that one rank agrees."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from usp_trainer.arguments import replica_size
from usp_trainer.launch import run_forked
from usp_trainer.loop import pretrain
from usp_trainer.report import METRICS

LIMIT = 1e-5  # relative difference of losses in fp32
STEPS = 8
# SGD without clipping shows a wrong gradient scale at once; Adam is what people train with.
PROOFS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "SGD": {"optimizer": "sgd", "lr": 0.1, "clip_grad": 0.0},
        "Adam": {"optimizer": "adam", "lr": 1e-3, "clip_grad": 1.0},
    }
)


def quickstart(args: Namespace) -> int:
    """Train, then compare losses with one rank's; 1 if they differ by ``LIMIT`` or more."""
    failed = run_forked(pretrain, args, replica_size(args))
    if failed:
        return failed
    print(f"\nproof: {STEPS} steps from the same seed, on these ranks and on one, in fp32")
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="usp_proof_") as folder:
        for name, changes in PROOFS.items():
            common = {
                "quiet": True,
                "train_iters": STEPS,
                "lr_decay_style": "constant",
                "lr_warmup_iters": 0,
                "data_cache_path": args.data_cache_path or str(Path(args.output_dir) / "data"),
                **changes,
            }
            losses = []
            for degrees in ({}, {"ds_sequence_parallel_size": 1, "ulysses_degree": 1}):
                run = _changed(args, output_dir=folder, **common, **degrees)
                failed = run_forked(pretrain, run, replica_size(run))
                if failed:
                    return failed
                losses.append(_losses(Path(folder) / METRICS))
            difference = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
            worst = max(worst, difference)
            print(
                f"  {name:>4}: loss {losses[0][0]:.4f} -> {losses[0][-1]:.4f}, largest relative "
                f"difference {difference:.1e}"
            )
    verdict = "agree" if worst < LIMIT else "DO NOT AGREE"
    print(f"  {replica_size(args)} ranks and one rank {verdict} (limit {LIMIT:.0e})")
    return 0 if worst < LIMIT else 1


def _changed(args: Namespace, **changes: Any) -> Namespace:
    return Namespace(**{**vars(args), **changes})


def _losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]
