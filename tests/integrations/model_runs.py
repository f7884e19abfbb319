"""One tiny model by itself and on a mesh: the same batch, its loss, logits and gradients."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from inspect import signature
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from cases import mesh_of
from harness import RankContext
from tiny_models import VOCAB, build
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import ds_usp
from ds_usp.integrations.transformers import enable
from ds_usp.integrations.transformers.refusals import check_loss

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

    def error(self, *references: Result) -> float:
        """The largest relative error of loss, logits and the gradient of any parameter. Of several
        references the nearest one counts, for each of these by itself."""
        by_reference = [self._errors(reference) for reference in references]
        return max(min(same) for same in zip(*by_reference, strict=True))

    def _errors(self, reference: Result) -> list[float]:
        errors = [relative(self.loss, reference.loss), relative(self.logits, reference.logits)]
        scale = float(torch.stack([g.norm() for g in reference.gradients.values()]).norm())
        errors.append(0.0 if scale else 1.0)
        for name, want in reference.gradients.items():
            have = self.gradients[name]
            norm = max(float(want.norm()), SMALL * scale, 1e-30)
            errors.append(float((have - want).norm()) / norm)
        return [e if e == e else float("inf") for e in errors]


def relative(have: Tensor, want: Tensor) -> float:
    have, want = have.detach().double(), want.detach().double()
    return float((have - want).norm() / want.norm().clamp_min(1e-30))


def plain_batch(rows: int = 2, tokens: int = 41) -> dict[str, Tensor]:
    """Rows of one sequence each, some tokens without a label."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB - 2, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[0, [4, tokens - 3]] = IGNORED
    return {"input_ids": ids, "labels": labels}


def packed_batch(*rows: tuple[int, ...]) -> dict[str, Tensor]:
    """Rows of documents of these lengths, given by positions that start anew."""
    rows = rows or ((9, 21, 11),)
    batch = plain_batch(len(rows), sum(rows[0]))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    batch["labels"][positions == 0] = IGNORED  # no document predicts the next one's first token
    return {**batch, "position_ids": positions}


def padded_batch(side: str) -> dict[str, Tensor]:
    """Two rows of which the second is padded on one side; the first is full."""
    batch = plain_batch()
    mask = torch.ones_like(batch["input_ids"])
    (mask[1, :13] if side == "left" else mask[1, -13:]).zero_()
    batch["labels"][mask == 0] = IGNORED
    batch["labels"][1, 13] = IGNORED  # nothing precedes the first real token
    return {**batch, "attention_mask": mask}


def documents_of(batch: Mapping[str, Tensor]) -> Iterator[tuple[int, int, int]]:
    """The documents of a batch: row, first token, first token of what follows."""
    count, tokens = batch["input_ids"].shape
    for row in range(count):
        inside = torch.zeros(tokens, dtype=torch.bool)
        if "position_ids" in batch:
            inside |= batch["position_ids"][row] == 0
        if "attention_mask" in batch:
            inside[1:] |= batch["attention_mask"][row].diff() != 0
        borders = [0, *inside[1:].nonzero().flatten().add(1).tolist(), tokens]
        for start, stop in pairwise(borders):
            if "attention_mask" not in batch or batch["attention_mask"][row, start]:
                yield row, start, stop


def whole_model(model: Any, batch: Mapping[str, Tensor]) -> Result:
    """One process, all of it as the model does it."""
    loss, logits = forward(model, batch, use_cache=False)
    loss.backward()
    return Result(loss.detach(), logits.detach(), take_gradients(model))


def forward(model: Any, batch: Mapping[str, Tensor], **given: Any) -> tuple[Tensor, Tensor]:
    """Loss and logits. Where labels are refused, because a model computes its loss by itself, it is
    one of the logits (Gemma 3 before transformers 5.17)."""
    try:
        check_loss(model)
    except ds_usp.UnsupportedAttentionError:
        unlabeled = {name: x for name, x in batch.items() if name != "labels"}
        logits, labels = model(**unlabeled, **given).logits, batch["labels"]
        if "MaskedLM" in type(model).__name__:
            return cross_entropy(logits.flatten(0, 1), labels.flatten()), logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits
    out = model(**batch, **given)
    return out.loss, out.logits


