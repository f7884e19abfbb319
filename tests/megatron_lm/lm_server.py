"""A process that has imported Megatron-LM, and forks its ranks: see programs.serve.

python lm_server.py CHECKOUT FOLDER
"""

import ast
import functools
import inspect
import sys
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import programs
import recurrent_kernels
from lm_rank import Recorder

import megatron_patches


def start(checkout: Path, folder: Path) -> None:
    """Import what the ranks need, and write what they read."""
    recurrent_kernels.install()
    megatron_patches.prepare("megatron_lm", checkout)
    import pretrain_gpt  # noqa: F401 - for what it imports
    import pretrain_mamba  # noqa: F401

    # They hold functions that the patches are going to replace.
    del sys.modules["pretrain_gpt"], sys.modules["pretrain_mamba"]

    from megatron.core.datasets import helpers

    helpers.build_sample_idx_int32  # noqa: B018 - compile the index builder before anyone forks
    write_data(folder / "text")
    parse_sources_once(checkout)


def parse_sources_once(checkout: Path) -> None:
    """Read and parse what every run reads and parses again: the sources of patched functions, and
    those of the classes that Megatron-LM makes flags of."""
    inspect.getsource = functools.cache(inspect.getsource)
    ast.parse = functools.cache(ast.parse)
    from megatron.training import arguments

    arguments.add_megatron_arguments(ArgumentParser())
    megatron_patches.patch_set(megatron_patches.framework_of(checkout)).verify()


def write_data(prefix: Path) -> None:
    """Megatron-LM's files of the corpus."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in programs.documents():
        builder.add_item(document)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    start(Path(sys.argv[1]), Path(sys.argv[2]))
    programs.serve(Recorder)
