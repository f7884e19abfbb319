"""``ds-usp verify``: attention as the user configures it, here, against a dense reference.

A result is exact if its relative error is within the limit of its dtype: an absolute one in fp64
and fp32; in bf16 and fp16 a multiple of the error of the same kernel run dense on one device,
which itself must be a rounding error. Errors of one rounding of the result are exact there too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ds_usp._version import __version__
from ds_usp.cli.ranks import RankError, run_forked, run_launched
from ds_usp.cli.verify_case import DTYPES, VerifyCase, build_parser, cases_of
from ds_usp.cli.verify_rank import Report, TensorErrors, largest_errors, run_cases
from ds_usp.config import environment, torchrun_env
from ds_usp.errors import ConfigError

EXACT, WRONG, REFUSED = 0, 1, 2
_VERDICTS = ("exact", "WRONG", "refused")
_ABSOLUTE: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-5}
_MAX_RATIO = 1.5
_LSE_LIMIT = 1e-5  # kernels compute and return it in fp32, whatever the dtype
# Limit of the error of the kernel alone, in epsilons of its dtype: more is no rounding. A soft cap
# may use the GPU's tanh, which is exact to 2**-11 of the cap.
_MAX_OWN_EPS, _TANH = 8.0, 2.0**-11
# An error of one rounding of the result (eps / 2) is exact, however exact the kernel alone is; over
# few elements, where a ratio is noise, so are a few roundings (partial sums of ranks).
_ROUNDING_EPS, _FEW_ROUNDINGS_EPS, _FEW_ELEMENTS = 0.5, 4.0, 4096


def main(argv: Sequence[str], print_line: Callable[..., None]) -> int:
    """Run ``ds-usp verify``; rank 0 alone prints.

    Returns:
        0 if all results are exact, 1 if one is wrong or a rank failed, 2 if a call was refused.

    Raises:
        ConfigError: arguments that cannot be run.
    """
    args = build_parser().parse(argv)
    env = torchrun_env()
    started = "RANK" in environment(("RANK",))
    cuda = started and args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not started:
        raise ConfigError(
            "--device cuda needs a process for each GPU: torchrun --nproc-per-node N -m ds_usp "
            "verify ..."
        )
    if args.device == "cuda" and not cuda:
        raise ConfigError("--device cuda: torch finds no GPU here. Use --device cpu")
    if cuda and torch.cuda.device_count() < env.local_world:
        raise ConfigError(
            f"torchrun started {env.local_world} ranks here, and there are "
            f"{torch.cuda.device_count()} GPUs: start at most as many, or give --device cpu"
        )
    cases = cases_of(args, env.world if started else None, cuda)
    progress = partial(print_line, progress=True) if env.rank == 0 else _silent
    work = partial(run_cases, cases)
    try:
        if started:
            reports = run_launched(work, env, cuda, progress)
        else:
            reports = run_forked(work, cases[0].ulysses * cases[0].ring, progress)
    except RankError as error:
        progress("")
        print_line(f"WRONG: {error}")
        return WRONG
    if env.rank == 0:
        progress("")
        world = env.world if started else cases[0].ulysses * cases[0].ring
        machine = f"NCCL on {torch.cuda.get_device_name()}" if cuda else "gloo on CPUs"
        to_text = _as_json if args.json else _as_text
        print_line(to_text(reports, f"{world} ranks, {machine}"))
    return _exit_code(reports)


def _silent(line: str) -> None:
    """The other ranks print no progress."""


def verdict(report: Report) -> int:
    """EXACT, WRONG or REFUSED."""
    if report.refusal is not None:
        return REFUSED
    right = report.positions is None and all(within(report.case, x) for x in report.errors)
    return EXACT if right else WRONG


def within(case: VerifyCase, measured: TensorErrors) -> bool:
    """Whether a result's error is within the limit of its dtype (see the module's docstring)."""
    absolute = _ABSOLUTE.get(case.dtype)
    if absolute is not None:
        return measured.error <= absolute
    if measured.own > max_own_error(case):
        return False
    if measured.error <= always_within(case, measured.name):
        return True
    return measured.ratio is not None and measured.ratio <= _MAX_RATIO


def max_own_error(case: VerifyCase) -> float:
    """The largest error of the kernel alone that is one of rounding."""
    rounding = _MAX_OWN_EPS * torch.finfo(getattr(torch, DTYPES[case.dtype])).eps
    return rounding + (_TANH * case.softcap if case.softcap else 0.0)


def always_within(case: VerifyCase, name: str) -> float:
    """The error in bf16 or fp16 up to which a result is exact whatever the kernel's own is."""
    if name == "lse":
        return _LSE_LIMIT
    elements = case.heads  # of the sinks
    if name != "dsinks":
        tokens = case.batch * case.seq_len // (case.ulysses * case.ring)
        elements = tokens * case.kv_heads * min(case.head_dim, case.value_dim)
    roundings = _FEW_ROUNDINGS_EPS if elements < _FEW_ELEMENTS else _ROUNDING_EPS
    return roundings * torch.finfo(getattr(torch, DTYPES[case.dtype])).eps


