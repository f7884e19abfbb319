"""The scripts of examples_deepspeed/megatron_lm: golden commands, refusals, the checkout's parser.

``python tests/examples/test_megatron_lm_scripts.py`` writes the golden files anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from programs import (
    CHECKOUT,
    MEGATRON_LM_SCRIPTS,
    PATHS,
    ROOT,
    CheckRefused,
    bash,
    free_port,
    start,
)

from ds_usp.planner import ParallelConfig, Workload, load_model
from ds_usp.planner.emit import emit

REAL_CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
GPUS = {"lm-1.3B": "4", "lm-llama3": "8", "lm-tiny": "4"}
# The checkout is a stand-in that has a pretrain_gpt.py; the implementation is what a GPU machine
# with TransformerEngine takes.
CHECKED = {
    "DRY_RUN": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "MEGATRON_LM_PATH": str(CHECKOUT),
    "TRANSFORMER_IMPL": "transformer_engine",
}
CPU = {**CHECKED, "TRANSFORMER_IMPL": ""}


def settings_of(size: str) -> dict[str, str]:
    return {**(CPU if size == "lm-tiny" else CHECKED), "NUM_GPUS": GPUS[size]}


def golden(size: str) -> Path:
    return Path(__file__).resolve().parent / "golden" / f"{size}.megatron_lm.txt"


def printed(size: str, *arguments: str, **settings: str) -> str:
    done = bash(size, *arguments, **{**settings_of(size), **settings})
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace(str(CHECKOUT), "/checkouts/Megatron-LM")
    return text.replace(str(ROOT), "$ROOT")


def planned_flags() -> list[str]:
    """What ``ds-usp plan --emit megatron-lm`` writes, with every kind of flag."""
    work = Workload(load_model("llama3-8b"), 131072)
    degrees = {"tp": 2, "ulysses": 4, "ring": 2, "pp": 2, "layers_per_virtual_stage": 8}
    config = ParallelConfig(**degrees, zero=1, recompute="attention")
    return emit("megatron-lm", work, config).replace("\\\n", " ").split()


def flags(text: str) -> list[str]:
    words = shlex.split(text.replace("\\\n", " "))
    return words[1 + next(i for i, word in enumerate(words) if word.endswith(".py")) :]


@pytest.mark.parametrize("size", MEGATRON_LM_SCRIPTS)
def test_a_dry_run_prints_the_golden_command(size: str) -> None:
    assert printed(size) == golden(size).read_text()


@pytest.mark.parametrize("size", MEGATRON_LM_SCRIPTS)
def test_scripts_are_settings_only(size: str) -> None:
    *lines, last = PATHS[size].read_text().replace("\\\n", "").splitlines()
    assert last == '. "$(dirname "${BASH_SOURCE[0]}")/../sequence_parallel/launch.sh"'
    for line in lines:
        is_flags = line.startswith("set -- ") and line.endswith(' "$@"')
        is_setting = re.fullmatch(r"[a-z_]+=\S*", line)
        assert not line or line.startswith("#") or is_flags or is_setting, line


@pytest.mark.megatron_lm
@pytest.mark.skipif(not REAL_CHECKOUT, reason="MEGATRON_LM_PATH is not set")
def test_megatron_lm_knows_every_flag() -> None:
    """Its own parser, with the flags that the patches add."""
    program = (
        "import json, sys; from pathlib import Path; import megatron_patches as m\n"
        "m.prepare('megatron_lm', Path(sys.argv[1])); m.apply('megatron_lm')\n"
        "from megatron.training.arguments import parse_args\n"
        "for sys.argv[1:] in json.loads(sys.argv[2]):\n"
        "    args = parse_args()\n"
        "    print('parsed', args.num_layers, args.context_parallel_size, args.ulysses_degree)\n"
    )
    variants = (
        {"TRANSFORMER_IMPL": "local", "ACTIVATION_CHECKPOINT": "true", "ZERO_STAGE": "0"},
        {"TENSORBOARD_DIR": "tb", "WANDB_PROJECT": "p", "EXIT_INTERVAL": "7", "MP_SIZE": "2"},
    )
    runs = [flags(printed(size)) for size in MEGATRON_LM_SCRIPTS]
    runs += [flags(printed("lm-1.3B", **{**v, "NUM_GPUS": "8"})) for v in variants]
    runs.append(planned_flags())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, REAL_CHECKOUT, json.dumps(runs)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    parsed = [line for line in done.stdout.splitlines() if line.startswith("parsed")]
    sizes = ("24 4 2", "32 4 2", "2 4 2", "24 4 2", "24 4 2", "32 8 4")
    assert parsed == [f"parsed {size}" for size in sizes], done.stderr


def test_settings_of_the_neighbours_hold_here() -> None:
    """Local layers need no kernel of apex; recomputation, two nodes, data with weights."""
    words = printed("lm-1.3B", TRANSFORMER_IMPL="local", ACTIVATION_CHECKPOINT="true", NUM_GPUS="8")
    for flag in ("--no-persist-layer-norm", "--no-rope-fusion", "--recompute-method"):
        assert flag in words and flag not in printed("lm-1.3B")
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0", "GLOBAL_BATCH_SIZE": "4"}
    assert printed("lm-1.3B", **{**nodes, "NUM_GPUS": "8"}).startswith(
        "torchrun \\\n    --nnodes 2 \\\n    --node-rank 1"
    )
    assert "python -m megatron_patches.run" in printed("lm-1.3B", **nodes, LAUNCHER="srun")
    assert printed("lm-1.3B", "--log-throughput").endswith("--log-throughput\n")
    assert "--sequence-parallel" in printed("lm-1.3B", MP_SIZE="2", NUM_GPUS="8")
    assert "--use-distributed-optimizer" not in printed("lm-1.3B", ZERO_STAGE="0")


REFUSED = [
    ({"MEGATRON_LM_PATH": ""}, "set MEGATRON_LM_PATH to a checkout of Megatron-LM: git clone"),
    ({"MEGATRON_LM_PATH": "/none"}, "MEGATRON_LM_PATH=/none has no pretrain_gpt.py"),
    ({"ZERO_STAGE": "3"}, "ZERO_STAGE=3: Megatron-LM has its distributed optimizer"),
    ({"SEQ_LENGTH": "1001"}, "is not a multiple of 2 x SP_SIZE = 8, which Megatron-LM requires"),
    ({"USP_LAYOUT": "contiguous"}, "USP_LAYOUT=contiguous: Megatron-LM shards batches in an order"),
    ({"LAUNCHER": "deepspeed"}, "LAUNCHER=deepspeed does not start Megatron-LM. Use LAUNCHER="),
    ({"TRANSFORMER_IMPL": "te"}, "TRANSFORMER_IMPL='te' must be transformer_engine or local"),
    ({"USP_FRAMEWORK": "mds"}, "USP_FRAMEWORK='mds' must be megatron_lm"),
    ({"DATA_PATH": "mock", "VOCAB_SIZE": ""}, "mock data need VOCAB_SIZE"),
    ({"DATA_PATH": __file__}, "Megatron-LM reads encoded data, not"),
    ({"DRY_RUN": "0"}, "Megatron-LM reads encoded data: set DATA_PATH, or DATA_PATH=mock"),
    (
        {"DRY_RUN": "0", "DATA_PATH": "@data@", "TOKENIZER_TYPE": "HuggingFaceTokenizer"},
        "TOKENIZER_TYPE=HuggingFaceTokenizer needs TOKENIZER_MODEL",
    ),
    ({"DRY_RUN": "0", "DATA_PATH": "@data@"}, "set VOCAB_PATH and MERGE_PATH"),
    (
        {"TRAIN_ITERS": "5", "LR_WARMUP_ITERS": "5"},
        "must be below LR_DECAY_ITERS=5 (Megatron-LM)",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[text[:50] for _, text in REFUSED])
def test_bad_settings_are_refused_before_anything_starts(
    settings: dict[str, str], message: str, check_refused: CheckRefused
) -> None:
    check_refused("lm-1.3B", message, {**settings_of("lm-1.3B"), **settings})


def test_one_hardware_queue_where_megatron_lm_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple] = []
    monkeypatch.setattr("os.execvpe", lambda *call: started.append(call) or 0)
    for tensor, expected in (("2", "1"), ("1", None)):
        settings = {**settings_of("lm-tiny"), "MP_SIZE": tensor, "NUM_GPUS": "8"}
        settings |= {"DRY_RUN": "0", "OUTPUT_HOME": str(tmp_path), "BATCH_SIZE": "1"}
        assert start("lm-tiny", **settings) == 0
        _, words, variables = started.pop()
        assert words[4] == "torchrun"
        assert variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


@pytest.mark.megatron_lm
@pytest.mark.slow
@pytest.mark.skipif(not REAL_CHECKOUT, reason="MEGATRON_LM_PATH is not set")
def test_the_tiny_script_trains_and_continues_from_its_checkpoint(tmp_path: Path) -> None:
    settings = {
        "MEGATRON_LM_PATH": REAL_CHECKOUT,
        "OUTPUT_HOME": str(tmp_path),
        "LOG_INTERVAL": "1",
    }
    settings |= {"LR_DECAY_ITERS": "20", "SAVE_INTERVAL": "3", "CUDA_VISIBLE_DEVICES": ""}
    losses: dict[int, float] = {}
    for steps in ("3", "6"):
        run = {**settings, "TRAIN_ITERS": steps, "MASTER_PORT": free_port()}
        done = bash("lm-tiny", timeout=600, **run)
        assert done.returncode == 0, done.stderr or done.stdout[-3000:]
        lines = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", done.stdout)
        assert not losses or min(int(step) for step, _ in lines) == 4
        losses |= {int(step): float(loss) for step, loss in lines}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1] - 0.3


if __name__ == "__main__":
    for script in MEGATRON_LM_SCRIPTS:
        golden(script).write_text(printed(script))
