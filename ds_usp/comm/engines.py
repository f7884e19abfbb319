"""What is done with all copy engines of a mesh at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from threading import Thread

from ds_usp.comm.copy_engine import CopyEngine

_ABORT_TIMEOUT_S = 60.0  # for streams that wait for something else after an error


def num_exchanges(engines: Mapping[str, CopyEngine]) -> int:
    """Exchanges that copy engines have begun."""
    return sum([engine.exchanges for engine in engines.values()])


def abort_waits(engines: Mapping[str, CopyEngine]) -> None:
    """End whatever this rank's streams wait for, and go on with it: each exchange that was begun
    waits anew, when what comes before it is done. A process that ends meanwhile waits for it, a
    minute at most."""
    if engines:
        Thread(target=_abort_until_idle, args=(list(engines.values()),)).start()


def _abort_until_idle(engines: Sequence[CopyEngine]) -> None:
    until = time.monotonic() + _ABORT_TIMEOUT_S
    with contextlib.suppress(RuntimeError):  # the GPU is lost
        while [engine for engine in engines if engine.abort_waits()] and time.monotonic() < until:
            time.sleep(0.001)
