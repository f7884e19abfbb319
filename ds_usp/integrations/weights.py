"""A sample of a model's weights, which ranks compare: they must be replicas of each other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_ELEMENTS = 8  # of each weight: another seed or checkpoint changes nearly all of them


class WeightsComparison:
    """Weights among the arguments that ranks compare, until one forward pass has succeeded.

    The pass after one that failed compares them again. If it failed on one rank only, ranks then
    differ in what they compare: all raise an error, and in the pass after it all compare.

    Args:
        needed: there are several ranks.
    """

    def __init__(self, needed: bool) -> None:
        self._needed, self._is_done = needed, False

    def of(self, module: nn.Module) -> dict[str, Tensor]:
        """What the forward pass that begins compares besides its arguments."""
        is_done, self._is_done = self._is_done, False
        if is_done or not self._needed:
            return {}
        what = f"weights ({_ELEMENTS} elements of each; load one checkpoint or seed alike)"
        return {f"{what} in {name}": x for name, x in sample_of_weights(module).items()}

    def end(self) -> None:
        """After a comparison that no rank has refused."""
        self._is_done = True


def sample_of_weights(module: nn.Module) -> dict[str, Tensor]:
    """A few elements of each weight and persistent buffer that a rank holds whole: of the middle
    and the last row, where a table that was enlarged has its new ones, evenly spaced.

    Weights that FSDP, ZeRO-3 or tensor parallelism shards and DeepSpeed's experts are left out, as
    are those of other tensor classes and those without values: ranks hold different parts, or
    nothing can be read.

    Returns:
        By dtype one tensor, in the order of the weights, on the device of the first.
    """
    samples: dict[torch.dtype, list[Tensor]] = {}
    for weight in _weights(module):
        of_dtype = samples.setdefault(weight.dtype, [])
        for row in _rows(weight.detach()):
            of_dtype.append(row if not of_dtype else row.to(of_dtype[0].device))
    return {
        str(dtype).removeprefix("torch."): torch.cat(rows)
        for dtype, rows in samples.items()
        if rows
    }


def _rows(weight: Tensor) -> list[Tensor]:
    """Of a matrix and of what has more dims two rows, each with half of the elements."""
    if weight.ndim < 2:
        return [_spaced(weight.reshape(-1), _ELEMENTS)]
    middle = last = weight
    while middle.ndim > 1:
        middle, last = middle[len(middle) // 2], last[-1]
    return [_spaced(row, _ELEMENTS // 2) for row in (middle, last)]


def _spaced(row: Tensor, count: int) -> Tensor:
    return row[:: max(1, len(row) // count)][:count]


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from filter(_is_whole, module.parameters())
    for inner in module.modules():
        kept = set(inner._buffers) - inner._non_persistent_buffers_set
        buffers = (inner._buffers[name] for name in sorted(kept))
        yield from (x for x in buffers if x is not None and _is_whole(x))


def _is_whole(weight: Tensor) -> bool:
    if hasattr(weight, "ds_id") or hasattr(weight, "_fsdp_flattened"):
        return False
    if not getattr(weight, "allreduce", True):  # as DeepSpeed marks experts
        return False
    plain = type(weight.data) is Tensor and not nn.parameter.is_lazy(weight)
    readable = plain and weight.layout is torch.strided and weight.device.type != "meta"
    return readable and weight.numel() > 0
