"""Digests of tensors and arguments, by which ranks compare what they hold and were given:
``model_comparison.py`` and ``replicas.py`` make them in each pass, and send the texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_usp.comm.consistency import INTEGERS

_CHUNK = 2**22  # elements


def _sum_of_bits(x: Tensor) -> Tensor:
    """The weighted sum of a tensor's elements, read as integers: int64, 0-D, on its device."""
    # Sums of integers wrap around: exact in any order, so that unlike GPUs agree. In pieces, as an
    # element takes 24 bytes meanwhile: a whole video took more memory than its encoding in tiles.
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    sums = []
    values = x.detach().reshape(-1)
    if values.stride(0) != 1:  # a time step that is expanded to a batch of one
        values = values.clone(memory_format=torch.contiguous_format)
    pieces = values.view(INTEGERS[min(x.element_size(), 4)]).split(_CHUNK)
    for number, piece in enumerate(pieces):
        index = torch.arange(1, 1 + len(piece), device=x.device) + number * _CHUNK
        weights = index * 0x1E3779B97F4A7C15
        weights = (weights ^ (weights >> 29)) | 1  # unlike neighbours: swapped tokens show
        sums.append((piece.long() * weights).sum())
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def digest_of_bits(x: Tensor) -> str:
    """A text that differs where any element of a tensor does; waits for a GPU."""
    return f"elements with the digest {int(_sum_of_bits(x)) % 2**64:016x}"


class ArgumentsDigest:
    """Tells the arguments of forward passes apart: tensors by shape, dtype and a sum of their
    elements (none on ``meta``), arrays of numpy, numbers and texts by their values, in mappings,
    lists and tuples too; other objects are left out."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._tensors: dict[str, tuple[tuple[int, ...], torch.dtype, torch.device]] = {}
        plain: list[str] = []
        sums: dict[torch.device, list[Tensor]] = {}
        for name, x in flat("", arguments):
            if isinstance(x, Tensor):
                self._tensors[name] = tuple(x.shape), x.dtype, x.device
                sums.setdefault(x.device, []).append(_sum_of_bits(x))
            elif hasattr(x, "tolist"):  # numpy's
                plain.append(f"{name} {x.tolist()}")
            elif isinstance(x, (int, float, str)):
                plain.append(f"{name} {x}")
        self._plain = ", ".join(plain)
        # From a GPU to pinned memory, behind the work of its stream: the host goes on.
        self._sums = {
            device: torch.stack(each).to("cpu", non_blocking=device.type == "cuda")
            for device, each in sums.items()
            if device.type != "meta"
        }
        self._copied = {
            device: torch.cuda.current_stream(device).record_event()
            for device in self._sums
            if device.type == "cuda"
        }

    @property
    def is_known(self) -> bool:
        """Whether :meth:`text` need not wait for a GPU."""
        return not self._copied

    def text(self, values: bool = True) -> str:
        """A text that differs where arguments do; ``values``, sums of tensors, wait for a GPU."""
        texts = {
            name: f"{name} {shape} {str(dtype).removeprefix('torch.')}"
            for name, (shape, dtype, _) in self._tensors.items()
        }
        if values:
            for event in self._copied.values():
                event.synchronize()
            numbers = {device: iter(sums.tolist()) for device, sums in self._sums.items()}
            for name, (_, _, device) in self._tensors.items():
                texts[name] += f" {next(numbers.get(device, iter([0]))):x}"
        return "; ".join((", ".join(texts.values()), self._plain))


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values in nested mappings, lists and tuples, each with its path (``batch.0.mask``)."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from flat(f"{name}.{index}", inner)
    else:
        yield name, value
