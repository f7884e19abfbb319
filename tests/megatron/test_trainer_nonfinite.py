"""Numbers that are not finite stop a run before it saves, and are named where they arise."""

import re
from typing import Any

import torch
import torch.distributed as dist
from harness import RankContext, fork_world
from trainer_runs import PLAIN_SGD, degrees, start

LINEAR = "layers.2.layer.self_attention.linear_proj"


def corrupt(run: Any, target: str, rank: int) -> None:
    """Let one tensor of ``rank`` have a value that is not finite, from now on."""
    if dist.get_rank() != rank:
        return
    module = run.trainer.engine.module
    if target == "parameter":
        module.get_parameter(f"{LINEAR}.weight").data[0, 0] = float("inf")
    elif target in ("output", "stage"):

        def replace(_: Any, __: Any, output: Any) -> Any:
            return output[0].index_fill(0, torch.tensor([3]), float("nan")), *output[1:]

        name = LINEAR if target == "output" else LINEAR.removeprefix("layers.")
        module.get_submodule(name).register_forward_hook(replace)
    elif target == "gradient":
        weight = module.get_parameter(f"{LINEAR}.weight")
        weight.register_hook(lambda gradient: gradient * float("nan"))
    elif target == "state":  # the loss stays as it is
        optimizer = run.trainer.engine.optimizer
        base = getattr(optimizer, "optimizer", optimizer)
        next(iter(base.state.values()))["exp_avg_sq"].flatten()[0] = float("inf")


def local_weights(run: Any) -> list[torch.Tensor]:
    """This rank's weights, under ZeRO-3 its part of them."""
    parameters = run.trainer.engine.module.parameters()
    return [getattr(p, "ds_tensor", p).detach() for p in parameters]


def messages_of(ctx: RankContext, *, runs: list[tuple[str, str]], folder: str) -> list[str]:
    """The error of each run's step, or of saving it, after a tensor of rank 1 was corrupted."""
    from usp_trainer.nonfinite import NotFiniteError

    texts = []
    for flags, target in runs:
        run = start(f"{flags} --save {folder}/save", folder)
        run.step()
        before = [p.clone() for p in local_weights(run)]
        corrupt(run, target, rank=1)
        try:
            run.save() if target == "state" else run.step()
        except NotFiniteError as error:
            texts.append(str(error))
        else:
            texts.append("")
        if target == "gradient":  # it was left out
            assert all(map(torch.equal, before, local_weights(run))), flags
    return texts


ADAM = " --optimizer adam"
RUNS = [
    (degrees(sp=2) + PLAIN_SGD, "parameter", rf"step 2: .*parameter {LINEAR}.weight on rank 1 \(1"),
    (degrees(sp=2) + PLAIN_SGD, "output", rf"the output of {LINEAR} on rank 1 \(32 of 1024"),
    (degrees(sp=2) + PLAIN_SGD, "gradient", rf"the gradient of {LINEAR}.weight on rank 1 \(1024"),
    (degrees(sp=2, zero=1) + PLAIN_SGD, "gradient", rf"the gradient of {LINEAR}.weight on rank 1"),
    (degrees(sp=2, zero=1) + " --bf16" + ADAM, "output", rf"the output of {LINEAR} on rank 1"),
    (degrees(sp=2, zero=2) + ADAM, "state", r"step 1 is not saved: the optimizer's exp_avg_sq"),
    (degrees(sp=2, zero=3) + ADAM, "gradient", rf"the gradient of {LINEAR}.weight on rank 1"),
    (
        degrees(pp=2, zero=1) + PLAIN_SGD,
        "stage",
        "the output of 2.layer.self_attention.linear_proj on rank 1",
    ),
    (degrees(sp=2) + " --no-check-for-nan-in-loss-and-grad", "parameter", "^$"),
]


def test_what_is_not_finite_is_named_and_never_saved(tmp_path):
    runs = [(flags, target) for flags, target, _ in RUNS]
    for texts in fork_world(messages_of, 2, runs=runs, folder=str(tmp_path)):
        for text, (flags, target, expected) in zip(texts, RUNS, strict=True):
            assert re.search(expected, text), (flags, target, text)
    assert not (tmp_path / "save").exists()
