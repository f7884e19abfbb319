"""``ds-usp``, ``python -m ds_usp.planner``: memory, longest, plan, comm, table, profile."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from types import MappingProxyType

from ds_usp.errors import ConfigError, USPError
from ds_usp.planner import comparison, plan_report, report
from ds_usp.planner.emit import FRAMEWORK_OF, emit
from ds_usp.planner.explain import explain
from ds_usp.planner.flags import BYTES, DEFAULT_CLUSTER, PROG, build_parser
from ds_usp.planner.frameworks import FrameworkCaps, framework_caps
from ds_usp.planner.hardware import Cluster, load_cluster
from ds_usp.planner.max_length import all_configs, max_lengths_over, min_workload
from ds_usp.planner.memory import memory, stage_memory
from ds_usp.planner.model_files import load_model
from ds_usp.planner.parallel_config import ParallelConfig, Workload, require_feasible
from ds_usp.planner.plot import picture
from ds_usp.planner.search import AXES, GIB, SearchResult, search
from ds_usp.planner.traffic import attention_bytes

_DEGREES = ("tp", "ulysses", "ring", "pp")


def _parallel_config(args: Namespace) -> ParallelConfig:
    """The degrees that were asked for, and how they are used."""
    tp, ulysses, ring, pp = (_given_or_1(args, name) for name in _DEGREES)
    degrees = tp * ulysses * ring * pp
    if min(tp, ulysses, ring, pp) < 1:
        raise ConfigError("every degree must be 1 or more")
    if args.gpus and args.gpus % degrees:
        raise ConfigError(
            f"--gpus {args.gpus} is not a multiple of tp {tp} x ulysses {ulysses} x "
            f"ring {ring} x pp {pp} = {degrees}"
        )
    for name in ("gpus", "dp"):
        _check_positive(args, name)
    return ParallelConfig(
        tp=tp,
        ulysses=ulysses,
        ring=ring,
        pp=pp,
        dp=args.dp or (args.gpus or degrees) // degrees,
        layers_per_virtual_stage=args.layers_per_virtual_stage,
        zero=args.zero,
        micro_batch=args.micro_batch,
        tp_sequence=not args.no_tp_sequence_parallel,
        schedule=args.schedule,
        fused_activation=args.fused_activation,
        fused_loss=args.fused_loss,
        grad_bytes=BYTES[args.grad_dtype],
    )


def _given_or_1(args: Namespace, name: str) -> int:
    value: int | None = getattr(args, name)
    return 1 if value is None else value


def _load_cluster(args: Namespace) -> tuple[Cluster, str]:
    """The cluster, and its name as reports print it."""
    if args.cluster is not None:
        cluster = load_cluster(args.cluster)
        return cluster, f"cluster {cluster.name}"
    return load_cluster(DEFAULT_CLUSTER), f"cluster {DEFAULT_CLUSTER} (default)"


def _check_positive(args: Namespace, name: str) -> None:
    given = getattr(args, name)
    if given is not None and not 0 < given < inf:
        least = "1 or more" if isinstance(given, int) else "more than 0"
        raise ConfigError(f"--{name.replace('_', '-')} {given} must be {least}")


def _workspace(args: Namespace, cluster: Cluster) -> float:
    workspace = cluster.workspace_bytes
    if args.workspace_gib is not None:
        workspace = args.workspace_gib * GIB
    if not 0 <= workspace < inf:
        raise ConfigError(f"--workspace-gib {args.workspace_gib} must be 0 or more")
    return workspace


def _memory(args: Namespace) -> int:
    _check_positive(args, "global_batch")
    config = _parallel_config(args).replace(
        recompute=args.recompute,
        offload_ratio=args.offload_ratio,
        offload_unit=args.offload_unit,
    )
    full = 2 * config.pp * config.dp * args.micro_batch
    work = Workload(load_model(args.model), args.seq_len, args.global_batch or full)
    require_feasible(work, config, args.gpus)
    cluster, named = _load_cluster(args)
    workspace = _workspace(args, cluster)
    if not -1 <= args.stage < config.pp:
        raise ConfigError(f"--stage {args.stage} is outside the {config.pp} stages")
    fullest = memory(work, config, workspace)
    needs = fullest if args.stage < 0 else stage_memory(work, config, args.stage, workspace)
    if args.json:
        whole = report.memory_json(needs)
        whole["fullest_stage"] = {
            "pipeline_stage": fullest.stage,
            "total_bytes": round(fullest.total),
        }
        print(json.dumps(whole, indent=2))
        return 0
    print(named)
    print(report.memory_text(needs))
    if fullest.total > needs.total:
        more = (fullest.total - needs.total) / GIB
        print(f"the fullest stage, {fullest.stage}, needs {more:.2f} GiB more")
    return 0


def _max_length(args: Namespace) -> int:
    for name in ("memory_gib", "host_memory_gib"):
        _check_positive(args, name)
    config, model = _parallel_config(args), load_model(args.model)
    cluster, named = _load_cluster(args)
    if args.host_memory_gib is not None:
        cluster = replace(cluster, host_memory_bytes=args.host_memory_gib * GIB)
    budget = cluster.budget_bytes if args.memory_gib is None else args.memory_gib * GIB
    searched = bool(args.gpus) and all(getattr(args, name) is None for name in _DEGREES)
    if searched:
        configs = all_configs(model, config.replace(dp=args.dp or 1), args.gpus, cluster)
    else:
        require_feasible(min_workload(model, config), config, args.gpus)
        configs = [config]
    found = max_lengths_over(model, configs, cluster, budget, _workspace(args, cluster))
    if args.json:
        print(json.dumps([report.max_length_json(each) for each in found], indent=2))
    else:
        print(named)
        print(report.max_length_text(model, cluster.name, budget, found, searched))
    return 0 if any(each.seq_len for each in found) else 1


def _plan(args: Namespace) -> int:
    cluster, named = _load_cluster(args)
    if args.gpus_per_node is not None:
        cluster = cluster.with_gpus_per_node(args.gpus_per_node)
    if args.top < 1:
        raise ConfigError(f"--top {args.top} must be 1 or more")
    work = Workload(load_model(args.model), args.seq_len, args.global_batch, args.documents or ())
    result = _search(args, cluster, work, _framework(args))
    emitted = emit(args.emit, work, result.plans[0].config) if args.emit and result.plans else None
    if args.svg:
        _draw(args.svg, result, args.top)
    if args.json:
        whole = plan_report.search_result_json(result, args.top)
        if args.explain:
            whole["explanation"] = explain(result)
        if emitted:
            whole["emitted"] = emitted
        print(json.dumps(whole, indent=2))
        return 0 if result.plans else 1
    print(emitted or f"{named}\n{plan_report.plans_text(result, args.top)}")
    if args.explain and result.plans:
        why = "\n".join(explain(result))
        print(why if emitted else f"\n{why}", file=sys.stderr if emitted else sys.stdout)
    return 0 if result.plans else 1


def _framework(args: Namespace) -> FrameworkCaps:
    """The framework whose rules hold: that of what is emitted, if something is."""
    if not args.emit:
        return framework_caps(args.engine or "any")
    name = FRAMEWORK_OF[args.emit]
    if args.engine not in (None, name):
        raise ConfigError(
            f"--emit {args.emit} is what {name} can run, not --engine {args.engine}: leave one out"
        )
    return framework_caps(name)


def _draw(path: Path, result: SearchResult, top: int) -> None:
    if not result.plans:
        print(f"--svg {path}: not written, because there is no plan to draw", file=sys.stderr)
        return
    try:
        path.write_text(picture(result, top), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --svg {path}: {error.strerror}") from error


def _search(
    args: Namespace, cluster: Cluster, work: Workload, framework: FrameworkCaps
) -> SearchResult:
    fixed = {axis: getattr(args, axis) for axis in AXES if getattr(args, axis) is not None}
    budget = None if args.memory_gib is None else args.memory_gib * GIB
    base = ParallelConfig(fused_activation=args.fused_activation, fused_loss=args.fused_loss)
    return search(cluster, work, args.gpus, framework, budget, fixed, base)


def _comm(args: Namespace) -> int:
    tp, ulysses, ring, pp, dp = (_given_or_1(args, name) for name in (*_DEGREES, "dp"))
    config = ParallelConfig(
        tp=tp,
        ulysses=ulysses,
        ring=ring,
        dp=dp,
        pp=pp,
        zero=args.zero,
        order=args.order,
        micro_batch=args.micro_batch,
        param_bytes=BYTES[args.dtype],
    )
    batch = dp * args.micro_batch if dp > 0 and args.micro_batch > 0 else 1
    work = Workload(load_model(args.model), args.seq_len, batch)
    require_feasible(work, config)
    gradients = BYTES[args.gradient_dtype or args.dtype]
    ranks = [
        attention_bytes(
            work,
            config,
            rank,
            args.layout,
            gradient_bytes=gradients,
            inner_ring=args.inner_ring,
        )
        for rank in range(config.sp)
    ]
    if args.json:
        print(json.dumps(report.comm_json(work, config, ranks), indent=2))
    else:
        print(report.comm_text(work, config, ranks))
    return 0


def _table(args: Namespace) -> int:
    rows = comparison.rows()
    print(json.dumps(comparison.as_json(rows), indent=2) if args.json else comparison.text(rows))
    return 0


def _profile(args: Namespace) -> int:
    from ds_usp.profiling.launch import run  # the one command that loads torch

    if args.out.suffix != ".json":
        raise ConfigError(f"--out {args.out} must end in .json: that is how --cluster knows a file")
    stream = sys.stderr if args.json else sys.stdout
    models = None if args.model is None else [load_model(name) for name in args.model]
    cluster = run(
        args.out,
        models,
        device=args.device,
        seconds=args.seconds,
        print_line=lambda line: print(line, file=stream, flush=True),
    )
    if cluster and args.json:
        print(args.out.read_text(encoding="utf-8"))
    elif cluster:
        print(f"wrote {args.out}; plan with --cluster {args.out}")
    return 0


_COMMANDS: Mapping[str, Callable[[Namespace], int]] = MappingProxyType(
    {
        "memory": _memory,
        "longest": _max_length,
        "plan": _plan,
        "comm": _comm,
        "table": _table,
        "profile": _profile,
    }
)


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command; what the user can mend is one line on stderr and the exit code 2.

    Args:
        argv: a command and its arguments; None: those of the process.
        prog: what the user typed before them, for usage and help.
    """
    try:
        args = build_parser(prog).parse(sys.argv[1:] if argv is None else argv)
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
