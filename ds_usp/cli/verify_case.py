"""The configurations of attention that ``ds-usp verify`` runs, and their flags."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import Degrees, divisors
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, KINDS, ORDERS
from ds_usp.planner.arguments import OneLineParser, positive, tokens

ENTRY_POINTS = ("usp_attention", "USPAttention")
DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
)
_MAX_FORKED = 16  # ranks on CPUs: more take long and test nothing else
_DEGREES: Mapping[str, str] = MappingProxyType(
    {
        "sp": "the {} ranks that torchrun started",
        "ulysses": "--ulysses",
        "ring": "--ring",
    }
)
_NOT_OF_A_CASE = ("seed", "device", "json")


@dataclass(frozen=True)
class VerifyCase:
    """One call, forward and backward, on one mesh; see the flags for what the fields mean."""

    ulysses: int = 2
    ring: int = 2
    order: str = DEFAULT_SP_ORDER
    batch: int = 1
    seq_len: int = 1024
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    value_dim: int = 64
    dtype: str = "fp32"
    layout: str = "zigzag"
    mask: tuple[int | None, int | None, int] = (None, 0, 0)
    documents: tuple[tuple[int, ...], ...] = ()
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    kernel: str = "auto"
    entry_point: str = ENTRY_POINTS[0]
    backward: bool = True
    seed: int = 0

    @property
    def borders(self) -> tuple[tuple[int, ...], ...]:
        """Cumulative borders of the documents, as the package takes them."""
        return tuple((0, *accumulate(lengths)) for lengths in self.documents)

    @property
    def mask_name(self) -> str:
        """The mask as the flag spells it."""
        left, right, prefix = self.mask
        if prefix:
            return f"prefix:{prefix}"
        if left is None:
            return "causal" if right == 0 else "full"
        return f"window:{left}" + (f",{right}" if right else "")

    @property
    def mesh_name(self) -> str:
        """The mesh's degrees and, unless the default, their order, as text."""
        order = "" if self.order == DEFAULT_SP_ORDER else f" ({self.order})"
        return f"ulysses {self.ulysses} x ring {self.ring}{order}"

    @property
    def short_name(self) -> str:
        """Degrees, layout and mask."""
        return f"{self.mesh_name}, {self.layout}, {self.mask_name}"

    def __str__(self) -> str:
        count = sum(map(len, self.documents))
        values = "" if self.value_dim == self.head_dim else f" (values {self.value_dim})"
        extras = [
            f"{count} documents" if count else "",
            f"softcap {self.softcap:g}" if self.softcap is not None else "",
            "ALiBi" if self.alibi else "",
            "sinks" if self.sinks else "",
        ]
        parts = [
            self.short_name,
            *filter(None, extras),
            f"{self.batch} x {self.seq_len} tokens",
            f"{self.heads} heads ({self.kv_heads} kv) of {self.head_dim}{values}",
            self.dtype,
            f"kernel {self.kernel}",
            self.entry_point,
            "forward and backward" if self.backward else "forward only",
        ]
        return ", ".join(parts)


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
    add("--alibi", action="store_true", help="ALiBi, with its paper's slopes")
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
    """Refuse combinations of flags that no call could have.

    Raises:
        ConfigError: score options with the drop-in module, or documents of other lengths or
            counts.
    """
    for flag in ("softcap", "alibi", "sinks"):
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
    """Ulysses and ring degree, whose product is the world."""
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
    sizes: dict[str, Any]
    if gpu:
        heads = max(8, world)
        sizes = {"seq_len": 4100, "heads": heads, "head_dim": 128, "value_dim": 128}
        kv_heads, dtype, window = heads // 4, "bf16", (1000, 0, 0)
    else:
        sizes = {"seq_len": 130, "heads": 8, "head_dim": 16, "value_dim": 16}
        kv_heads, dtype, window = 2, "fp32", (37, 0, 0)
    if sizes["heads"] % kv_heads:
        kv_heads = sizes["heads"]
    base = VerifyCase(**sizes, kv_heads=kv_heads, dtype=dtype, seed=seed)
    return [
        replace(base, ulysses=ulysses, ring=world // ulysses, layout=layout, mask=mask)
        for ulysses in reversed(divisors(world))
        if ulysses <= base.heads
        for layout in ("contiguous", "zigzag")
        for mask in ((None, 0, 0), (None, None, 0), window)
    ]
