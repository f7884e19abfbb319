"""What each kind of parallelism sends and holds: table 2 of the USP paper, from our formulas.

arXiv 2405.07719, for a GPT-2-like block of 12 d^2 elements in bf16 on N ranks. Columns are limits
of large N. Ours come out of the formulas of this package; where they differ from the printed ones,
:data:`ERRATA` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_usp.planner.formulas import saved_elements, stage_elements
from ds_usp.planner.memory import states_bytes
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.report import table
from ds_usp.planner.traffic import layer_traffic, step_traffic

RANKS = 64
_WIDTH, _LENGTH = 8192, 65536
ERRATA = (
    "The paper counts elements of parameters once, but those of activations as often as they are "
    "sent (an all-reduce twice): by the second rule parameters cost 24 d^2, ZeRO-3 36 d^2.",
    "SP-Ring is printed as 4: keys and values forward 2 and backward 2. Their gradients are 2 more "
    "(4 where they travel in fp32). Sent straight to those who see them, causal zigzag: 3/4 of it.",
    "Under Unified the ring's volume is divided by the Ulysses degree: the reason to put Ulysses "
    "inside.",
    "ZeRO-1's split is printed as hc/L; it is bs/bs.",
    "DeepSpeed's ZeRO-2 reduces at every micro batch: times m with gradient accumulation.",
    "Ulysses keeps the attention's output twice, before and after the exchange: A/N and a little.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One method.

    Args:
        parameters: sent per step, in d^2 elements.
        activations: sent per layer, in elements of the activation b s d, forward and backward.
        relayed: the same with blocks that go around the ring.
        printed_parameters, printed_activations: what the paper says.
        weights, optimizer: held, as a share of P + G and of 6 P.
        saved: activations held, as a share of A.
    """

    method: str
    parameters: float
    activations: float
    relayed: float
    printed_parameters: str
    printed_activations: str
    weights: float
    optimizer: float
    saved: float


def rows(ranks: int = RANKS) -> list[Row]:
    """All methods of the table on so many ranks."""
    n, side = ranks, round(ranks**0.5)
    both = {"ulysses": side, "ring": ranks // side}
    plain, shared = {"zero": 0}, {"zero": 1}
    return [
        _row("SP-Ulysses", "12", f"8/N = {8 / n:.3g}", ulysses=n, **plain),
        _row("SP-Ring", "12", "4", ring=n, **plain),
        _row("DP", "12", "0", dp=n, **plain),
        _row("ZeRO-1", "12", "0", dp=n, **shared),
        _row("SP-Unified + ZeRO-1", "12", "<= 4", **both, **shared),
        _row("SP-Unified + ZeRO-2", "12", "<= 4", **both, zero=2),
        _row("SP-Unified + ZeRO-3", "18", "<= 4", **both, zero=3),
        _row("TP", "0", "8", tp=n, tp_sequence=0, **plain),
        _row("TP-sp", "0", "10", tp=n, **plain),
    ]


def _row(method: str, printed_parameters: str, printed_activations: str, **degrees: int) -> Row:
    heads = _WIDTH // 2  # as many as there may be ranks
    shape = ModelShape("block", 1, _WIDTH, 4 * _WIDTH, heads, heads, 128, gated=False)
    options = {**degrees, "tp_sequence": bool(degrees.get("tp_sequence", 1))}
    config = ParallelConfig(**options, grad_bytes=2)  # type: ignore[arg-type]
    work = Workload(shape, _LENGTH, config.dp)
    activation, square = 2.0 * _LENGTH * _WIDTH, 2.0 * _WIDTH**2
    block = shape.matrix_elements
    step = step_traffic(work, config)
    # Of the parameters that a rank sends, those of the block: the rest is embedding and head.
    ours = block / config.tp / max(_held(work, config), 1)
    weights, gradients, optimizer = states_bytes(block / config.tp, config)
    saved = 1 / config.sp / config.dp
    if config.tp > 1:
        saved = 1 / config.tp if config.tp_sequence else _alpha(shape, config)
    return Row(
        method,
        step.total * ours / square,
        _sent(work, config, False) / activation,
        _sent(work, config, True) / activation,
        printed_parameters,
        printed_activations,
        (weights + gradients) / (4 * block),
        optimizer / (12 * block),
        saved,
    )


def _held(work: Workload, config: ParallelConfig) -> int:
    return stage_elements(work, config, 0)


def _sent(work: Workload, config: ParallelConfig, relayed: bool) -> float:
    traffic = layer_traffic(work, config, relayed)
    ring = traffic.ring_forward + traffic.ring_backward
    return traffic.tp_forward + traffic.tp_backward + 2 * traffic.ulysses + ring


def _alpha(shape: ModelShape, config: ParallelConfig) -> float:
    """The share of activations that plain tensor parallelism leaves: norms are not cut."""
    cut, whole = saved_elements(shape, config)
    return (cut / config.tp + whole) / (cut + whole)


def text(found: Sequence[Row]) -> str:
    """The table and the errata."""
    head = (
        f"on {RANKS} ranks",
        "params d^2",
        "(paper)",
        "act b s d",
        "relayed",
        "(paper)",
        "P+G",
        "6P",
        "A",
    )
    lines = [
        (
            row.method,
            f"{row.parameters:.1f}",
            row.printed_parameters,
            f"{row.activations:.3g}",
            f"{row.relayed:.3g}",
            row.printed_activations,
            *(f"{share:.3g}" for share in (row.weights, row.optimizer, row.saved)),
        )
        for row in found
    ]
    notes = [f"{number}. {note}" for number, note in enumerate(ERRATA, 1)]
    return "\n".join([table(head, lines), "", *notes])


def as_json(found: Sequence[Row]) -> list[dict[str, object]]:
    """The table for programs."""
    return [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in found]
