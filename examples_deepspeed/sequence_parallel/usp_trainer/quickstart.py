"""``--quickstart``'s proof: ranks train as one process does by plain torch and dense attention.

The process has the same initial weights and batches, and nothing of DeepSpeed or of sequence
parallelism.
"""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ds_usp.training import IGNORE_INDEX
from usp_trainer.data import Tokens, split_samples
from usp_trainer.model import rotary_of
from usp_trainer.step import Trainer, new_model, new_optimizer

LIMIT = 1e-5  # relative difference of losses and gradient norms in fp32
STEPS = 8
# SGD without clipping is sensitive to a wrong gradient scale; Adam is what people train with.
PROOFS = (
    ("SGD", {"optimizer": "sgd", "lr": 0.1, "clip_grad": 0.0}),
    ("Adam", {"optimizer": "adam", "lr": 1e-3, "clip_grad": 1.0}),
)
Numbers = list[tuple[float, float]]  # loss and gradient norm of each step


def proves(args: Namespace, tokens: Tokens, device: torch.device) -> bool:
    """Whether the ranks and one process agree; rank 0 prints the numbers. Collective.

    Args:
        args: validated.
    """
    worst = 0.0
    ranks = dist.get_world_size()
    say = print if dist.get_rank() == 0 else (lambda *_, **__: None)
    say(f"\nproof: {STEPS} steps from the same seed on {ranks} ranks and in one process, in fp32")
    for name, settings in PROOFS:
        run = Namespace(**{**vars(args), **settings, "bf16": False, "eval_interval": None})
        trainer = Trainer(run, tokens, device)
        steps = [trainer.train(run.lr) for _ in range(STEPS)]
        numbers = [(step.loss, step.grad_norm) for step in steps]
        if dist.get_rank() == 0:
            expected = in_one_process(run, tokens, device)
            losses, norms = (largest_difference(numbers, expected, at) for at in (0, 1))
            worst = max(worst, losses, norms)
            say(
                f"{name:>5}: loss {numbers[0][0]:.4f} -> {numbers[-1][0]:.4f}, largest relative "
                f"difference {losses:.1e}, of gradient norms {norms:.1e}",
                flush=True,
            )
    found = torch.tensor([worst], device=device)
    dist.broadcast(found, 0)
    agrees = bool(found <= LIMIT)
    say(f"       {ranks} ranks and one {'agree' if agrees else 'DO NOT AGREE'} (limit {LIMIT:.0e})")
    return agrees


def in_one_process(args: Namespace, tokens: Tokens, device: torch.device) -> Numbers:
    """The losses and gradient norms of the same steps, of whole sequences in this process."""
    model = new_model(args, tokens.vocab_size, device).to(device)
    optimizer = new_optimizer(args, model)
    samples, _ = split_samples(tokens, args)
    positions = torch.arange(args.seq_length, device=device)
    numbers = []
    for step in range(STEPS):
        batch = samples.batch(step * args.global_batch_size, args.global_batch_size)
        inputs, labels = (batch[name].to(device) for name in ("input_ids", "shift_labels"))
        weights = (labels != IGNORE_INDEX) / (labels != IGNORE_INDEX).sum()
        where = positions.expand_as(inputs), rotary_of(args, positions), dense_attention
        loss = model(inputs, labels, weights, *where)
        loss.backward()
        limit = args.clip_grad or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((loss.item(), norm.item()))
    return numbers


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of ``[b, s, h, d]`` by torch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def largest_difference(numbers: Numbers, expected: Numbers, column: int) -> float:
    """The largest relative difference of a column; infinity where one is not a number."""
    pairs = [(a[column], b[column]) for a, b in zip(numbers, expected, strict=True)]
    return max(abs(a - b) / abs(b) if a == a and b == b else float("inf") for a, b in pairs)
