"""The trainer's flags: ranges, contradictions, and what follows from them; its report.

Their names are frozen by tests/data/public_api.txt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_usp import ConfigError, DataError, LayoutError, USPError, settings

TRAINER = Path(__file__).resolve().parents[2] / "examples_deepspeed" / "sequence_parallel"
sys.path.insert(0, str(TRAINER))

from usp_trainer import report  # noqa: E402
from usp_trainer.arguments import QUICKSTART, build_parser, parse, validated  # noqa: E402
from usp_trainer.step import deepspeed_config, learning_rate, new_optimizer  # noqa: E402

PARSER = build_parser()
ACTIONS = {a.option_strings[0]: a for a in PARSER._actions if a.nargs != 0}
NUMBERS = (settings.Integer, settings.Number, settings.KeywordOr)
# Flags for which 0 means something; every other number starts above it.
ZERO = {
    *("--attention-dropout", "--hidden-dropout", "--adam-beta1", "--adam-beta2", "--clip-grad"),
    *("--local_rank", "--lr", "--lr-warmup-iters", "--min-lr", "--seed", "--usp-loss-chunks"),
    *("--usp-mlp-chunks", "--usp-offload-ratio", "--weight-decay"),
}


def accepts(flag: str, value: str) -> bool:
    try:
        parse([f"{flag}={value}"])
    except ConfigError as error:
        assert flag.lstrip("-") in str(error)
        return False
    return True


@pytest.mark.parametrize("flag", ACTIONS)
def test_every_flag_has_a_range(flag):
    assert not accepts(flag, ""), flag
    if isinstance(ACTIONS[flag].type, settings.Text):
        return
    for value in ("nan", "inf", "-inf", "-0.5", "word", "nan,1,1", "1,inf,0", "0,1,1", "1,1"):
        assert not accepts(flag, value), (flag, value)
    assert accepts(flag, "-1") is (flag == "--local_rank")
    if isinstance(ACTIONS[flag].type, NUMBERS):
        assert accepts(flag, "0") is (flag in ZERO), flag


def test_ranges_end_where_they_should():
    for flag in ("--adam-beta1", "--adam-beta2", "--hidden-dropout", "--rotary-base"):
        assert not accepts(flag, "1")
    assert accepts("--usp-offload-ratio", "1") and not accepts("--usp-offload-ratio", "1.01")
    with pytest.raises(ConfigError, match="see --usp-recompute"):
        parse(["--usp-recomputee", "full"])


# Flags, ranks, the error and what it names.
REFUSED = [
    ("--tensor-model-parallel-size 2", 2, ConfigError, "MEGATRON_DEEPSPEED_PATH"),
    ("--pipeline-model-parallel-size 2", 2, ConfigError, "MEGATRON_DEEPSPEED_PATH"),
    ("--num-attention-heads 3", 1, ConfigError, "--hidden-size 128"),
    ("--max-position-embeddings 1000", 1, ConfigError, "--seq-length 1024"),
    ("--min-lr 1", 1, ConfigError, "--lr 0.001"),
    ("--hidden-dropout 0.1", 1, ConfigError, "Use 0 for both"),
    ("--reset-attention-mask", 1, ConfigError, "give both"),
    ("--zero-stage 0 --optimizer sgd --usp-states-on-host", 1, ConfigError, "leave it out"),
    ("--universal-checkpoint", 1, ConfigError, "--load"),
    ("--zero-stage 0 --bf16", 1, ConfigError, "Use ZeRO-1"),
    ("--usp-checkpoint-layers 2", 1, ConfigError, "--usp-recompute full"),
    ("--usp-mlp-chunks 600 --ds-sequence-parallel-size 2", 2, ConfigError, "512"),
    ("--usp-cluster h100", 1, ConfigError, "auto"),
    ("--ds-sequence-parallel-size 2", 3, ConfigError, "3"),
    ("--ds-sequence-parallel-size 4 --ulysses-degree 3", 4, ConfigError, "3"),
    ("--ds-sequence-parallel-size 16 --ulysses-degree 16", 16, ConfigError, "8"),
    ("--ds-sequence-parallel-size 4 --seq-length 3", 4, LayoutError, "3"),
    ("--global-batch-size 3", 2, ConfigError, "--global-batch-size 2"),
    ("--data-path /nowhere/text", 1, DataError, "/nowhere/text.bin"),
]


@pytest.mark.parametrize(("flags", "ranks", "kind", "name"), REFUSED)
def test_contradictions_are_refused(flags, ranks, kind, name):
    with pytest.raises(USPError) as refused:
        validated(parse(flags.split()), ranks)
    assert type(refused.value) is kind and name in str(refused.value)


def test_encoded_data_need_a_vocabulary(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / "data").with_suffix(suffix).touch()
    with pytest.raises(DataError, match="--vocab-size"):
        validated(parse(["--data-path", str(tmp_path / "data")]), 1)


def test_what_follows_from_the_flags():
    args = validated(parse(["--ds-sequence-parallel-size", "8", "--global-batch-size", "6"]), 16)
    assert (args.ulysses_degree, args.ring_degree, args.data_parallel_size) == (8, 1, 2)
    assert (args.accumulation_steps, args.ffn_hidden_size) == (3, 512)
    assert (args.num_key_value_heads, args.max_position_embeddings) == (8, 1024)
    swiglu = validated(parse(["--swiglu", "--hidden-size", "768", "--num-attention-heads", "6"]), 1)
    assert swiglu.ffn_hidden_size == 2048


def test_other_flags_override_the_quickstarts():
    args = parse(["--quickstart", "--ulysses-degree", "4"])
    assert args.ulysses_degree == 4
    for name in QUICKSTART.keys() - {"ulysses_degree"}:
        assert getattr(args, name) == QUICKSTART[name]
    assert not parse([]).swiglu


def test_learning_rates():
    flags = "--lr 1 --min-lr 0.1 --lr-warmup-iters 4 --lr-decay-iters 12 --lr-decay-style"
    for style, middle, end in (
        ("constant", 1.0, 1.0),
        ("linear", 0.55, 0.1),
        ("cosine", 0.55, 0.1),
    ):
        args = validated(parse([*flags.split(), style]), 1)
        found = [learning_rate(args, step) for step in (0, 3, 8, 12, 99)]
        assert found == pytest.approx([0.25, 1.0, middle, end, end])


def test_weights_decay_in_matrices_alone():
    args = validated(parse(["--weight-decay", "0.5"]), 1)
    optimizer = new_optimizer(args, torch.nn.Linear(2, 3))
    assert [(g["params"][0].ndim, g["weight_decay"]) for g in optimizer.param_groups] == [
        (2, 0.5),
        (1, 0.0),
    ]


def test_deepspeeds_configuration_agrees_with_the_flags(tmp_path):
    path = tmp_path / "ds_config.json"
    flags = ["--deepspeed_config", str(path), "--zero-stage", "2", "--bf16"]
    theirs = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}, "train_batch_size": 1}
    path.write_text(json.dumps({**theirs, "wall_clock_breakdown": True}))
    config = deepspeed_config(validated(parse(flags), 1))
    assert config["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 7,
        "overlap_comm": True,
        "allgather_bucket_size": config["zero_optimization"]["allgather_bucket_size"],
    }
    assert config["wall_clock_breakdown"] and "train_batch_size" not in config
    assert config["bf16"] == {"enabled": True} and config["gradient_clipping"] == 1.0
    for wrong in (
        {"zero_optimization": {"stage": 1}},
        {"train_batch_size": 8},
        {"bf16": {"enabled": False}},
        {"gradient_clipping": 0.5},
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            deepspeed_config(validated(parse(flags), 1))


def row(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 3.0, "grad_norm": 1.0, "lr": 0.1, "seconds": 0.5, **more}


def test_metrics_go_on_where_the_checkpoint_was(tmp_path, capsys):
    """A line that a killed run left in part, and steps that were not saved, are dropped."""
    flags = ["--output-dir", str(tmp_path), "--train-iters", "4", "--device", "cpu"]
    args = validated(parse(flags), 1)
    for steps, load, first in (((1, 2, 3), None, 0), ((3, 4), "checkpoint", 2)):
        args.load = load
        reporter = report.Reporter(args, first)
        for step in steps:
            reporter.step(row(step, valid_loss=float(step)))
        reporter.finish()
        with (tmp_path / report.METRICS).open("a") as file:
            file.write('{"step": 4, "lo')
    rows = report.read_rows(tmp_path / report.METRICS)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert rows[0]["tokens_per_s"] == 2048 and rows[0]["memory_bytes"] > 2**20
    assert (tmp_path / report.PLOT).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "step 3/4: loss 3.000, validation loss 3.000" in printed
    args.load = None
    report.Reporter(args, 0).finish()
    assert len(report.read_rows(tmp_path / report.EARLIER)) == 4


def test_flop_are_shown_where_they_are_known(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    args = validated(parse(["--bf16"]), 1)
    args.device = "cuda"
    flop, peak = report.flop_per_token(args)
    assert flop > 1e6 and 9e14 < peak < 1e15
    unknown = SimpleNamespace(**{**vars(args), "reset_attention_mask": True})
    assert report.flop_per_token(unknown) == (0.0, 0.0)
