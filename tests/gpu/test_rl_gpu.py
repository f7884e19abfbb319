"""GRPO on two GPUs as on one: the first program of docs/usage/rl.md, without its CPU settings."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import ROOT, torchrun

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.several_gpus,
]

LEFT_OUT = ("use_cpu=True, ", ' ddp_backend="gloo",')
# Not of the optimizer that divides by a gradient's size: it takes rounding for a step.
PLAIN = {"optim": '"sgd"', "learning_rate": "1.0"}
SAVE = """
import sys, torch, torch.distributed as dist
if trainer.args.process_index == 0:
    logs, model = trainer.state.log_history[:-1], trainer.accelerator.unwrap_model(trainer.model)
    assert next(model.parameters()).is_cuda and dist.get_backend() == "nccl"
    weights = {name: x.cpu() for name, x in model.state_dict().items()}
    torch.save({"logs": logs, "weights": weights, "lengths": lengths}, sys.argv[1])
"""
# Tokens of a row that the policy's first layer is given in passes with gradients.
COUNT = """
lengths = set()
trainer.model.model.layers[0].register_forward_pre_hook(
    lambda layer, args: lengths.add(args[0].shape[1]) if torch.is_grad_enabled() else None
)
"""


def train(folder: Path, ranks: int, **changes: str) -> dict[str, Any]:
    page = (ROOT / "docs" / "usage" / "rl.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    for text in LEFT_OUT:
        assert text in program
        program = program.replace(text, "")
    given = "".join(f", {name}={value}" for name, value in changes.items())
    program = re.sub(r"learning_rate=[^,]*, ", "", program) if changes else program
    program = program.replace('"grpo"', f'"{folder}"{given}')
    program = program.replace("trainer.train()", f"{COUNT}\ntrainer.train()\n{SAVE}")
    file, saved = folder / "grpo.py", folder / f"{ranks}.pt"
    file.write_text("import torch\n" + program, encoding="utf-8")
    ended = torchrun(ranks, file, saved)
    assert ended.returncode == 0, ended.stderr[-4000:]
    result: dict[str, Any] = torch.load(saved)
    return result


def test_the_first_step_of_grpo_is_that_of_one_gpu(tmp_path):
    one, two = (train(tmp_path, ranks) for ranks in (1, 2))
    assert max(two["lengths"]) == -(-max(one["lengths"]) // 2)
    for step, (log, expected) in enumerate(zip(two["logs"], one["logs"], strict=True)):
        assert log.keys() == expected.keys()
        names = [x for x in log if "time" not in x and "per_second" not in x]
        errors = {x: abs(log[x] - expected[x]) / max(abs(expected[x]), 1e-2) for x in names}
        worst = max(errors, key=lambda x: errors[x])
        print(f"step {step}: worst {worst} {errors[worst]:.1e}")  # noqa: T201
        # Later completions follow weights that are off by rounding.
        assert step or errors[worst] < 1e-4, (worst, log[worst], expected[worst])


def test_the_first_update_of_grpo_is_that_of_one_gpu(tmp_path):
    one, two = (train(tmp_path, ranks, **PLAIN) for ranks in (1, 2))
    none = train(tmp_path, 1, **PLAIN | {"learning_rate": "0.0"})
    worst = 0.0
    for name, before in none["weights"].items():
        step, expected = (x["weights"][name] - before for x in (two, one))
        assert expected.norm() > 0, name
        worst = max(worst, float((step - expected).norm() / expected.norm()))
    print(f"worst change of a weight {worst:.1e}")  # noqa: T201
    assert worst < 1e-4
