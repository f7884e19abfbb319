"""Problem sizes of the measurements: as in training on a GPU, small on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_usp.profiling.step_timer import StepTimer


@dataclass(frozen=True)
class ProblemSizes:
    """Sizes of everything that is measured.

    Args:
        dtype: of all tensors.
        width: features of a linear layer, in and out.
        product_tokens: rows that it multiplies.
        heads, head_dim: of attention, as many for keys.
        lengths: sequence lengths of attention on one rank, and on a mesh; no powers of 2, so that
            real runs are not among them.
        layer_tokens: tokens of a rank in a transformer layer.
        memory_elements: of a tensor that fills no cache.
        exchange_bytes: that a rank sends.
        max_s: for the repeats of one measurement.
        sustained_s: for repeats of attention and layers: a GPU under continuous load runs slower
            after a tenth of a second than at first.
        models: whose layers are measured unless others are named. None on a CPU, where one layer of
            a model that anybody trains takes seconds.
    """

    dtype: torch.dtype
    width: int
    product_tokens: tuple[int, ...]
    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    layer_tokens: tuple[int, ...]
    memory_elements: int
    exchange_bytes: tuple[int, ...]
    max_s: float
    sustained_s: float
    models: tuple[str, ...]

    @classmethod
    def of(cls, device: torch.device) -> ProblemSizes:
        """The sizes for a kind of device."""
        return _ON_GPU if device.type == "cuda" else _ON_CPU

    def random(self, timer: StepTimer, *shape: int) -> torch.Tensor:
        """A normal tensor: products of zeros draw less power and run faster."""
        return torch.randn(shape, dtype=self.dtype, device=timer.device)


_ON_GPU = ProblemSizes(
    dtype=torch.bfloat16,
    width=4096,
    product_tokens=(256, 1024, 4096, 16384, 32768),
    heads=16,
    head_dim=128,
    lengths=(6144, 12288, 40960, 122880),
    layer_tokens=(3072, 12288, 40960),
    memory_elements=2**28,
    exchange_bytes=(2**16, 2**20, 2**23, 2**26, 2**28),
    max_s=0.25,
    sustained_s=0.6,
    models=("gpt-1.3b", "llama3-8b"),
)
_ON_CPU = ProblemSizes(
    dtype=torch.float32,
    width=256,
    product_tokens=(64, 256, 1024),
    heads=4,
    head_dim=32,
    lengths=(96, 192, 384),
    layer_tokens=(48, 192),
    memory_elements=2**22,
    exchange_bytes=(2**10, 2**14, 2**18, 2**20),
    max_s=0.02,
    sustained_s=0.02,
    models=(),
)
