"""States of torch's default random generators, which any code may draw from."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RandomState(NamedTuple):
    """States of the CPU's generator and of one GPU's."""

    device: torch.device
    cpu: torch.Tensor
    gpu: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """The current states; the CPU knows both, nothing waits for the GPU."""
        gpu = None
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            gpu = torch.cuda.get_rng_state(device)
        return cls(device, torch.get_rng_state(), gpu)

    def is_unchanged(self) -> bool:
        """Whether no random numbers were drawn since."""
        current = RandomState.capture(self.device)
        same = self.gpu is None or current.gpu is None or torch.equal(self.gpu, current.gpu)
        return same and torch.equal(self.cpu, current.cpu)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)
