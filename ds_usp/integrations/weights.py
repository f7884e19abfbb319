"""A sample of a model's weights, by which ranks see that they are replicas of each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ELEMENTS = 8  # of each weight: another seed or checkpoint changes all of them


class WeightsComparison:
    """The weights among the arguments that ranks compare, until a forward pass has begun.

    Later passes compare nothing: weights that were equal stay so where gradients are averaged.
    """

    def __init__(self) -> None:
        self._is_done = False

    def of(self, module: nn.Module) -> dict[str, Tensor]:
        """What the forward pass that begins compares besides its arguments."""
        samples = {} if self._is_done else sample_of_weights(module)
        return {f"weights (of one checkpoint or seed) {name}": x for name, x in samples.items()}

    def end(self) -> None:
        """After a comparison that no rank has refused."""
        self._is_done = True


def sample_of_weights(module: nn.Module) -> dict[str, Tensor]:
    """A few elements of each weight that a rank holds whole, evenly spaced in its middle row.

    Weights that FSDP, ZeRO-3 or tensor parallelism shards and DeepSpeed's experts are left out, as
    are those of other tensor classes and those without values: ranks hold different parts, or
    nothing can be read.

    Returns:
        One tensor for each dtype and device.
    """
    samples: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in module.parameters():
        if not _is_whole(parameter):
            continue
        row = parameter.detach()
        while row.ndim > 1:
            row = row[len(row) // 2]
        row = row.reshape(-1)
        samples.setdefault((row.dtype, row.device), []).append(
            row[:: max(1, len(row) // _ELEMENTS)][:_ELEMENTS]
        )
    return {
        f"{str(dtype).removeprefix('torch.')} {device.type}": torch.cat(of_kind)
        for (dtype, device), of_kind in samples.items()
    }


def _is_whole(parameter: nn.Parameter) -> bool:
    sharded = hasattr(parameter, "ds_id") or hasattr(parameter, "_fsdp_flattened")
    is_expert = not getattr(parameter, "allreduce", True)  # as DeepSpeed marks them
    plain = type(parameter.data) is Tensor and parameter.device.type != "meta"
    return plain and not sharded and not is_expert and parameter.numel() > 0
