"""Common to the three examples: a GPT with rotary positions, synthetic documents, and the setup."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from ds_usp import ConfigError, RankGrid, SequenceMesh, one_line_errors, usp_attention
from ds_usp.training import ShardedBatch

VOCAB, HIDDEN, HEADS, LAYERS = 64, 64, 4, 2
SAMPLES, BATCH = 64, 2  # of the data, and of a data-parallel replica's step
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class GPT(nn.Module):
    """A GPT on local tokens; only ``attention`` communicates with other ranks.

    Shapes:
        tokens, positions: ``[b, s_local]``; logits: ``[b, s_local, VOCAB]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Logits of every token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attention)
        return self.output(self.norm(x))


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """``[b, s_local, HIDDEN]`` to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).unbind(2)
        out = attention(rotate(q, positions), rotate(k, positions), v)  # [b, s_local, h, d]
        x = x + self.out(out.flatten(2))
        return x + self.mlp(self.norm2(x))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE by the positions of the batch: ``arange`` would be wrong on all ranks but one.

    Shapes:
        x: ``[b, s_local, h, d]``; positions: ``[b, s_local]``.
    """
    exponent = torch.arange(0, x.shape[3], 2, device=x.device) / x.shape[3]
    angles = positions[:, :, None, None] * 10000.0**-exponent
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().chunk(2, dim=3)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=3).to(x.dtype)


class SyntheticDocuments(Dataset):
    """Two packed documents per sample, each an arithmetic sequence; the prompt has no loss."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        border = int(torch.randint(1, self.seq_len, (1,), generator=draw))
        start, step = torch.randint(1, VOCAB, (2, 2), generator=draw)
        index_in_sequence = torch.arange(self.seq_len)
        document = (index_in_sequence >= border).long()
        positions = index_in_sequence - border * document
        tokens = (start[document] + step[document] * positions) % VOCAB
        labels = torch.where(positions < 5, -100, tokens)
        return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def optimizer_of(parameters: Iterable[nn.Parameter], check: bool) -> torch.optim.Optimizer:
    """AdamW; SGD for ``--check``: Adam hides a wrong gradient scale, and amplifies rounding errors
    of tiny gradients to full steps."""
    if check:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3)


def flags(description: str | None) -> argparse.ArgumentParser:
    """The command line of the examples."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ulysses", type=int, default=2, help="ranks that exchange heads")
    parser.add_argument("--ring", type=int, default=1, help="ranks that pass keys and values on")
    parser.add_argument("--layout", default="zigzag", help="which tokens a rank holds")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="batches to train on")
    parser.add_argument("--save", help="write a checkpoint here after the last step")
    parser.add_argument("--load", help="go on from this checkpoint")
    parser.add_argument("--check", action="store_true", help="compare with one process, in fp32")
    return parser


def start(args: argparse.Namespace) -> tuple[torch.device, torch.dtype, SequenceMesh]:
    """This rank's device, the compute dtype, and its mesh over ``ulysses * ring`` ranks.

    Each mesh is one data-parallel replica.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    world, sp = dist.get_world_size(), args.ulysses * args.ring
    if world % sp:
        raise ConfigError(
            f"--ulysses {args.ulysses} x --ring {args.ring} = {sp} must divide the {world} ranks "
            "that torchrun started"
        )
    replicas = world // sp
    max_steps = SAMPLES // (BATCH * replicas)
    if not 1 <= args.steps <= max_steps:
        raise ConfigError(
            f"--steps {args.steps}: {replicas} replicas have data for 1 to {max_steps}"
        )
    grid = RankGrid({"ulysses": args.ulysses, "ring": args.ring, "dp": replicas})
    torch.manual_seed(0)  # the same initial weights on every rank
    dtype = torch.bfloat16 if on_gpu and not args.check else torch.float32
    return device, dtype, SequenceMesh.build(grid)


def run(main: Callable[[], int]) -> int:
    """The exit code of ``main``; an error that the user can mend is one line, not one a rank."""
    with one_line_errors():
        code = main()
    dist.destroy_process_group()  # without it a process with gloo may abort at exit (SIGABRT)
    return code


def attention_of(batch: ShardedBatch, mesh: SequenceMesh) -> Attention:
    """Causal attention within the batch's documents, over all ranks of the mesh."""
    where = {"mesh": mesh, "layout": batch.layout, "mask": batch.mask}
    return lambda q, k, v: usp_attention(q, k, v, **where)
