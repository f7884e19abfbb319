"""``ds-usp verify``: attention as the user configures it, here, against a dense reference.

A result is exact if its relative error is within the limit of its dtype: an absolute one in fp64
and fp32; in bf16 and fp16 a multiple of the error of the same kernel run dense on one device,
which itself must be a rounding error. Errors of one rounding of the result are exact there too.
"""

from __future__ import annotations

import json
import math
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ds_usp._version import __version__
from ds_usp.cli.verify_run import (
    DTYPES,
    ENTRY_POINTS,
    RankError,
    RankMemory,
    Report,
    TensorErrors,
    VerifyCase,
    largest_errors,
    run_cases,
    run_forked,
    run_launched,
)
from ds_usp.config import environment, free_memory, torchrun_env
from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import Degrees, divisors
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, KINDS, ORDERS
from ds_usp.planner.arguments import OneLineParser, positive, tokens
from ds_usp.planner.search import GIB

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
_MAX_FORKED = 16  # ranks on CPUs: more take long and test nothing else
_DEGREES: Mapping[str, str] = MappingProxyType(
    {"sp": "the {} ranks that torchrun started", "ulysses": "--ulysses", "ring": "--ring"}
)
_NOT_OF_A_CASE = ("seed", "device", "json")


def main(argv: Sequence[str], print_line: Callable[..., None]) -> int:
    """Run ``ds-usp verify``; rank 0 alone prints.

    Returns:
        0 if all results are exact, 1 if one is wrong or a rank failed, 2 if a call was refused.

    Raises:
        ConfigError: arguments that cannot be run.
    """
    args = build_parser().parse(argv)
    env = torchrun_env()
    started = "RANK" in environment(("RANK",))  # by torchrun: the ranks exist, else they are forked
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
    local_ranks = env.local_world if started else cases[0].ulysses * cases[0].ring
    free_gpu = torch.cuda.mem_get_info(env.local_rank)[0] if cuda else None
    for case in cases:
        check_memory(case, local_ranks, free_memory(), free_gpu)

    def progress(line: str) -> None:
        if env.rank == 0:
            print_line(line, progress=True)

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


def _mask(text: str) -> tuple[int | None, int | None, int]:
    """``(left, right, prefix)`` of causal | full | window:LEFT | window:LEFT,RIGHT | prefix:N."""
    name, _, numbers = text.partition(":")
    if text in ("causal", "full"):
        return None, 0 if text == "causal" else None, 0
    try:
        sizes = [0 if number == "0" else tokens(number) for number in numbers.split(",")]
    except ArgumentTypeError:
        sizes = []
    if name == "window" and len(sizes) in (1, 2):
        return sizes[0], sizes[1] if len(sizes) == 2 else 0, 0
    if name == "prefix" and len(sizes) == 1:
        return None, 0, sizes[0]
    raise ArgumentTypeError(
        f"{text!r} must be causal, full, window:LEFT, window:LEFT,RIGHT or prefix:N, in tokens"
    )


def _documents(text: str) -> tuple[tuple[int, ...], ...]:
    """Lengths of packed documents, with commas; with slashes those of each sample."""
    return tuple(
        tuple(tokens(length) for length in sample.split(",")) for sample in text.split("/")
    )


def build_parser() -> OneLineParser:
    """The command line of ``ds-usp verify``."""
    text = (
        "Runs attention over ranks, forward and backward, and compares every result with dense "
        "attention in fp64. Started plainly it forks ranks on the CPUs (gloo); under torchrun it "
        "runs on the ranks of the launch, one GPU each (NCCL). Without a flag that configures "
        "a call, a sweep over layouts, masks and degrees. Exit code: 0 exact, 1 wrong, 2 refused."
    )
    # Flags that are left out are not in the namespace: the defaults are VerifyCase's.
    parser = OneLineParser(
        prog="ds-usp verify", description=text, allow_abbrev=False, argument_default=SUPPRESS
    )
    add = parser.add_argument
    add("--ulysses", type=positive, help="ranks that exchange heads (default: see --ring)")
    ring = "ranks of a ring (default: what --ulysses leaves of torchrun's ranks; else 1 beside a"
    add("--ring", type=positive, help=f"{ring} given --ulysses, and 2 x 2 with neither)")
    add("--order", choices=ORDERS, help=f"whose ranks are neighbours (default: {DEFAULT_SP_ORDER})")
    add("--heads", type=positive, help="query heads (default: 8)")
    add("--kv-heads", type=positive, help="key/value heads (default: as many as query heads)")
    add("--head-dim", type=positive, help="of queries and keys (default: 64)")
    add("--value-dim", type=positive, help="of values (default: the head dim)")
    add("--batch", type=positive, help="samples (default: 1, or as many as --documents has)")
    length = "tokens: 4096, 4K, 1M (default: 1K, or the sum of --documents)"
    add("--seq-len", type=tokens, help=length)
    add("--dtype", choices=DTYPES, help="default: fp32 on CPUs, bf16 on GPUs")
    add("--layout", choices=KINDS, help="which rank holds which token (default: zigzag)")
    masks = "causal, full, window:LEFT, window:LEFT,RIGHT or prefix:N, in tokens (default: causal)"
    add("--mask", type=_mask, help=masks)
    packed = "lengths of packed documents, with commas; of each sample, with slashes"
    add("--documents", type=_documents, help=f"{packed} (default: one document)")
    add("--softcap", type=float, help="of the scores (default: none)")
    add("--sinks", action="store_true", help="a trainable attention sink for each head")
    add("--kernel", help="name of a kernel, `ds-usp env` lists them (default: auto)")
    add(
        "--entry-point",
        choices=ENTRY_POINTS,
        help="function or drop-in module (default: usp_attention)",
    )
    passes = parser.add_mutually_exclusive_group()
    passes.add_argument("--backward", action="store_true", help="gradients too (the default)")
    passes.add_argument(
        "--forward-only", action="store_false", dest="backward", help="no gradients"
    )
    add("--seed", type=int, default=0, help="of the random tensors (default: 0)")
    devices = "auto: GPUs under torchrun if there are any, CPUs else (default: auto)"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=devices)
    add("--json", action="store_true", default=False, help="print JSON, for programs")
    return parser