def _exit_code(reports: Sequence[Report]) -> int:
    verdicts = {verdict(report) for report in reports}
    return next((code for code in (WRONG, REFUSED) if code in verdicts), EXACT)


def _as_json(reports: Sequence[Report], ranks: str) -> str:
    """The reports as JSON, with infinite errors as text."""
    content: list[dict[str, Any]] = [
        {**asdict(report), "verdict": _VERDICTS[verdict(report)].lower()} for report in reports
    ]
    result = {"ds_usp": __version__, "ranks": ranks, "cases": content}
    strict = json.loads(json.dumps(result), parse_constant=str)  # JSON itself has no Infinity
    return json.dumps(strict, indent=2, allow_nan=False)


def _as_text(reports: Sequence[Report], ranks: str) -> str:
    """One case's table; of several a summary, tables of inexact ones, and the largest errors."""
    verdicts = [verdict(report) for report in reports]
    lines, counts = [f"ds-usp {__version__}, {ranks}"], ""
    if len(reports) == 1:
        lines += _table(reports[0])
    else:
        lines += [f"all: {_common(reports)}", *_summary(reports)]
        for report, code in zip(reports, verdicts, strict=True):
            if code != EXACT:
                lines += ["", *_table(report)]
        largest = largest_errors(report.errors for report in reports)
        lines += ["", "the largest errors of all calls", *_rows(largest, reports[0].case)]
        names = (f"{verdicts.count(code)} {name}" for code, name in enumerate(_VERDICTS))
        counts = f" ({', '.join(names)})"
    return "\n".join([*lines, "", f"{_VERDICTS[_exit_code(reports)].upper()}{counts}"])


def _common(reports: Sequence[Report]) -> str:
    """The fields that all calls of a sweep share."""
    case = reports[0].case
    return (
        f"{case.batch} x {case.seq_len} tokens, {case.heads} heads ({case.kv_heads} kv) of "
        f"{case.head_dim}, {case.dtype}, kernel {reports[0].kernel}, {case.entry_point}"
    )


def _summary(reports: Sequence[Report]) -> list[str]:
    """One line for each call of a sweep: mesh, layout, mask, verdict and the largest error."""
    names = [(r.case.mesh_name, r.case.layout, r.case.mask_name) for r in reports]
    widths = [max(map(len, column)) for column in zip(*names, strict=True)]
    lines = []
    for report, name in zip(reports, names, strict=True):
        head = "  ".join(word.ljust(width) for word, width in zip(name, widths, strict=True))
        worst = max(report.errors, key=lambda x: x.error, default=None)
        error = "" if worst is None else f"largest error {worst.error:.2e} ({worst.name})"
        lines.append(f"  {head}  {_VERDICTS[verdict(report)]:7}  {error}".rstrip())
    return lines


def _table(report: Report) -> list[str]:
    """The lines of one call: its errors by tensor, or why it was refused."""
    lines = [str(report.case)]
    if report.kernel != report.case.kernel:
        lines.append(f"kernel taken: {report.kernel}")
    if report.refusal is not None:
        return [*lines, f"refused: {report.refusal}"]
    if report.positions is not None:
        lines.append(f"WRONG positions: {report.positions}")
    return lines + _rows(report.errors, report.case)


def _rows(errors: Sequence[TensorErrors], case: VerifyCase) -> list[str]:
    """Lines of a table: each tensor's error, the kernel's alone, their ratio and the limit."""
    lines = [f"  {'tensor':8}{'error':>10}{'kernel alone':>14}{'ratio':>8}  limit"]
    for x in errors:
        ratio = "-" if x.ratio is None or math.isinf(x.ratio) else f"{x.ratio:.2f}"
        limit = _limit(case, x) + ("" if within(case, x) else "  WRONG")
        lines.append(f"  {x.name:8}{x.error:>10.2e}{x.own:>14.2e}{ratio:>8}  {limit}")
    return lines


def _limit(case: VerifyCase, measured: TensorErrors) -> str:
    """The limit as text: absolute for fp64 and fp32, else relative to the kernel's own error."""
    absolute = _ABSOLUTE.get(case.dtype)
    if absolute is not None:
        return f"error <= {absolute:g}"
    either = f"error <= {always_within(case, measured.name):.1e} or ratio <= {_MAX_RATIO:g}"
    return f"{either}; kernel alone <= {max_own_error(case):.1e}"
