"""The flags: ranges, contradictions, and refusals before torch is imported.

Their names are frozen by tests/data/public_api.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_usp import ConfigError, USPError, settings
from ds_usp.kernels.registry import AUTO, KERNELS
from ds_usp.memory import RECOMPUTE
from ds_usp.settings import setting
from megatron_patches.flags import solved_ratio

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "examples_deepspeed" / "sequence_parallel"
sys.path.insert(0, str(TRAINER))

from usp_trainer.arguments import QUICKSTART, Ratios, build_parser, closest_name, parse  # noqa: E402
from usp_trainer.auto_args import planned_run  # noqa: E402
from usp_trainer.engine import learning_rate, make_optimizer  # noqa: E402
from usp_trainer.validate_args import check_start, validate_and_derive  # noqa: E402

PARSER = build_parser()
ACTIONS = {a.option_strings[0]: a for a in PARSER._actions if a.nargs != 0}
NUMBERS = (settings.Integer, settings.Number, settings.KeywordOr)
# Flags for which 0 means something, and what; every other number starts above it.
ZERO = {
    "--attention-dropout": "none",
    "--hidden-dropout": "none",
    "--adam-beta1": "no momentum",
    "--adam-beta2": "the last gradient alone",
    "--clip-grad": "no clipping",
    "--local_rank": "the first rank of a node",
    "--lr": "weights stay as they are",
    "--lr-warmup-iters": "no warm-up",
    "--min-lr": "decay to nothing",
    "--seed": "a seed like another",
    "--sgd-momentum": "none",
    "--usp-loss-chunks": "all logits at once",
    "--usp-mlp-chunks": "not in chunks",
    "--usp-offload-ratio": "nothing offloaded",
    "--weight-decay": "none",
}
NEGATIVE = {"--local_rank"}  # -1: DeepSpeed's default without a launcher


def accepts(flag: str, value: str) -> bool:
    try:
        parse([f"{flag}={value}"])
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize("flag", ACTIONS)
def test_every_flag_has_a_range(flag, capsys):
    action = ACTIONS[flag]
    if action.choices is None and not isinstance(action.type, (*NUMBERS, settings.Text)):
        assert isinstance(action.type, Ratios), f"{flag} accepts any value"
    assert not accepts(flag, ""), flag
    if isinstance(action.type, settings.Text):
        return
    for value in ("nan", "inf", "-inf", "1e999", "-0.5", "word", "nan,1,1", "1,inf,0"):
        assert not accepts(flag, value), (flag, value)
        assert flag in capsys.readouterr().err
    assert accepts(flag, "-1") is (flag in NEGATIVE)
    if isinstance(action.type, NUMBERS):
        assert accepts(flag, "0") is (flag in ZERO), flag
    if flag in ZERO:
        assert action.type is not None


def test_ranges_end_where_they_should(capsys):
    for flag in ("--adam-beta1", "--adam-beta2", "--sgd-momentum", "--hidden-dropout"):
        assert not accepts(flag, "1") and not accepts(flag, "1.5")
    assert accepts("--usp-offload-ratio", "1") and not accepts("--usp-offload-ratio", "1.01")
    assert accepts("--seed", str(2**32 - 1)) and not accepts("--seed", str(2**32))
    assert not accepts("--rotary-base", "1")
    for split in ("0,1,1", "1,-1,1", "1,1", "a,b,c"):
        assert not accepts("--split", split)
    for text, ratio in (("0.25", 0.25), ("auto", "auto")):
        assert parse(["--usp-offload-ratio", text]).usp_offload_ratio == ratio
    capsys.readouterr()
    for flag, message in {
        "--lr=nan": "--lr: 'nan' is not a finite number of 0 or more",
        "--seq-length=32k": "--seq-length: '32k' is not a whole number of 1 or more",
        "--adam-beta1=1.5": "--adam-beta1: '1.5' is not a number of 0 or more and below 1",
        "--ulysses-degree=0": "'0' is not a whole number of 1 or more, and not 'auto'",
        "--save=": "--save: '' is empty; give a path",
    }.items():
        assert not accepts(*flag.split("="))
        assert message in capsys.readouterr().err


def test_names_come_from_one_place():
    assert settings.Choices((AUTO, *(row.name for row in KERNELS))) == setting("kernel").kind
    assert settings.Choices(RECOMPUTE) == setting("recompute").kind


def test_a_help_text_states_one_default():
    formatter = PARSER._get_formatter()
    for action in PARSER._actions:
        if action.help != argparse.SUPPRESS:
            text = formatter._expand_help(action)
            assert text, action.option_strings
            assert text.count("default") <= 1, text
            assert "None" not in text and "False" not in text, text


MISSPELT = {
    "--seq-lenght": "--seq-length",
    "--seq-len": "--seq-length",
    "--seq_length": "--seq-length",
    "--ulysses-degre": "--ulysses-degree",
    "--usp_layout": "--usp-layout",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
    "--fp16": None,
}


@pytest.mark.parametrize("flag", MISSPELT)
def test_a_misspelt_flag_has_a_suggestion(flag):
    known = [name for action in PARSER._actions for name in action.option_strings]
    assert closest_name(flag, known) == MISSPELT[flag]


def test_the_quickstart_sets_known_flags_which_the_command_line_overrides():
    known = vars(parse([]))
    assert known.keys() >= QUICKSTART.keys()
    args = parse(["--quickstart", "--train-iters", "7", "--no-swiglu"])
    assert (args.ds_sequence_parallel_size, args.ulysses_degree) == (4, 2)
    assert (args.train_iters, args.swiglu) == (7, False)
    assert validate_and_derive(args, 4).ring_degree == 2


def test_values_derived_from_the_flags():
    argv = "--ds-sequence-parallel-size 4 --tensor-model-parallel-size 2 --global-batch-size 8"
    args = validate_and_derive(parse(argv.split()), 16)
    assert (args.ulysses_degree, args.ring_degree) == (4, 1)
    assert (args.data_parallel_size, args.accumulation_steps) == (2, 4)
    assert (args.num_key_value_heads, args.ffn_hidden_size) == (8, 512)
    assert args.lr_decay_iters == args.train_iters


REFUSED = {
    "--ds-sequence-parallel-size 4 --ulysses-degree 3": "Use one of 4 (ring 1), 2 (ring 2)",
    "--ds-sequence-parallel-size 8 --ulysses-degree 8 --num-attention-heads 4": (
        "8 query heads on each tensor-parallel rank, there are 4. Use one of 4 (ring 2)"
    ),
    "--ds-sequence-parallel-size 3": "Use a multiple of 3 ranks",
    "--global-batch-size 12 --micro-batch-size 1": "8 data-parallel replicas = 8. Use "
    "--global-batch-size 8",
    "--num-attention-heads 7": "must divide --hidden-size 128",
    "--num-key-value-heads 3": "8 query heads cannot share 3 key/value heads",
    "--num-key-value-heads 2 --tensor-model-parallel-size 4": "Use one of 1, 2;",
    "--tensor-model-parallel-size 4 --ffn-hidden-size 30": "the MLP's width of 30. Use one of",
    "--pipeline-model-parallel-size 8": "--num-layers 4 cannot fill 8",
    "--pipeline-model-parallel-size 2 --zero-stage 2": "Use --zero-stage 1",
    "--pipeline-model-parallel-size 2 --zero-stage 3": "Use --zero-stage 1",
    "--bf16 --zero-stage 0": "Use --zero-stage 1",
    "--attention-dropout 0.1": "Use 0 for both",
    "--hidden-dropout 0.1": "Use 0 for both",
    "--max-position-embeddings 100": "below --seq-length 1024",
    "--reset-attention-mask --pipeline-model-parallel-size 2 --zero-stage 1": (
        "Use --pipeline-model-parallel-size 1"
    ),
    "--reset-position-ids --use-rotary-position-embeddings": "Add --reset-attention-mask",
    "--lr 1e-4 --min-lr 1e-3": "--min-lr 0.001 is above --lr 0.0001",
    "--use-rotary-position-embeddings --hidden-size 24": "even head dimension",
    "--ds-sequence-parallel-size 8 --seq-length 5": "at least 8 tokens",
    "--ds-sequence-parallel-size 4 --seq-length 64 --usp-mlp-chunks 17": (
        "--usp-mlp-chunks 17: a rank has 16 of a sequence's 64"
    ),
    "--usp-checkpoint-layers 3 --usp-recompute gemm-last": (
        "with --usp-recompute gemm-last: no layer's input"
    ),
    "--usp-states-on-host --optimizer sgd --sgd-momentum 0 --zero-stage 0": (
        "SGD without momentum has no states"
    ),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_contradictions_are_refused_with_the_numbers_and_the_fix(flags):
    with pytest.raises(USPError) as refused:
        validate_and_derive(parse(flags.split()), 8)
    assert REFUSED[flags] in str(refused.value)


def test_the_check_before_the_start_includes_zero_stages():
    with pytest.raises(ConfigError, match="Use --zero-stage 1"):
        check_start(parse(["--pipeline-model-parallel-size", "2", "--zero-stage", "2"]))


def test_auto_offloads_what_does_not_fit():
    flags = "--hidden-size 1024 --num-layers 24 --num-attention-heads 8 --seq-length 65536 --bf16"
    args = validate_and_derive(parse([*flags.split(), "--usp-loss-chunks", "8"]), 1)
    args.padded_vocab_size = 32000
    run = planned_run(args)
    planned, cpu = (run.workload(), run.parallel_config()), torch.device("cpu")
    ratios = [solved_ratio("auto", *planned, cpu, gib * 2**30) for gib in (200, 50, 40)]
    assert ratios[0] == 0 < ratios[1] < ratios[2] < 1
    assert solved_ratio(0.3, *planned, cpu) == 0.3
    with pytest.raises(ConfigError, match="even with everything offloaded"):
        solved_ratio("auto", *planned, cpu, 5 * 2**30)
    with pytest.raises(ConfigError, match="the device is cpu"):
        solved_ratio("auto", *planned, cpu)


BIG = """
    --ds-sequence-parallel-size 8 --num-layers 4 --hidden-size 4096 --num-attention-heads 32
    --num-key-value-heads 8 --seq-length 32768 --bf16 --device cpu --ulysses-degree auto
    --usp-cluster
