"""Every flag of Megatron-DeepSpeed changes a sequence-parallel run as one rank, or is refused."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import pytest
from mds_runs import TrainingServer, flags, losses_of, relative_difference

# Of the names of all flags when they were last reviewed: each is refused (test_mds_refusals.py),
# read by Megatron-DeepSpeed's own code, satisfied by usp_attention, or not read by pretrain_gpt.py.
REVIEWED = (316, "91d7a4637b02fc44")
SP2 = {"sp": 2, "u": 1, "zero": 1}
SHORT = "--train-iters 2 --micro-batch-size 1"
ROPE = "--use-rotary-position-embeddings"
# These change the loss, those below do not; on one rank as on two.
CHANGES = (
    "--eod-mask-loss",
    "--reset-position-ids",
    f"{ROPE} --rotary-percent 0.5",
    f"{ROPE} --rotary-position-embeddings-theta 500",
    "--layernorm-epsilon 0.1",
    "--kv-channels 16",
    "--openai-gelu",
    "--no-position-embedding",
    "--dataloader-type cyclic",
    "--clip-grad 0.5",
)
CHANGES_NOTHING = (
    "--attention-softmax-in-fp32",
    "--no-query-key-layer-scaling",
    "--create-moe-param-group",
    "--empty-unused-memory-level 2",
    "--recompute-granularity selective",
    "--memory-centric-tiled-linear --tile-factor 2",
)


def test_no_flag_is_new_since_the_last_review(checkout: Path) -> None:
    tree = ast.parse((checkout / "megatron" / "arguments.py").read_text(encoding="utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    added = (call for call in calls if getattr(call.func, "attr", "") == "add_argument")
    names = sorted(x.value for call in added for x in call.args if isinstance(x, ast.Constant))
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
    assert (len(names), digest) == REVIEWED, "review the flags that differ from the last review"


@pytest.mark.parametrize("more", [*CHANGES, *CHANGES_NOTHING])
def test_a_flag_changes_two_ranks_as_one(server: TrainingServer, more: str) -> None:
    plain, one = (
        losses_of(server.run(1, flags(zero=1, more=f"{SHORT} {arguments}")))
        for arguments in ("", more)
    )
    two = losses_of(server.run(2, flags(more=f"{SHORT} {more}", **SP2)))
    assert relative_difference(two, one) < 1e-5
    assert (relative_difference(one, plain) > 1e-6) == (more in CHANGES)
