"""The quickstart's verdict, the plot and the metrics, without ranks."""

import importlib.util
import json
import sys
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from usp_trainer import loop, progress, quickstart, run_files
from usp_trainer.arguments import parse
from usp_trainer.validate_args import model_parallel_size, validate_and_derive

from ds_usp import ConfigError


@pytest.mark.parametrize(
    ("error", "code", "verdict"),
    [
        (0.9e-5, 0, "4 ranks and one rank agree"),
        (1.1e-5, 1, "4 ranks and one rank DO NOT AGREE"),
        (float("nan"), 1, "4 ranks and one rank DO NOT AGREE"),
    ],
)
def test_the_proof_fails_above_its_limit(error, code, verdict, monkeypatch, capsys, tmp_path):
    def spawn_ranks(main: Any, args: Namespace, processes: int) -> int:
        assert processes == model_parallel_size(args)
        factor = 1.0 + error if processes == 1 and args.optimizer == "sgd" else 1.0
        rows = [json.dumps({"loss": loss * factor}) for loss in (3.0, 2.0)]
        (Path(args.output_dir) / progress.METRICS).write_text("\n".join(rows))
        return 0

    monkeypatch.setattr(quickstart, "spawn_ranks", spawn_ranks)
    args = parse(["--quickstart", "--output-dir", str(tmp_path)])
    assert quickstart.quickstart(args, print) == code
    assert verdict in capsys.readouterr().out


def test_a_failed_run_fails_the_quickstart(monkeypatch):
    monkeypatch.setattr(quickstart, "spawn_ranks", lambda main, args, processes: 1)
    assert quickstart.quickstart(parse(["--quickstart"]), print) == 1


def row(step: int) -> dict[str, float]:
    return {
        "step": step,
        "loss": 3.0 / step,
        "tokens_per_s": 10.0,
        "seconds": 1.0,
        "memory_bytes": 1,
        "lr": 1e-3,
        "grad_norm": 0.5,
    }


def test_a_resumed_run_goes_on_after_the_steps_it_has_seen(tmp_path, capsys):
    argv = ["--output-dir", str(tmp_path), "--train-iters", "3"]
    first = progress.ProgressReporter(validate_and_derive(parse(argv), 1), 0)
    for step in (1, 2, 3):
        first.step(row(step))
    resumed = progress.ProgressReporter(
        validate_and_derive(parse([*argv, "--load", "somewhere"]), 1), 1
    )
    resumed.step(row(2) | {"loss": 9.0})
    resumed.finish()
    rows = [json.loads(line) for line in (tmp_path / progress.METRICS).read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 3.0), (2, 9.0)]
    assert (tmp_path / progress.PLOT).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert (
        "step 1/3: loss 3.000, lr 0.001, gradient norm 0.5, 10 tokens/s, 0 MiB, 0:00:02 left"
    ) in printed


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 3}',
        '{"step": true}',
        '{"step": true, "loss": 1.0}',
        '{"step": 3.0, "loss": 1.0}',
        '{"step": 3, "loss": "1"}',
        '{"step": 3, "loss": null}',
        '{"step": 3, "loss": 1.0, "valid_loss": []}',
        "[3]",
        '"step"',
        "[" * 100_000,
        "",
        "\0",
    ],
)
def test_a_line_that_no_run_wrote_is_dropped(line, tmp_path):
    first = json.dumps(row(1))
    (tmp_path / progress.METRICS).write_text(f"{first}\n{line}\n{json.dumps(row(2))}\n")
    file = progress.MetricsFile(tmp_path, 5)
    assert [r["step"] for r in file.rows] == [1, 2]
    assert "dropped line 2 of 3, which cannot be read" in file.notes[0]


