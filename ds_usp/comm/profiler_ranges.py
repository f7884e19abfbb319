"""Ranges of exchanges in a profiler's trace: what a GPU's copies and NCCL kernels belong to.

A range is named ``ds_usp.comm/KIND/BYTES``: the ledger's kind and the bytes sent to other ranks.
There are ranges only while a profiler records: callers ask :data:`profiler_enabled` first.
"""

from __future__ import annotations

import contextlib

from torch.autograd import _profiler_enabled as profiler_enabled
from torch.autograd.profiler import record_function

PREFIX = "ds_usp.comm/"
NO_RANGE = contextlib.nullcontext()


def exchange_range(kind: str, sent_bytes: int) -> contextlib.AbstractContextManager[object]:
    """The range of one exchange.

    Args:
        kind: the ledger's, or one of a report's.
        sent_bytes: to other ranks.
    """
    return record_function(f"{PREFIX}{kind}/{sent_bytes}")


__all__ = ["NO_RANGE", "PREFIX", "exchange_range", "profiler_enabled"]
