"""The reference of ``--check``: the same steps in one process, with dense attention.

Nothing of ds_usp is used here, and labels are shifted within full sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import GPT, optimizer_of
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

LIMIT = 1e-5
Step = tuple[float, dict[str, Tensor]]  # the loss, and the gradient of each parameter


def matches_one_process(
    steps: Mapping[int, Step], loader: DataLoader, replicas: int, device: torch.device
) -> bool:
    """Whether losses and gradients are those of one process; rank 0 prints the numbers.

    Args:
        steps: what the ranks had, by the number of the step.
        loader: of this data-parallel replica, whose sampler is a ``DistributedSampler``.
        replicas: how many there are.
    """
    if not steps:
        print_rank0("--check: the checkpoint is of the last of --steps; nothing is left to compare")
        return False
    worst, data = 0.0, loader.dataset
    samplers = [DistributedSampler(data, replicas, replica) for replica in range(replicas)]
    loaders = [DataLoader(data, loader.batch_size, sampler=sampler) for sampler in samplers]
    for number, expected in enumerate(one_process(loaders, max(steps) + 1, device)):
        if number in steps:
            loss, gradients = steps[number]
            loss_error = abs(loss - expected[0]) / expected[0]
            gradient_error, name = largest_error(gradients, expected[1])
            worst = max([worst, loss_error, gradient_error], key=lambda x: (x != x, x))  # NaN leads
            print_rank0(
                f"step {number}: loss {loss:.7f}, one process {expected[0]:.7f}, error "
                f"{loss_error:.1e}; gradients {gradient_error:.1e} ({name})"
            )
    passed = worst <= LIMIT
    print_rank0(
        f"largest relative error {worst:.1e}, limit {LIMIT:g}: {'ok' if passed else 'FAILED'}"
    )
    return passed


def one_process(loaders: list[DataLoader], steps: int, device: torch.device) -> Iterable[Step]:
    """Loss and gradients of each step, from the same initial weights."""
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = optimizer_of(model.parameters(), check=True)
    for _, batches in zip(range(steps), zip(*loaders, strict=False), strict=False):
        columns = zip(*(batch.values() for batch in batches), strict=True)
        joined = (torch.cat(column).to(device) for column in columns)
        batch = dict(zip(batches[0], joined, strict=True))
        logits = model(batch["input_ids"], batch["position_ids"], dense(batch["position_ids"]))
        labels = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())  # ignores -100
        loss.backward()
        yield loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()


def dense(positions: Tensor):
    """Causal attention within documents, over all pairs of tokens."""
    document = (positions == 0).cumsum(1)
    allowed = (document[:, :, None] == document[:, None, :]).tril()[:, None]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(~allowed, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return attention


def largest_error(
    gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[float, str]:
    """The largest error of any element, relative to the largest element of its parameter, and that
    parameter's name."""
    if gradients.keys() != expected.keys():
        raise KeyError(f"gradients of {sorted(gradients)}, one process has {sorted(expected)}")
    errors = {
        name: ((gradients[name].float() - gradient).abs().max() / gradient.abs().max()).item()
        for name, gradient in expected.items()
    }
    name = max(errors, key=lambda n: (errors[n] != errors[n], errors[n]))
    return errors[name], name


def print_rank0(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)
