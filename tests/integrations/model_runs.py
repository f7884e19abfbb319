"""One tiny model by itself and on a mesh: the same batch, its loss, logits and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import transformers
from harness import RankContext
from tiny_models import VOCAB, build
from torch import Tensor
from torch.nn.functional import cross_entropy

import ds_usp
from ds_usp.integrations.transformers import enable

BOUND = 1e-5
SMALL = 1e-2  # of the norm of all gradients: below it a parameter's own norm is no scale
IGNORED = -100

transformers.logging.set_verbosity_error()


@dataclass
class Result:
    """What one forward and backward pass gives, of the whole batch."""

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def error(self, reference: Result) -> float:
        """The largest relative error of loss, logits and the gradient of any parameter."""
        errors = [relative(self.loss, reference.loss), relative(self.logits, reference.logits)]
        scale = float(torch.stack([g.norm() for g in reference.gradients.values()]).norm())
        errors.append(0.0 if scale else 1.0)
        for name, want in reference.gradients.items():
            have = self.gradients[name]
            errors.append(float((have - want).norm()) / max(float(want.norm()), SMALL * scale))
        return max(e if e == e else float("inf") for e in errors)


def relative(have: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm."""
    have, want = have.detach().double(), want.detach().double()
    return float((have - want).norm() / want.norm().clamp_min(1e-30))


def plain_batch(rows: int = 2, tokens: int = 41) -> dict[str, Tensor]:
    """Rows of one sequence each, some tokens without a label."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB - 2, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[0, [4, tokens - 3]] = IGNORED
    return {"input_ids": ids, "labels": labels}


def packed_batch(lengths: tuple[int, ...] = (9, 21, 11)) -> dict[str, Tensor]:
    """A row of documents, told by positions that start anew."""
    batch = plain_batch(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    batch["labels"][positions == 0] = IGNORED  # no document predicts the next one's first token
    return {**batch, "position_ids": positions}


def reference(model: Any, batch: Mapping[str, Tensor]) -> Result:
    """One process, attention as the model does it. Documents are computed each alone, so that
    nothing depends on how transformers packs them."""
    positions = batch.get("position_ids")
    if positions is None:
        out = model(**batch, use_cache=False)
        loss, logits = out.loss, out.logits
    else:
        starts = (positions[0] == 0).nonzero().flatten().tolist()
        parts = []
        for start, stop in pairwise([*starts, positions.shape[1]]):
            one = {"input_ids": batch["input_ids"][:, start:stop]}
            if "position_ids" in signature(model.forward).parameters:
                one["position_ids"] = positions[:, start:stop]
            parts.append(model(**one, use_cache=False).logits)
        logits = torch.cat(parts, 1)
        loss = cross_entropy(logits[0, :-1].float(), batch["labels"][0, 1:])
    loss.backward()
    return Result(loss.detach(), logits.detach(), take_gradients(model))


def on_the_mesh(model: Any, mesh: ds_usp.SequenceMesh, batch: Mapping[str, Tensor]) -> Result:
    """The enabled model on this rank; the gradients are the means over the ranks."""
    out = model(**batch)
    out.loss.backward()
    gradients = take_gradients(model)
    mean = torch.cat([g.flatten() for g in gradients.values()])
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    parts = mean.split([g.numel() for g in gradients.values()])
    means = (part.view_as(g) for part, g in zip(parts, gradients.values(), strict=True))
    return Result(out.loss.detach(), out.logits.detach(), dict(zip(gradients, means, strict=True)))


def take_gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of all parameters, zeros where there are none; they are cleared."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    return gradients


BATCHES = {"plain": plain_batch, "packed": packed_batch}
MESHES = {"ulysses 2": 2, "ring 2": 1}


def sweep_case(ctx: RankContext, model_type: str, layout: str = "auto") -> dict[str, float | str]:
    """How a type fares on two ranks, by batch and mesh: its error, or why it is refused. Each rank
    has the reference of one batch; where the model cannot compute it the error is infinite."""
    model = build(model_type)
    mine = tuple(BATCHES)[ctx.rank]
    outcomes: dict[str, float | str] = {}
    want: Result | None = None
    with suppress(ValueError):
        want = reference(model, BATCHES[mine]())
    for mesh_name, ulysses_degree in MESHES.items():
        mesh = ds_usp.SequenceMesh.from_group(ctx.group, ulysses_degree)
        for name, make in BATCHES.items():
            outcome: float | str
            try:
                with enable(model, mesh, layout=layout, logits="whole"):
                    have = on_the_mesh(model, mesh, make())
                outcome = have.error(want) if want and name == mine else float("inf")
            except ds_usp.USPError as refusal:
                outcome = str(refusal)
                take_gradients(model)
            if name == mine:
                outcomes[f"{name}, {mesh_name}"] = outcome
    return outcomes
