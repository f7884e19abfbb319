"""A process that has imported Megatron-DeepSpeed, and forks its ranks: see programs.serve.

python mds_server.py CHECKOUT FOLDER
"""

import sys
from pathlib import Path

import programs
from mds_rank import Recorder

import megatron_patches


def start(checkout: Path, folder: Path) -> None:
    """Import what the ranks need, and write what they read."""
    megatron_patches.prepare("megatron_deepspeed", checkout)
    sys.argv = [str(checkout)]
    import pretrain_gpt  # noqa: F401 - for what it imports
    from megatron.data import helpers

    del sys.modules["pretrain_gpt"]  # it holds functions that the patches are going to replace

    helpers.build_sample_idx  # noqa: B018 - compile the index builder before anyone forks
    write_data(folder / "text")


def write_data(prefix: Path) -> None:
    """Megatron-DeepSpeed's files of the corpus."""
    from megatron.data import indexed_dataset

    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=257)
    for document in programs.documents():
        builder.add_item(document)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    start(Path(sys.argv[1]), Path(sys.argv[2]))
    programs.serve(Recorder)
