"""Accelerate's ``ParallelismConfig``: its DeepSpeed sequence parallelism on ulysses x ring, and a
mesh of its sizes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.ranks import RankGrid
from ds_usp.integrations.transformers.alst import UlyssesSPAttentionHF
from ds_usp.integrations.transformers.alst_data_loader import UlyssesSPDataLoaderAdapter
from ds_usp.integrations.transformers.batch import AUTO_LAYOUT
from ds_usp.integrations.undo import UndoneAtExit


def patch_accelerate(
    ulysses_degree: int | None = None, layout: str = AUTO_LAYOUT
) -> PatchedAccelerate:
    """Let Accelerate's ``ParallelismConfig(sp_size=N, sp_backend="deepspeed")`` run on a mesh.

    Two lines in a script of Accelerate, Trainer or TRL, before ``Accelerator`` or the trainer
    prepares its model; the rest of it, and ``accelerate launch``, stay as they are::

        from ds_usp.integrations.transformers import patch_accelerate
        patch_accelerate(ulysses_degree=2)

    Evaluation runs without sharding, each rank its own batches, as Accelerate wants it.

    Args:
        ulysses_degree, layout: see :meth:`UlyssesSPAttentionHF.register_with_transformers`.

    Returns:
        What restores DeepSpeed's own classes: ``restore()``, or the end of a ``with``.

    Raises:
        ConfigError: it was called before and not restored.
    """
    return PatchedAccelerate(ulysses_degree, layout)


class PatchedAccelerate(UndoneAtExit):
    """DeepSpeed's two classes of ALST, replaced where Accelerate imports them."""

    def __init__(self, ulysses_degree: int | None, layout: str) -> None:
        import deepspeed.runtime.sequence_parallel.ulysses_sp as stock

        if issubclass(stock.UlyssesSPAttentionHF, UlyssesSPAttentionHF):
            raise ConfigError("Accelerate is patched already: restore() it before another degree")
        self._stock = stock
        self._originals = stock.UlyssesSPAttentionHF, stock.UlyssesSPDataLoaderAdapter
        stock.UlyssesSPAttentionHF = type(
            "UlyssesSPAttentionHF",
            (UlyssesSPAttentionHF,),
            {"ulysses_degree": ulysses_degree, "layout": layout},
        )
        stock.UlyssesSPDataLoaderAdapter = UlyssesSPDataLoaderAdapter

    def restore(self) -> None:
        """Put DeepSpeed's own classes back; models that run keep the classes they have."""
        self._stock.UlyssesSPAttentionHF, self._stock.UlyssesSPDataLoaderAdapter = self._originals

    def _undo(self) -> None:
        self.restore()


def sequence_mesh(parallelism_config: Any, ulysses_degree: int | None = None) -> SequenceMesh:
    """The mesh of Accelerate's sizes: ``cp_size`` or ``sp_size`` consecutive ranks.

    For :func:`enable` with :func:`attach` or :func:`share_batches`. Collective over the world. Do
    not give the configuration to an ``Accelerator`` or a trainer too, which would share sequences
    in its own way.

    Args:
        parallelism_config: ``accelerate.ParallelismConfig``.
        ulysses_degree: ranks that exchange heads; the ring takes the rest. None: all.

    Raises:
        ConfigError: tensor parallelism, or sizes that do not divide the world.
    """
    if parallelism_config.tp_size > 1:
        raise ConfigError(
            f"tp_size={parallelism_config.tp_size}: models that are split by tensor parallelism "
            "are not served"
        )
    size = parallelism_config.cp_size * parallelism_config.sp_size
    degree = size if ulysses_degree is None else ulysses_degree
    world = dist.get_world_size()
    if size % degree or world % size:
        raise ConfigError(
            f"ulysses_degree={degree} must divide the {size} ranks of a sequence (cp_size x "
            f"sp_size), and they the world of {world}"
        )
    sizes = {"ulysses": degree, "ring": size // degree, "dp": world // size}
    return SequenceMesh.build(RankGrid(sizes))
