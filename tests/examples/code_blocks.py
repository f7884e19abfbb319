"""Fenced code blocks of the Markdown files, and the namespace in which Python blocks run."""

import doctest
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import RankContext
from torch import nn
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
FENCE = re.compile(r"^```(\w*)\s*$")
SEQ_LEN = 4112


@dataclass(frozen=True)
class Block:
    """One fenced block; `reason` is set if the line above marks it as not run."""

    path: Path
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The Markdown files whose blocks are run."""
    return [
        ROOT / "README.md",
        *sorted(ROOT.glob("docs/**/*.md")),
        *sorted(ROOT.glob("examples_deepspeed/**/*.md")),
    ]


def blocks(path: Path) -> Iterator[Block]:
    """The blocks of a file, in order."""
    lines, start, language, above = path.read_text(encoding="utf-8").splitlines(), 0, "", ""
    inside: list[str] | None = None
    for number, line in enumerate(lines, 1):
        fence = FENCE.match(line)
        if inside is None and fence:
            inside, start, language = [], number, fence[1]
        elif inside is not None and line == "```":
            mark = NOT_RUN.search(above)
            text = "\n".join(inside)
            yield Block(path, start, language, text, mark[1] if mark else None)
            inside, above = None, ""
        elif inside is not None:
            inside.append(line)
        elif line:
            above = line


# ------------------------------------------------------------------ Python


class Causal(nn.Module):
    """The local attention that a block wraps."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def namespace(ctx: RankContext) -> dict[str, Any]:
    """Names that blocks may use without defining them: a group, tensors, modules."""
    tokens = torch.randint(100, (2, 64))
    full_q, full_k, full_v = torch.randn(3, 1, SEQ_LEN, 4, 8).unbind()
    q, k, v = torch.randn(3, 2, 16, 4, 8).unbind()
    import ds_usp

    return {
        "ds_usp": ds_usp,
        "torch": torch,
        "checkpoint": checkpoint,
        "local_attention": Causal(),
        "sequence_group": ctx.group,
        "group": ctx.group,
        "mesh": ds_usp.SequenceMesh.from_group(ctx.group, 2),
        "S": SEQ_LEN,
        "q": q,
        "k": k,
        "v": v,
        "full_q": full_q,
        "full_k": full_k,
        "full_v": full_v,
        "full_sequences": [{"input_ids": tokens}],
        "embedding": nn.Embedding(100, 32),
        "positions": nn.Embedding(64, 32),
        "qkv": nn.Linear(32, 96),
        "output": nn.Linear(32, 100),
        "cross_entropy": lambda logits, labels: F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ),
        "device": torch.device("cpu"),
        "layer": nn.Linear(32, 32),
        "layers": nn.ModuleList(nn.Linear(32, 32) for _ in range(2)),
        "norm": nn.LayerNorm(32),
        "linear": nn.Linear(32, 32),
        "mlp": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        "x": torch.randn(2, 16, 32),
        "labels": torch.randint(100, (2, 16)),
        "weights": torch.ones(2, 16),
    }


def run_python(ctx: RankContext, *, page: list[Block]) -> list[str]:
    """Run the blocks of a page in order in one namespace; the first failed doctest, if any.

    Blocks that start and end ``torch.distributed`` run in the groups that the ranks have.
    """
    space = namespace(ctx)
    with patch.multiple(dist, init_process_group=DEFAULT, destroy_process_group=DEFAULT):
        return run_blocks(page, space)


def run_blocks(page: list[Block], space: dict[str, Any]) -> list[str]:
    """:func:`run_python` in a namespace."""
    for block in page:
        try:
            if block.text.startswith(">>> "):
                failure = failed_doctest(block, space)
                if failure:
                    return [f"{block}\n{failure}"]
            else:
                # Padded, so that a traceback names the line of the file.
                text = "\n" * block.line + block.text
                exec(compile(text, str(block.path), "exec"), space)
        except Exception as error:
            raise RuntimeError(f"{block}: {type(error).__name__}: {error}") from error
    return []


def failed_doctest(block: Block, space: dict[str, Any]) -> str:
    """The difference between the output of a block with prompts and the one it shows."""
    output: list[str] = []
    parsed = doctest.DocTestParser().get_doctest(
        block.text + "\n", space, str(block), str(block.path), block.line
    )
    doctest.DocTestRunner(verbose=False).run(parsed, out=output.append)
    return "".join(output)


# ------------------------------------------------------------------ the shell


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a block as words, without comments and variable assignments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"^\w+=", words[0]):
            words.pop(0)
        if words:
            yield words[: words.index("...")] if "..." in words else words