"""


def chosen(cluster: str, flags: str = "", world: int = 8) -> tuple[int, str]:
    args = parse([*BIG.split(), cluster, *flags.split()])
    args.ulysses_degree = None
    choice = planned_run(validate_and_derive(args, world)).choose_degree(on_gpu=False)
    return choice.ulysses, "\n".join(choice.why)


def test_auto_follows_the_cluster():
    """NVLink carries the heads anywhere; on PCIe only the ring, which hides, leaves a switch."""
    nvlink, why = chosen("a100")
    assert nvlink == 8 and why.startswith("planner: ulysses 8 x ring 1 on a100")
    for pair in ("8 x 1", "4 x 2", "2 x 4", "1 x 8"):
        assert f"{pair} " in why
    assert "ulysses 8, because ulysses 4 reaches" in why
    for fixed in ("tp", "pp", "dp", "zero", "recompute"):
        assert f"planner: {fixed} 1, because" not in why
    assert chosen("l20")[0] == 2


def test_auto_counts_recomputation_and_loss_chunks():
    """Half a million tokens fit if layers save their inputs alone and there are no logits."""
    long = "--seq-length 524288 --num-layers 32 --ffn-hidden-size 14336 --vocab-size 128256"
    with pytest.raises(ConfigError, match="lacks"):
        chosen("h200", f"{long} --zero-stage 3")
    saving = "--usp-recompute full --usp-loss-chunks 16"
    assert chosen("h200", f"{long} --zero-stage 3 {saving}")[0] <= 4
    assert chosen("h200", f"{long} --zero-stage 3 {saving} --usp-offload-ratio auto")[0] <= 4


def test_the_largest_memory_settings_are_taken():
    flags = "--ds-sequence-parallel-size 4 --seq-length 64 --usp-mlp-chunks 16"
    flags += " --usp-checkpoint-layers 3 --usp-recompute full --usp-states-on-host --optimizer sgd"
    args = validate_and_derive(parse([*flags.split(), "--zero-stage", "1"]), 4)
    assert (args.usp_mlp_chunks, args.usp_checkpoint_layers) == (16, 3) and args.usp_states_on_host


def test_auto_of_one_rank_a_sequence():
    assert chosen("h200", "--ds-sequence-parallel-size 1")[0] == 1


def test_auto_refuses_what_does_not_fit():
    with pytest.raises(ConfigError, match=r"nothing fits into 46.1 GiB.*lacks .* GiB.*is taken"):
        chosen("l20", "--seq-length 4194304")


def test_the_planner_has_the_trainers_model():
    args = parse(["--num-key-value-heads", "2", "--swiglu", "--vocab-size", "500"])
    shape = planned_run(validate_and_derive(args, 1)).model_shape()
    assert (shape.kv_heads, shape.vocab) == (2, 500)
    assert shape.gated and shape.tied and shape.learned_positions and shape.biases


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.882843, 0.6, 0.317157, 0.2]),
    ],
)
def test_warm_up_then_decay_to_the_end_and_no_further(style, expected):
    flags = f"--lr 1 --min-lr 0.2 --lr-warmup-iters 2 --lr-decay-iters 6 --lr-decay-style {style}"
    args = validate_and_derive(parse(flags.split()), 1)
    rates = [learning_rate(args, step) for step in range(9)]
    assert rates == pytest.approx([*expected, expected[-1], expected[-1]], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_weight_decay_is_for_matrices(optimizer):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    args = validate_and_derive(parse(["--weight-decay", "0.3", "--optimizer", optimizer]), 1)
    decay = {
        id(p): group["weight_decay"]
        for group in make_optimizer(args, model).param_groups
        for p in group["params"]
    }
    assert [decay[id(p)] for p in model.parameters()] == [0.3, 0.0, 0.0, 0.0]


WITHOUT_TORCH = """
import contextlib, io, json, os, sys
sys.modules["torch"] = None  # importing it fails
from pretrain_gpt_usp import main
for argv, variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code
    for name in variables:
        del os.environ[name]
    print(json.dumps([code, out.getvalue()]))