def cases_of(args: Namespace, world: int | None, gpu: bool) -> list[VerifyCase]:
    """The configuration of the flags, or the sweep where they configure none.

    Args:
        world: ranks that a launcher started; None: as many as are needed are forked.

    Raises:
        ConfigError: degrees that do not make the ranks, documents of another length or number.
    """
    flags = {name: value for name, value in vars(args).items() if name not in _NOT_OF_A_CASE}
    if not flags:
        return _sweep(world or 4, gpu, args.seed)
    flags["ulysses"], flags["ring"] = _degrees(flags, world)
    documents = flags.get("documents", ())
    defaults = {
        "dtype": "bf16" if gpu else "fp32",
        "kv_heads": flags.get("heads", VerifyCase.heads),
        "value_dim": flags.get("head_dim", VerifyCase.head_dim),
        "batch": max(1, len(documents)),
        "seq_len": sum(documents[0]) if documents else VerifyCase.seq_len,
    }
    case = VerifyCase(**{**defaults, **flags}, seed=args.seed)
    _check(case)
    return [case]


def _check(case: VerifyCase) -> None:
    for flag in ("softcap", "sinks"):
        value = getattr(case, flag)
        if value is not None and value is not False and case.entry_point != ENTRY_POINTS[0]:
            raise ConfigError(
                f"--{flag} is an argument of usp_attention; USPAttention reads it from its local "
                "attention. Use --entry-point usp_attention"
            )
    for lengths in case.documents:
        if sum(lengths) != case.seq_len:
            raise ConfigError(
                f"--documents {','.join(map(str, lengths))} are {sum(lengths)} tokens, --seq-len "
                f"is {case.seq_len}: make them equal"
            )
    if len(case.documents) not in (0, 1, case.batch):
        raise ConfigError(
            f"--documents are given for {len(case.documents)} samples, --batch is {case.batch}: "
            "leave --batch out, or give one list for all samples"
        )


def _degrees(flags: Mapping[str, int], world: int | None) -> tuple[int, int]:
    ulysses, ring = flags.get("ulysses"), flags.get("ring")
    if world is None:
        default = 2 if ulysses is None and ring is None else 1
        ulysses, ring = ulysses or default, ring or default
        if ulysses * ring > _MAX_FORKED:
            raise ConfigError(
                f"--ulysses {ulysses} x --ring {ring} = {ulysses * ring} ranks; a plain start "
                f"forks at most {_MAX_FORKED}. Start {ulysses * ring} with torchrun, or use "
                "smaller degrees"
            )
        return ulysses, ring
    Degrees(sp=world, ulysses=ulysses, ring=ring).check(_DEGREES)
    if ulysses is None:
        ulysses = world // ring if ring else 2 - world % 2
    return ulysses, world // ulysses