def test_the_smooth_curve_knows_nothing_of_later_steps(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    losses = [2.0] * 17
    losses[12] = 20.0
    assert progress.trailing_mean(losses[:3]) == [2.0] * 3
    assert progress.trailing_mean(losses)[11:13] == [2.0, 4.0]
    seen = []
    monkeypatch.setattr(Axes, "legend", lambda axes, **_: seen.extend(axes.get_xticks()))
    rows = [{"step": n, "loss": loss} for n, loss in enumerate(losses, 1)]
    progress.plot_loss(rows, "title", tmp_path / "plot.png")
    assert seen and all(tick == int(tick) for tick in seen), seen


def test_validation_and_speed_are_on_the_line(monkeypatch):
    """By hand: 2 layers of 4 h^2 + 2 h f matrices, a vocabulary of 100, 64 tokens, 4 GPUs."""
    peak = SimpleNamespace(peak_flop_per_s=1e9)
    monkeypatch.setattr(progress.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(progress, "cluster_of", lambda given, gpu, ranks: peak)
    argv = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --bf16"
    argv += " --seq-length 64 --vocab-size 100 --ds-sequence-parallel-size 4 --ulysses-degree 2"
    args = validate_and_derive(parse(argv.split()), 4)
    assert progress.StepLine(args).speed(row(1)) == {}  # on CPUs
    args.device = "cuda"
    matrices = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 16 * 100
    flop_per_token = 6 * matrices + 3 * 2 * (2 * 2 * 16 * 64 / 2)  # causal: half of the scores
    speed = progress.StepLine(args).speed(row(1) | {"tokens_per_s": 1e4})
    assert speed["tflops_per_gpu"] == pytest.approx(1e4 * flop_per_token / 4 / 1e12)
    assert speed["mfu"] == pytest.approx(1e4 * flop_per_token / 4 / 1e9)
    text = progress.StepLine(args).text(row(1) | {"tokens_per_s": 1e4, "valid_loss": 2.5})
    assert "loss 3.000, validation loss 2.500, lr 0.001, gradient norm 0.5, 10,000 tok" in text
    assert f"0 TFLOP/s a GPU, MFU {100 * speed['mfu']:.1f} %, 0 MiB" in text

    def unknown(*args: Any, **kwargs: Any) -> None:
        raise ConfigError("no built-in cluster has it")

    monkeypatch.setattr(progress, "cluster_of", unknown)
    assert progress.StepLine(args).speed(row(1)).keys() == {"tflops_per_gpu"}
    args.reset_attention_mask = True
    assert progress.StepLine(args).speed(row(1)) == {}


def test_the_first_step_does_not_count_for_the_time_left():
    line = progress.StepLine(validate_and_derive(parse(["--train-iters", "101"]), 1))
    assert line.time_left(row(1) | {"seconds": 60.0}) == "1:40:00"
    assert line.time_left(row(2) | {"seconds": 2.0}) == "0:03:18"


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run_files.check_packages(parse([]))
    for flag, package in (("--tensorboard-dir", "tensorboard"), ("--wandb-project", "wandb")):
        with pytest.raises(ConfigError, match=f"{flag} x needs .*: pip install {package}$"):
            run_files.check_packages(parse([flag, "x"]))
    with pytest.raises(ConfigError, match="--wandb-exp-name x needs --wandb-project"):
        run_files.check_packages(parse(["--wandb-exp-name", "x"]))


def test_trackers_get_what_the_file_gets(monkeypatch, tmp_path):
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            calls.append((folder, purge_step))

        def add_scalar(self, name: str, number: float, step: int) -> None:
            calls.append((name, number, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            calls.append("closed")

    run = SimpleNamespace(
        log=lambda numbers, step: calls.append((numbers, step)), finish=lambda: calls.append("end")
    )
    wandb = SimpleNamespace(init=lambda **kwargs: calls.append(kwargs) or run)
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter)
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    argv = ["--output-dir", str(tmp_path), "--tensorboard-dir", "tb", "--wandb-project", "p"]
    argv += ["--wandb-exp-name", "e", "--wandb-save-dir", "d", "--quiet"]
    reporter = progress.ProgressReporter(validate_and_derive(parse(argv), 1), 4)
    reporter.step(row(5))
    reporter.finish()
    numbers = {name: number for name, number in row(5).items() if name != "step"}
    assert calls[0] == ("tb", 5) and calls[-2:] == ["closed", "end"]
    assert [calls[1][key] for key in ("project", "name", "dir")] == ["p", "e", "d"]
    assert calls[2:-3] == [(name, number, 5) for name, number in numbers.items()]
    assert calls[-3] == (numbers, 5)


def test_a_run_stops_by_steps_and_by_minutes(monkeypatch):
    times = iter((0.0, 60.0, 119.0, 120.0))
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(loop.dist, "all_reduce", lambda x, op: None)
    args = validate_and_derive(parse(["--exit-duration-in-mins", "2", "--device", "cpu"]), 1)
    rule = loop.StopRule(args)
    reasons = [rule.reason(step) for step in (1, 2, 3)]
    assert reasons == [None, None, "--exit-duration-in-mins 2"]
    monkeypatch.setattr(loop.time, "monotonic", lambda: 0.0)
    args = validate_and_derive(parse(["--exit-interval", "3", "--device", "cpu"]), 1)
    assert [loop.StopRule(args).reason(step) for step in (1, 2, 3)] == [
        None,
        None,
        "--exit-interval 3",
    ]


class Waits(torch.autograd.Function):
    """Its forward and backward pass go on until a line is printed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait: Any) -> torch.Tensor:
        ctx.wait = wait
        wait()
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.wait()
        return grads[0] * 2, None


class WaitingLayer(torch.nn.Module):
    def __init__(self, wait: Any) -> None:
        super().__init__()
        self.wait = wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Waits.apply(x, self.wait)


def test_a_long_first_step_says_where_it_is():
    lines: list[str] = []
    printed = threading.Semaphore(0)

    def wait() -> None:
        while printed.acquire(blocking=False):
            pass
        assert printed.acquire(timeout=30) and printed.acquire(timeout=30)

    def print_line(line: str) -> None:
        lines.append(line)
        printed.release()

    layers = [WaitingLayer(wait), WaitingLayer(wait)]
    with progress.first_step_lines([(3, layers[0]), (4, layers[1])], 8, print_line, 0.01):
        x = torch.ones(2, requires_grad=True)
        layers[1](layers[0](x)).sum().backward()
    texts = [line.partition(" s: ")[2] for line in lines]
    note = "; a first step compiles kernels and may pin host memory"
    assert texts[0].endswith(note) and not any(text.endswith(note) for text in texts[1:])
    places = [text.removesuffix(note) for text in texts]
    order = [("forward", 3), ("forward", 4), ("backward", 4), ("backward", 3)]
    expected = [f"{direction} pass of layer {number} of 8" for direction, number in order]
    seen = [place for place in dict.fromkeys(places) if place != "before the first layer"]
    assert seen == expected
    assert x.grad is not None and x.grad.tolist() == [4.0, 4.0]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


def test_a_short_first_step_prints_nothing():
    layer, lines, threads = torch.nn.Linear(2, 2), [], threading.active_count()
    with progress.first_step_lines([(1, layer)], 1, lines.append, 60.0):
        layer(torch.ones(1, 2)).sum().backward()
    assert not lines
    with pytest.raises(ConfigError), progress.first_step_lines([(1, layer)], 1, lines.append, 60.0):
        raise ConfigError("a step that fails")
    assert not layer._forward_hooks and threading.active_count() == threads
