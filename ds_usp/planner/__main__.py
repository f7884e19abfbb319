"""``python -m ds_usp.planner``: memory, plan, comm, table, profile."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from types import MappingProxyType

from ds_usp.errors import ConfigError, USPError
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, KINDS, ORDERS
from ds_usp.planner import comparison, report
from ds_usp.planner.emit import ENGINE_OF, emit
from ds_usp.planner.emit import KINDS as EMITTED
from ds_usp.planner.engines import ENGINES, Engine, engine
from ds_usp.planner.explain import explain
from ds_usp.planner.hardware import Cluster, load_cluster
from ds_usp.planner.memory import memory, stage_memory
from ds_usp.planner.models import load_model
from ds_usp.planner.picture import picture
from ds_usp.planner.search import AXES, GIB, Found, search
from ds_usp.planner.split import RECOMPUTE, SCHEDULES, Split, Workload, check
from ds_usp.planner.traffic import attention_bytes

_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


def build_parser() -> ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="python -m ds_usp.planner", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_memory_parser, _plan_parser, _comm_parser, _profile_parser):
        add(commands)
    _command(commands, "table", "what each kind of parallelism sends and holds (USP paper)")
    return parser


def _command(commands: object, name: str, text: str) -> ArgumentParser:
    made: ArgumentParser = commands.add_parser(  # type: ignore[attr-defined]
        name, help=text, description=text, formatter_class=ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def _model_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="built-in name, FILE.json:NAME, HuggingFace config.json")
    add("--seq-len", type=int, required=True, help="tokens of one sequence")


def _degrees(parser: ArgumentParser, *axes: str) -> None:
    for axis in axes:
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"{axis} degree")


def _fusions(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--fused-activation", action="store_true", help="SwiGLU saves no sigmoid branch")
    add("--fused-loss", action="store_true", help="the logits are never held whole")


def _memory_parser(commands: object) -> None:
    parser = _command(commands, "memory", "bytes that one GPU needs")
    _model_arguments(parser)
    _degrees(parser, "tp", "ulysses", "ring", "pp")
    add = parser.add_argument
    add("--gpus", type=int, help="all of them; what the degrees leave is dp")
    add("--dp", type=int, help="instead of --gpus")
    add("--micro-batch", type=int, default=1, help="sequences of a replica at a time")
    add("--global-batch", type=int, help="sequences of a step (default: enough to fill the stages)")
    add("--layers-per-virtual-stage", type=int, default=0, help="0: a whole stage")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline")
    add("--zero", type=int, default=1, help="ZeRO's stage")
    add("--recompute", choices=RECOMPUTE, default="none", help="what backward computes again")
    add("--offload-ratio", type=float, default=0.0, help="share of activations on the host")
    add("--offload-unit", choices=("chunk", "layer"), default="chunk", help="what moves at once")
    add("--grad-dtype", choices=tuple(_BYTES), default="fp32", help="of summed gradients")
    add("--no-tp-sequence-parallel", action="store_true", help="without Megatron's")
    _fusions(parser)
    add("--stage", type=int, default=0, help="pipeline stage; -1: the fullest one")
    add("--workspace-gib", type=float, help="what no formula sees (default: the cluster's)")
    add("--cluster", default="h800", help="whose workspace counts")


def _plan_parser(commands: object) -> None:
    parser = _command(commands, "plan", "the fastest cuts that fit")
    _model_arguments(parser)
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="all of them")
    add("--gpus-per-node", type=int, help="default: the cluster's")
    add("--cluster", default="a100", help="built-in name or a profile (JSON)")
    add("--global-batch", type=int, default=1, help="sequences of a step")
    add("--documents", help="lengths of packed documents, with commas")
    add("--top", type=int, default=5, help="how many plans")
    add("--memory-gib", type=float, help="budget of a GPU (default: 96 %% of its memory)")
    add("--engine", choices=[e.name for e in ENGINES], help="what the framework can do")
    _fusions(parser)
    add("--explain", action="store_true", help="why, in words")
    add("--emit", choices=tuple(EMITTED), help="the best plan as flags, config or script")
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
    add("--dtype", choices=tuple(_BYTES), default="bf16", help="of q, k, v")
    add("--gradient-dtype", choices=tuple(_BYTES), help="of the ring's gradients (default: dtype)")
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


# ------------------------------------------------------------------ the commands


def _memory(args: Namespace) -> int:
    degrees = args.tp * args.ulysses * args.ring * args.pp
    if min(args.tp, args.ulysses, args.ring, args.pp) < 1:
        raise ConfigError("every degree must be 1 or more")
    if args.gpus and args.gpus % degrees:
        raise ConfigError(
            f"--gpus {args.gpus} is not a multiple of tp {args.tp} x ulysses {args.ulysses} x "
            f"ring {args.ring} x pp {args.pp} = {degrees}"
        )
    for name in ("gpus", "dp", "global_batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {getattr(args, name)} must be 1 or more")
    dp = args.dp or (args.gpus or degrees) // degrees
    split = Split(
        tp=args.tp,
        ulysses=args.ulysses,
        ring=args.ring,
        pp=args.pp,
        dp=dp,
        layers_per_virtual_stage=args.layers_per_virtual_stage,
        zero=args.zero,
        recompute=args.recompute,
        micro_batch=args.micro_batch,
        offload_ratio=args.offload_ratio,
        offload_unit=args.offload_unit,
        tp_sequence=not args.no_tp_sequence_parallel,
        schedule=args.schedule,
        fused_activation=args.fused_activation,
        fused_loss=args.fused_loss,
        grad_bytes=_BYTES[args.grad_dtype],
    )
    full = 2 * split.pp * dp * args.micro_batch
    work = Workload(load_model(args.model), args.seq_len, args.global_batch or full)
    check(work, split, args.gpus)
    workspace = load_cluster(args.cluster).workspace_bytes
    if args.workspace_gib is not None:
        workspace = args.workspace_gib * GIB
    if not 0 <= workspace < inf:
        raise ConfigError(f"--workspace-gib {args.workspace_gib} must be 0 or more")
    if not -1 <= args.stage < split.pp:
        raise ConfigError(f"--stage {args.stage} is outside the {split.pp} stages")
    fullest = memory(work, split, workspace)
    needs = fullest if args.stage < 0 else stage_memory(work, split, args.stage, workspace)
    if args.json:
        whole = report.memory_json(needs)
        whole["fullest_stage"] = {
            "pipeline_stage": fullest.stage,
            "total_bytes": round(fullest.total),
        }
        print(json.dumps(whole, indent=2))
        return 0
    print(report.memory_text(needs))
    if fullest.total > needs.total:
        more = (fullest.total - needs.total) / GIB
        print(f"the fullest stage, {fullest.stage}, needs {more:.2f} GiB more")
    return 0


def _plan(args: Namespace) -> int:
    cluster = load_cluster(args.cluster)
    if args.gpus_per_node is not None:
        cluster = cluster.with_gpus_per_node(args.gpus_per_node)
    documents = _lengths(args.documents)
    if args.top < 1:
        raise ConfigError(f"--top {args.top} must be 1 or more")
    work = Workload(load_model(args.model), args.seq_len, args.global_batch, documents)
    found = _search(args, cluster, work, _engine(args))
    emitted = emit(args.emit, work, found.plans[0].split) if args.emit and found.plans else None
    if args.svg:
        _draw(args.svg, found, args.top)
    if args.json:
        whole = report.found_json(found, args.top)
        if args.explain:
            whole["explanation"] = explain(found)
        if emitted:
            whole["emitted"] = emitted
        print(json.dumps(whole, indent=2))
        return 0 if found.plans else 1
    print(emitted or report.plans_text(found, args.top))
    if args.explain and found.plans:
        why = "\n".join(explain(found))
        print(why if emitted else f"\n{why}", file=sys.stderr if emitted else sys.stdout)
    return 0 if found.plans else 1


def _engine(args: Namespace) -> Engine:
    """The framework whose rules hold: that of what is emitted, if something is."""
    if not args.emit:
        return engine(args.engine or "any")
    name = ENGINE_OF[args.emit]
    if args.engine not in (None, name):
        raise ConfigError(
            f"--emit {args.emit} is what {name} can run, not --engine {args.engine}: leave one out"
        )
    return engine(name)


def _draw(path: Path, found: Found, top: int) -> None:
    if not found.plans:
        print(f"--svg {path}: not written, because there is no plan to draw", file=sys.stderr)
        return
    try:
        path.write_text(picture(found, top), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --svg {path}: {error.strerror}") from error


def _lengths(given: str | None) -> tuple[int, ...]:
    try:
        lengths = tuple(map(int, given.split(","))) if given else ()
    except ValueError:
        lengths = (0,)
    if any(length < 1 for length in lengths):
        raise ConfigError(f"--documents {given} must be whole numbers of tokens, with commas")
    return lengths


def _search(args: Namespace, cluster: Cluster, work: Workload, how: Engine) -> Found:
    fixed = {axis: getattr(args, axis) for axis in AXES if getattr(args, axis) is not None}
    budget = None if args.memory_gib is None else args.memory_gib * GIB
    base = Split(fused_activation=args.fused_activation, fused_loss=args.fused_loss)
    return search(cluster, work, args.gpus, how, budget, fixed, base)


def _comm(args: Namespace) -> int:
    split = Split(
        tp=args.tp,
        ulysses=args.ulysses,
        ring=args.ring,
        dp=args.dp,
        pp=args.pp,
        zero=args.zero,
        order=args.order,
        micro_batch=args.micro_batch,
        param_bytes=_BYTES[args.dtype],
    )
    batch = args.dp * args.micro_batch if args.dp > 0 and args.micro_batch > 0 else 1
    work = Workload(load_model(args.model), args.seq_len, batch)
    check(work, split)
    gradients = _BYTES[args.gradient_dtype or args.dtype]
    ranks = [
        attention_bytes(
            work,
            split,
            rank,
            args.layout,
            gradient_bytes=gradients,
            inner_ring=args.inner_ring,
        )
        for rank in range(split.sp)
    ]
    if args.json:
        print(json.dumps(report.comm_json(work, split, ranks), indent=2))
    else:
        print(report.comm_text(work, split, ranks))
    return 0


def _table(args: Namespace) -> int:
    rows = comparison.rows()
    print(json.dumps(comparison.as_json(rows), indent=2) if args.json else comparison.text(rows))
    return 0


def _profile(args: Namespace) -> int:
    from ds_usp.profiling.start import run  # the one command that loads torch

    if args.out.suffix != ".json":
        raise ConfigError(f"--out {args.out} must end in .json: that is how --cluster knows a file")
    stream = sys.stderr if args.json else sys.stdout
    models = None if args.model is None else [load_model(name) for name in args.model]
    cluster = run(
        args.out,
        models,
        device=args.device,
        seconds=args.seconds,
        say=lambda line: print(line, file=stream, flush=True),
    )
    if cluster and args.json:
        print(args.out.read_text(encoding="utf-8"))
    elif cluster:
        print(f"wrote {args.out}; plan with --cluster {args.out}")
    return 0


_COMMANDS: Mapping[str, Callable[[Namespace], int]] = MappingProxyType(
    {"memory": _memory, "plan": _plan, "comm": _comm, "table": _table, "profile": _profile}
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what the user can mend is one line on stderr and the exit code 2."""
    args = build_parser().parse_args(argv)
    try:
        status = _COMMANDS[args.command](args)
        sys.stdout.flush()
        return status
    except USPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read enough; what is left has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
