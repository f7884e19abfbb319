"""``--quickstart``: train a small GPT on 4 ranks, then compare its losses with one rank's."""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from usp_trainer.launch import Main, spawn_ranks
from usp_trainer.progress import METRICS
from usp_trainer.signals import STOPPED
from usp_trainer.validate_args import model_parallel_size

LIMIT = 1e-5  # relative difference of losses in fp32
STEPS = 8
# SGD without clipping is sensitive to a wrong gradient scale; Adam is what people train with.
PROOFS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "SGD": {"optimizer": "sgd", "lr": 0.1, "clip_grad": 0.0},
        "Adam": {"optimizer": "adam", "lr": 1e-3, "clip_grad": 1.0},
    }
)
SINGLE_RANK: Mapping[str, int | None] = MappingProxyType(
    {
        "ds_sequence_parallel_size": 1,
        "ulysses_degree": 1,
        "usp_cluster": None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
)


def quickstart(args: Namespace, pretrain: Main) -> int:
    """Train and compare; 1 if a run fails or a loss differs by ``LIMIT`` or more."""
    ranks = model_parallel_size(args)
    try:
        _losses(args, pretrain)
        print(f"\nproof: {STEPS} steps from the same seed on {ranks} ranks and on one, in fp32")
        matches = [_losses_match(name, args, pretrain) for name in PROOFS]
    except ChildProcessError as error:  # its ranks have printed why
        print(error, file=sys.stderr)
        return 1
    verdict = "agree" if all(matches) else "DO NOT AGREE"
    print(f"       {ranks} ranks and one rank {verdict} (limit {LIMIT:.0e})")
    return 0 if all(matches) else 1


def _losses_match(name: str, args: Namespace, pretrain: Main) -> bool:
    with tempfile.TemporaryDirectory(prefix="usp_proof_") as folder:
        proof = {
            "quiet": True,
            "output_dir": folder,
            "data_cache_path": args.data_cache_path or str(Path(args.output_dir) / "data"),
            "train_iters": STEPS,
            "lr_decay_style": "constant",
            "lr_warmup_iters": 0,
            "bf16": False,
            "save": None,
            "load": None,
            "eval_interval": None,
            "exit_interval": None,
            "exit_duration_in_mins": None,
            "tensorboard_dir": None,
            "wandb_project": None,
            # The model must not depend on the degrees through its padded vocabulary.
            "make_vocab_size_divisible_by": args.make_vocab_size_divisible_by
            * args.tensor_model_parallel_size,
            **PROOFS[name],
        }
        parallel, single_rank = (
            _losses(Namespace(**{**vars(args), **proof, **degrees}), pretrain)
            for degrees in ({}, SINGLE_RANK)
        )
    difference = max(abs(a - b) / abs(b) for a, b in zip(parallel, single_rank, strict=True))
    print(
        f"{name:>5}: loss {parallel[0]:.4f} -> {parallel[-1]:.4f}, largest relative difference "
        f"{difference:.1e}",
        flush=True,
    )
    return difference < LIMIT


def _losses(args: Namespace, pretrain: Main) -> list[float]:
    code = spawn_ranks(pretrain, args, model_parallel_size(args))
    if code == STOPPED:
        raise SystemExit(code)
    if code:
        raise ChildProcessError(f"the run on {model_parallel_size(args)} ranks failed")
    lines = (Path(args.output_dir) / METRICS).read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
