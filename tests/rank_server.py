"""A process that has imported a framework once, and forks a fresh world for every request.

Arguments and groups of a framework are module globals, so each run needs processes of its own;
importing takes seconds, so they are forked. A line of standard input is a request (the path of a
pickle), a line of standard output its answer.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ds_usp.errors import USPError

TEXT_BYTES = 60_000
END_OF_DOCUMENT = 256


@dataclass(frozen=True)
class RankRequest:
    """One run of a framework's script.

    Args:
        world: ranks.
        script: path of the script.
        flags: its arguments.
        folder: where the ranks meet, and where results go.
        patched: with the patches, or as it is.
        own_weights: keep the framework's initial weights.
        extra: more patches, as (target, module-level function) pairs; kind wrap.
    """

    world: int
    script: str
    flags: tuple[str, ...]
    folder: Path
    patched: bool = True
    own_weights: bool = False
    extra: tuple[tuple[str, Any], ...] = ()


class Recorder(Protocol):
    """Runs a request as one rank, and keeps what it saw."""

    seen: dict[str, Any]

    def run(self, request: Any) -> None:
        """Train."""


def serve(make_recorder: Callable[[], Recorder]) -> None:
    """Answer requests until the input ends; what the ranks need is imported by now."""
    answer("ready")
    for line in sys.stdin:
        request = pickle.loads(Path(line.strip()).read_bytes())
        for child in [fork(rank, request, make_recorder) for rank in range(request.world)]:
            os.waitpid(child, 0)
        answer("done")


def answer(text: str) -> None:
    """Write a line to the test process."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fork(rank: int, request: RankRequest, make_recorder: Callable[[], Recorder]) -> int:
    """A child that runs as one rank, and ends with it."""
    child = os.fork()
    if child == 0:
        try:
            rank_main(rank, request, make_recorder())
        finally:
            # os._exit() runs no finalizers: Megatron-LM's manager of checkpoint queues would stay.
            for process in multiprocessing.active_children():
                process.terminate()
            os._exit(0)
    return child


def rank_main(rank: int, request: RankRequest, recorder: Recorder) -> None:
    """Run the script as one rank, and leave what it saw in a file."""
    log = open(request.folder / f"log{rank}", "w")  # noqa: SIM115 - open for the whole life
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request.world),
        LOCAL_SIZE=str(request.world),
    )
    torch.set_num_threads(1)
    from megatron.core import parallel_state

    try:
        store = dist.FileStore(str(request.folder / "store"), request.world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=request.world)
        with redirect_stdout(log):
            recorder.run(request)
    except SystemExit as end:
        recorder.seen["exit"] = end.code
    except USPError as error:
        recorder.seen["refused"] = error
        recorder.seen["groups"] = parallel_state.model_parallel_is_initialized()
    except BaseException:
        recorder.seen["traceback"] = traceback.format_exc()
    (request.folder / f"result{rank}").write_bytes(pickle.dumps(recorder.seen))


def documents() -> Iterator[torch.Tensor]:
    """A corpus whose next byte can be guessed, with documents of several lengths."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (TEXT_BYTES,), generator=generator)
    text = (steps.cumsum(0) * 7 % 97).tolist()
    offset = 0
    while offset < len(text):
        length = 150 + 37 * (offset % 11)
        yield torch.tensor([*text[offset : offset + length], END_OF_DOCUMENT])
        offset += length
