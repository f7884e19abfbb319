"""``USPAttention`` with DeepSpeed's constructor and nothing more, its degrees given beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ds_usp


def bound_attention(**settings: Any) -> type[ds_usp.USPAttention]:
    """A class to stand in the place of ``deepspeed.sequence.layer.DistributedAttention``.

    Args:
        settings: the keywords of ``USPAttention`` that DeepSpeed's class does not have.
    """

    class DistributedAttention(ds_usp.USPAttention):
        """Attention over a sequence that is spread over ranks; see ``ds_usp.USPAttention``."""

        def __init__(
            self,
            local_attention: Callable[..., torch.Tensor],
            sequence_process_group: dist.ProcessGroup | None,
            scatter_idx: int = 2,
            gather_idx: int | None = None,
            sp_stream: Any = None,
            num_kv_heads: int | None = None,
        ) -> None:
            super().__init__(
                local_attention,
                sequence_process_group,
                scatter_idx,
                gather_idx,
                sp_stream,
                num_kv_heads,
                **settings,
            )

    return DistributedAttention