def _sweep(world: int, gpu: bool, seed: int) -> list[VerifyCase]:
    """Every ulysses x ring of the ranks, with layouts and masks; a length that does not divide."""
    heads = max(8, world) if gpu else 8
    seq_len, dim, window, dtype = (4100, 128, 1000, "bf16") if gpu else (130, 16, 37, "fp32")
    base = VerifyCase(
        seq_len=seq_len,
        heads=heads,
        kv_heads=heads if heads % (heads // 4) else heads // 4,
        head_dim=dim,
        value_dim=dim,
        dtype=dtype,
        seed=seed,
    )
    return [
        replace(base, ulysses=ulysses, ring=world // ulysses, layout=layout, mask=mask)
        for ulysses in reversed(divisors(world))
        if ulysses <= base.heads
        for layout in ("contiguous", "zigzag")
        for mask in ((None, 0, 0), (None, None, 0), (window, 0, 0))
    ]


def check_memory(case: VerifyCase, local_ranks: int, host: float, gpu: float | None) -> None:
    """ConfigError for a case that does not fit, with the numbers and the length that does.

    Args:
        local_ranks: of this node.
        host, gpu: free bytes of its host memory, and of this rank's GPU; None: it has none.
    """

    def lacking(case: VerifyCase) -> str:
        needs = RankMemory.of(case, "cpu" if gpu is None else "cuda")
        on_host = local_ranks * (needs.device + needs.host if gpu is None else needs.host)
        if gpu is not None and needs.device > gpu:
            return f"{needs.device / GIB:.1f} GiB of a GPU, of which {gpu / GIB:.1f} GiB are free"
        if on_host > host:
            return (
                f"{local_ranks} ranks x {on_host / local_ranks / GIB:.1f} GiB = "
                f"{on_host / GIB:.1f} GiB of host memory, of which {host / GIB:.1f} GiB are free"
            )
        return ""

    reason = lacking(case)
    if not reason:
        return
    length = case.seq_len
    while length > 1 and lacking(replace(case, seq_len=length)):
        length = int(0.9 * length)
    length = length // 256 * 256 or length
    use = "fewer ranks or --heads"
    if length > 1:
        flag = "--documents of" if case.documents else "--seq-len"
        use = f"{flag} {length} {'tokens ' if case.documents else ''}or less, {use}"
    raise ConfigError(
        f"{case.short_name}, {case.batch} x {case.seq_len} tokens, {case.heads} heads of "
        f"{case.head_dim}, {case.dtype}: every rank keeps the whole tensors for the comparison, "
        f"which takes {reason}. Use {use}"
    )


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
    rounding = _MAX_OWN_EPS * torch.finfo(DTYPES[case.dtype]).eps
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
    return roundings * torch.finfo(DTYPES[case.dtype]).eps


def _exit_code(reports: Sequence[Report]) -> int:
    verdicts = {verdict(report) for report in reports}
    return next((code for code in (WRONG, REFUSED) if code in verdicts), EXACT)


def _as_json(reports: Sequence[Report], ranks: str) -> str:
    """The reports as JSON, with infinite errors as text."""
    content: list[dict[str, Any]] = [
        {**asdict(report), "verdict": _VERDICTS[verdict(report)].lower()} for report in reports
    ]
    result = {"ds_usp": __version__, "ranks": ranks, "cases": content}
    strict = json.loads(json.dumps(result), parse_constant=str)  # JSON has no Infinity
    return json.dumps(strict, indent=2, allow_nan=False)


def _as_text(reports: Sequence[Report], ranks: str) -> str:
    """One case's table; of several a summary, tables of inexact ones, and the largest errors."""
    verdicts = [verdict(report) for report in reports]
    lines, counts = [f"ds-usp {__version__}, {ranks}"], ""
    if len(reports) == 1:
        lines += _table(reports[0])
    else:
        case = reports[0].case
        lines.append(
            f"all: {case.batch} x {case.seq_len} tokens, {case.heads} heads ({case.kv_heads} kv) "
            f"of {case.head_dim}, {case.dtype}, kernel {reports[0].kernel}, {case.entry_point}"
        )
        lines += _summary(reports)
        for report, code in zip(reports, verdicts, strict=True):
            if code != EXACT:
                lines += ["", *_table(report)]
        largest = largest_errors(report.errors for report in reports)
        lines += ["", "the largest errors of all calls", *_rows(largest, case)]
        names = (f"{verdicts.count(code)} {name}" for code, name in enumerate(_VERDICTS))
        counts = f" ({', '.join(names)})"
    return "\n".join([*lines, "", f"{_VERDICTS[_exit_code(reports)].upper()}{counts}"])


def _summary(reports: Sequence[Report]) -> list[str]:
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
    lines = [str(report.case)]
    if report.kernel != report.case.kernel:
        lines.append(f"kernel taken: {report.kernel}")
    if report.refusal is not None:
        return [*lines, f"refused: {report.refusal}"]
    if report.positions is not None:
        lines.append(f"WRONG positions: {report.positions}")
    return lines + _rows(report.errors, report.case)


def _rows(errors: Sequence[TensorErrors], case: VerifyCase) -> list[str]:
    lines = [f"  {'tensor':8}{'error':>10}{'kernel alone':>14}{'ratio':>8}  limit"]
    for x in errors:
        ratio = "-" if x.ratio is None or math.isinf(x.ratio) else f"{x.ratio:.2f}"
        limit = _limit(case, x) + ("" if within(case, x) else "  WRONG")
        lines.append(f"  {x.name:8}{x.error:>10.2e}{x.own:>14.2e}{ratio:>8}  {limit}")
    return lines


def _limit(case: VerifyCase, measured: TensorErrors) -> str:
    absolute = _ABSOLUTE.get(case.dtype)
    if absolute is not None:
        return f"error <= {absolute:g}"
    either = f"error <= {always_within(case, measured.name):.1e} or ratio <= {_MAX_RATIO:g}"
    return f"{either}; kernel alone <= {max_own_error(case):.1e}"