"""
RANK3 = {"RANK": "3", "WORLD_SIZE": "4"}
OF_6 = {"RANK": "0", "WORLD_SIZE": "6"}
OF_2 = {"RANK": "0", "WORLD_SIZE": "2"}
SP2, SP4 = "--ds-sequence-parallel-size 2", "--ds-sequence-parallel-size 4"
EARLY: list[tuple[str, dict[str, str], int, str]] = [
    ("--seq-lenght 64", {}, 2, "there is no flag --seq-lenght; did you mean --seq-length?"),
    ("--seq-lenght 64", {**RANK3, "RANK": "0"}, 2, "there is no flag --seq-lenght"),
    ("--seq-lenght 64", RANK3, 2, ""),  # rank 0 prints it
    ("--num-attention-heads 7", RANK3, 1, ""),
    ("--lr nan", {}, 2, "--lr: 'nan' is not"),
    (f"{SP4} --ulysses-degree 3", {}, 1, "Use one of 4 (ring 1), 2 (ring 2)"),
    ("--data-path none.txt", {}, 1, "--data-path none.txt: No such file or directory, and no"),
    ("--load nowhere", {}, 1, "--load nowhere holds no finished checkpoint"),
    (
        f"--vocab-size 5 --data-path {__file__}",
        {},
        1,
        "text is read as bytes and has 257 token ids",
    ),
    ("--usp-cluster h200", {}, 1, "is for --ulysses-degree auto"),
    (SP4, OF_6, 1, "6 ranks cannot hold --tensor-model-parallel-size 1 x --ds-sequence-parallel-"),
    ("--num-processes 2", OF_6, 1, "leave it out under one"),
    (SP2, OF_2, 1, "MASTER_PORT='' must be a whole number"),
    (SP2, {**OF_2, "RANK": "x"}, 1, "RANK='x' must be a whole number"),
    (SP2, {**OF_2, "RANK": "2", "MASTER_PORT": "1"}, 1, "RANK=2 must be below WORLD_SIZE=2"),
    (SP2, {**OF_2, "MASTER_PORT": "1"}, 1, "MASTER_ADDR is not set"),
    (f"--check-only {SP4} --num-processes 8", {}, 0, ""),
    (f"--check-only {SP4} --num-processes 6", {}, 1, "6 ranks cannot hold"),
    ("--help", {}, 0, "--usp-kernel"),
]


def test_flags_are_checked_without_torch(tmp_path):
    cases = [(flags.split(), variables) for flags, variables, *_ in EARLY]
    path = os.pathsep.join([str(TRAINER), str(ROOT)])
    launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in launcher}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(cases)],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    results: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(EARLY), done.stderr
    for (flags, variables, code, text), result in zip(EARLY, results, strict=True):
        assert result[0] == code and text in result[1], (flags, variables, result)
        lines = result[1].count("\n")
        assert lines == bool(text) or flags == "--help", result[1]
    assert list(tmp_path.iterdir()) == []