def documents_alone(model: Any, batch: Mapping[str, Tensor]) -> Result:
    """One process that computes each document without the others, padding not at all: nothing
    depends on how transformers packs and pads. Logits of padding are zero."""
    ids, labels = batch["input_ids"], batch["labels"]
    positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
    takes_positions = "position_ids" in signature(model.forward).parameters
    logits: Any = [[torch.zeros(1, VOCAB)] * ids.shape[1] for _ in ids]
    for row, start, stop in documents_of(batch):
        at = slice(row, row + 1), slice(start, stop)
        given = {"position_ids": positions[at]} if takes_positions else {}
        out = model(input_ids=ids[at], **given, use_cache=False).logits
        logits[row][start:stop] = out[0].split(1)
    joined = torch.stack([torch.cat(row) for row in logits])
    shift = "MaskedLM" not in type(model).__name__
    loss = cross_entropy(
        (joined[:, :-1] if shift else joined).flatten(0, 1).float(),
        (labels[:, 1:] if shift else labels).flatten(),
    )
    loss.backward()
    return Result(loss.detach(), joined.detach(), take_gradients(model))


def reference(model: Any, batch: Mapping[str, Tensor]) -> Result:
    """What the mesh has to give: the model's own loss for plain rows, else documents alone."""
    plain = set(batch) == {"input_ids", "labels"}
    return (whole_model if plain else documents_alone)(model, batch)


class _InDouble(TorchFunctionMode):
    """Computes in fp64 what a model asks for in fp32 by name."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, given)
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def reference_in_double(model: Any, batch: Mapping[str, Tensor]) -> Result:
    """The reference, and all that it is computed from, in fp64."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # others have no fp64
    with _InDouble():
        return reference(model, batch)


def judged(have: Result, want: Result, model: Any, batch: Mapping[str, Tensor]) -> float:
    """The error of a batch on the mesh. What is more than the bound off one process in fp32 must be
    within it of one process in fp64: the bound stays, and is that of the result which is right."""
    error = have.error(want)
    return error if error <= BOUND else have.error(want, reference_in_double(model, batch))


def on_the_mesh(model: Any, mesh: ds_usp.SequenceMesh, batch: Mapping[str, Tensor]) -> Result:
    """The enabled model on this rank; the gradients are the means over the ranks."""
    loss, logits = forward(model, batch)
    loss.backward()
    gradients = mean_gradients(model)
    logits = logits.detach()
    if "attention_mask" in batch:  # what padding gives is nobody's
        logits = logits * (batch["attention_mask"] != 0)[..., None]
    return Result(loss.detach(), logits, gradients)


def mean_gradients(model: Any, divisor: int | None = None) -> dict[str, Tensor]:
    """The gradients, summed over all ranks, by their number or another divisor."""
    gradients = take_gradients(model)
    joined = torch.cat([g.flatten() for g in gradients.values()])
    dist.all_reduce(joined)
    joined /= divisor or dist.get_world_size()
    parts = joined.split([g.numel() for g in gradients.values()])
    return {
        name: part.view_as(gradients[name]) for name, part in zip(gradients, parts, strict=True)
    }


@contextmanager
def counted_attention(module: Any) -> Iterator[list[int]]:
    """One entry for each call of ``usp_attention`` that a module makes."""
    original, calls = module.usp_attention, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    with mock.patch.object(module, "usp_attention", counted):
        yield calls


def take_gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of all parameters, zeros where there are none; they are cleared."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    return gradients


BATCHES = {"plain": plain_batch, "packed": packed_batch}
MESHES = {"ulysses 2": 2, "ring 2": 1}
# Names of the outcomes of a type.
PAIRS = tuple(f"{batch}, {mesh}" for batch in BATCHES for mesh in MESHES)


def sweep_case(
    ctx: RankContext,
    model_type: str,
    layout: str = "auto",
    masked: bool = False,
    pairs: Collection[str] = PAIRS,
) -> dict[str, float | str]:
    """How a type fares on two ranks, by batch and mesh: its error, or why it is refused. Each rank
    has the reference of one batch; where the model cannot compute it the error is infinite.

    Args:
        masked: with the head of a masked language model.
        pairs: the batches and meshes that are run.
    """
    model = build(model_type, masked=masked)
    batch_name = tuple(BATCHES)[ctx.rank]
    outcomes: dict[str, float | str] = {}
    want: Result | None = None
    with suppress(ValueError):
        want = reference(model, BATCHES[batch_name]())
    for mesh_name, ulysses_degree in MESHES.items():
        mesh, refused = mesh_of(ulysses_degree), ""
        with ExitStack() as stack:
            try:
                stack.enter_context(enable(model, mesh, layout=layout, logits="whole"))
            except ds_usp.USPError as refusal:
                refused = str(refusal)
            for name, make in BATCHES.items():
                if f"{name}, {mesh_name}" not in pairs:
                    continue
                outcome: float | str = refused
                try:
                    if not refused:
                        have = on_the_mesh(model, mesh, make())
                        is_asked = want is not None and name == batch_name
                        outcome = have.error(want) if is_asked else float("inf")
                except ds_usp.USPError as refusal:
                    outcome = str(refusal)
                    take_gradients(model)
                if name == batch_name:
                    outcomes[f"{name}, {mesh_name}"] = outcome
    return outcomes
