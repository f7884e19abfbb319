"""A process that has imported Megatron-DeepSpeed once, and forks a fresh world for every request.

Arguments, groups and engine are module globals, so each run needs processes of its own; importing
takes seconds, so they are forked. A line of standard input is a request (the path of a pickle), a
line of standard output its answer.

    python mds_server.py CHECKOUT FOLDER
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
from mds_rank import Recorder, Request

import megatron_patches
from ds_usp.errors import USPError

TEXT_BYTES = 60_000


def serve(checkout: Path, folder: Path) -> None:
    """Answer requests until the input ends."""
    megatron_patches.prepare("megatron_deepspeed", checkout)
    sys.argv = [str(checkout)]
    import pretrain_gpt  # noqa: F401 - for what it imports
    from megatron.data import helpers

    del sys.modules["pretrain_gpt"]  # it holds functions that the patches are going to replace

    helpers.build_sample_idx  # noqa: B018 - compile the index builder before anyone forks
    write_data(folder / "text")
    answer("ready")
    for line in sys.stdin:
        request = pickle.loads(Path(line.strip()).read_bytes())
        for child in [fork(rank, request) for rank in range(request.world)]:
            os.waitpid(child, 0)
        answer("done")


def answer(text: str) -> None:
    """Write a line to the test process."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fork(rank: int, request: Request) -> int:
    """A child that runs as one rank, and ends with it."""
    child = os.fork()
    if child == 0:
        try:
            rank_main(rank, request)
        finally:
            os._exit(0)
    return child


def write_data(prefix: Path) -> None:
    """A corpus whose next byte can be guessed, with documents of several lengths."""
    from megatron.data import indexed_dataset

    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (TEXT_BYTES,), generator=generator)
    text = (steps.cumsum(0) * 7 % 97).tolist()
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=257)
    offset = 0
    while offset < len(text):
        length = 150 + 37 * (offset % 11)
        builder.add_item(torch.tensor([*text[offset : offset + length], 256]))
        builder.end_document()
        offset += length
    builder.finalize(f"{prefix}.idx")


def rank_main(rank: int, request: Request) -> None:
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

    recorder = Recorder()
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


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
