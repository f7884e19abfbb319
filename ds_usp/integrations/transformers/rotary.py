"""Rotary embeddings whose frequencies depend on the largest position of a batch.

``dynamic`` and ``longrope`` (and PhiMoE's own scaling) choose their frequencies by the largest
position they are given. A shard has another one than the sequence, so each rank would choose for
itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from ds_usp.errors import UnsupportedAttentionError

_STATIC = "default"


class LargestPosition:
    """Shows the largest position of the whole batch to the rotary modules that scale.

    Attributes:
        value: the largest position of the forward pass that runs.
        handles: hooks, to be removed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.value: Tensor | int = 0
        self.handles: list[RemovableHandle] = []
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
            if any(isinstance(kind, str) and kind != _STATIC for kind in kinds):
                self.handles += [
                    module.register_forward_pre_hook(self._append, with_kwargs=True),
                    module.register_forward_hook(self._drop),
                ]

    def _append(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add a token at the largest position."""
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": self._extended(kwargs["position_ids"])}
        if len(args) < 2:
            raise UnsupportedAttentionError(
                f"{type(module).__name__} is given no position_ids, which its frequencies depend on"
            )
        return (args[0], self._extended(args[1]), *args[2:]), kwargs

    def _extended(self, positions: Tensor) -> Tensor:
        longer = pad(positions, (0, 1))
        longer[..., -1] = self.value
        return longer

    def _drop(self, _: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        """Take that token off cos and sin, ``[..., s_local + 1, d]``."""
        return tuple(x[..., :-1, :] for x in out) if isinstance(out, tuple) else out[..., :-1, :]
