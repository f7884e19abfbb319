"""The command line of the planner."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

from ds_usp.geometry.layout import DEFAULT_SP_ORDER, KINDS, ORDERS
from ds_usp.planner.arguments import OneDefault, OneLineParser, lengths, tokens
from ds_usp.planner.emit import KINDS as EMITTED
from ds_usp.planner.frameworks import FRAMEWORKS
from ds_usp.planner.legend import LEGENDS
from ds_usp.planner.parallel_config import RECOMPUTE, SCHEDULES
from ds_usp.planner.search import AXES

BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
DEFAULT_CLUSTER = "h800"
_TOKENS = "in tokens: 131072, or 128K, or 1M (powers of 1024)"
_EMIT = (
    "the best plan as flags of megatron_patches.run, flags of Megatron-LM (whose program calls "
    'megatron_patches.apply("megatron_core")), DeepSpeed\'s configuration, or a script beside '
    "those of examples_deepspeed/sequence_parallel"
)
_CHUNKS = "the loss in chunks: all logits are never held at once"
PROG = "python -m ds_usp.planner"
_COMMANDS = "Which degrees, how fast, will it fit: sums on paper, before a GPU is asked."


def build_parser(prog: str = PROG) -> OneLineParser:
    """The command line, as ``prog`` starts it."""
    parser = OneLineParser(prog=prog, description=_COMMANDS)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_memory_parser, _max_length_parser, _plan_parser, _comm_parser, _profile_parser):
        add(commands)
    _command(commands, "table", "what each kind of parallelism sends and holds (USP paper)")
    return parser


def _command(commands: object, name: str, text: str) -> ArgumentParser:
    made: ArgumentParser = commands.add_parser(  # type: ignore[attr-defined]
        name,
        help=text,
        description=text,
        epilog=LEGENDS.get(name),
        formatter_class=OneDefault,
    )
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def _model_arguments(parser: ArgumentParser, seq_len: bool = True) -> None:
    add = parser.add_argument
    add("--model", required=True, help="built-in name, FILE.json:NAME, HuggingFace config.json")
    if seq_len:
        add("--seq-len", type=tokens, required=True, help=f"of one sequence, {_TOKENS}")


def _cluster(parser: ArgumentParser) -> None:
    text = f"built-in name or a profile (JSON) (default: {DEFAULT_CLUSTER})"
    parser.add_argument("--cluster", help=text)


def _degrees(parser: ArgumentParser, *axes: str, default: str = "1") -> None:
    for axis in axes:
        text = f"{axis} degree (default: {default})"
        parser.add_argument(f"--{axis}", type=int, help=text)


def _fusions(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--fused-activation", action="store_true", help="SwiGLU saves no sigmoid branch")
    add("--fused-loss", action="store_true", help=_CHUNKS)


def _memory_parser(commands: object) -> None:
    parser = _command(commands, "memory", "bytes that one GPU needs")
    _model_arguments(parser)
    _parallel_arguments(parser)
    add = parser.add_argument
    add("--global-batch", type=int, help="sequences of a step (default: enough to fill the stages)")
    add("--recompute", choices=RECOMPUTE, default="none", help="what backward computes again")
    add("--offload-ratio", type=float, default=0.0, help="share of activations on the host")
    add("--offload-unit", choices=("chunk", "layer"), default="chunk", help="what moves at once")
    add("--stage", type=int, default=0, help="pipeline stage; -1: the fullest one")
    _cluster(parser)


def _max_length_parser(commands: object) -> None:
    text = "the longest sequence that fits, for every way to keep less"
    parser = _command(commands, "longest", text)
    _model_arguments(parser, seq_len=False)
    _parallel_arguments(parser, "where --gpus is given and no degree is, all are tried; else 1")
    _cluster(parser)
    add = parser.add_argument
    add("--memory-gib", type=float, help="budget of a GPU (default: 96 %% of its memory)")
    add("--host-memory-gib", type=float, help="of a node (default: the cluster's)")


def _parallel_arguments(parser: ArgumentParser, default: str = "1") -> None:
    _degrees(parser, "tp", "ulysses", "ring", "pp", default=default)
    add = parser.add_argument
    add("--gpus", type=int, help="all of them; what the degrees leave is dp")
    add("--dp", type=int, help="instead of --gpus")
    add("--micro-batch", type=int, default=1, help="sequences of a replica at a time")
    add("--layers-per-virtual-stage", type=int, default=0, help="0: a whole stage")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline")
    add("--zero", type=int, default=1, help="ZeRO's stage")
    add("--grad-dtype", choices=tuple(BYTES), default="fp32", help="of summed gradients")
    add("--no-tp-sequence-parallel", action="store_true", help="without Megatron's")
    _fusions(parser)
    add("--workspace-gib", type=float, help="what no formula sees (default: the cluster's)")


def _plan_parser(commands: object) -> None:
    parser = _command(commands, "plan", "the fastest parallel configurations that fit")
    _model_arguments(parser)
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="all of them")
    add("--gpus-per-node", type=int, help="in one node (default: the cluster's)")
    _cluster(parser)
    add("--global-batch", type=int, default=1, help="sequences of a step")
    add("--documents", type=lengths, help=f"packed into a sequence, with commas, {_TOKENS}")
    add("--top", type=int, default=5, help="how many plans")
    add("--memory-gib", type=float, help="budget of a GPU (default: 96 %% of its memory)")
    add("--engine", choices=[e.name for e in FRAMEWORKS], help="what the framework can do")
    _fusions(parser)
    add("--explain", action="store_true", help="why, in words")
    add("--emit", choices=tuple(EMITTED), help=_EMIT)
    add("--svg", type=Path, help="write a picture of the best plans")
    for axis in AXES:
        choices = {"order": ORDERS, "recompute": RECOMPUTE, "zero": (0, 1, 2, 3)}.get(axis)
        kind = str if axis in ("order", "recompute") else int
        name, text = f"--{axis.replace('_', '-')}", f"only plans with this {axis}"
        add(name, type=kind, choices=choices, help=text)


def _comm_parser(commands: object) -> None:
    parser = _command(commands, "comm", "bytes that attention sends, as a rank's ledger counts")
    _model_arguments(parser)
    _degrees(parser, "tp", "ulysses", "ring", "dp", "pp")
    add = parser.add_argument
    add("--micro-batch", type=int, default=1, help="sequences of a replica at a time")
    add("--layout", choices=KINDS, default="zigzag", help="which rank holds which token")
    add("--order", choices=ORDERS, default=DEFAULT_SP_ORDER, help="whose ranks are neighbours")
    add("--dtype", choices=tuple(BYTES), default="bf16", help="of q, k, v")
    add("--gradient-dtype", choices=tuple(BYTES), help="of the ring's gradients (default: dtype)")
    add("--zero", type=int, default=1, help="ZeRO's stage")
    add("--inner-ring", type=int, help="ring ranks of a node, in a double ring (default: none)")


def _profile_parser(commands: object) -> None:
    text = "measure this machine, alone or under torchrun, and write what --cluster FILE reads"
    parser = _command(commands, "profile", text)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the JSON file")
    late = "for everything, starting up aside; what comes late is measured once, not left out"
    add("--seconds", type=float, default=90.0, help=late)
    whose = "whose layers are measured (default: gpt-1.3b and llama3-8b on GPUs, none on CPUs)"
    add("--model", nargs="*", help=whose)
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: GPUs if any")
