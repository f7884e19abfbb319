"""An ``Accelerator`` that counts the ranks of a mesh as one process.

Accelerate counts every rank as a data-parallel replica, and a mesh of ranks is one replica. What
programs derive from the number of ranks (their share of a data set, a scheduler's steps, gathered
metrics) comes from their ``Accelerator``: :func:`share_batches` lets it count replicas. Programs
call its methods on all ranks; those that gather or reduce are collective over the world.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.errors import ConfigError, DataError
from ds_usp.training.data_loader import DataParallelRanks, data_parallel_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator
else:
    Accelerator = object  # which enable can do without

_RANK = struct.Struct("qq")
# Accelerate's own ways to share a model or a sequence, which know nothing of the mesh.
_OTHER_AXES = ("tp", "cp", "sp")


def share_batches(accelerator: Any, mesh: SequenceMesh) -> DataParallelRanks:
    """Let an ``Accelerator`` take each mesh for one process.

    The data loaders that it prepares give all ranks of a mesh the same batches;
    ``num_processes``, ``gather``, ``gather_for_metrics`` and ``reduce`` count each mesh once; the
    schedulers that it prepares step once for each mesh.

    For loops of one's own; :func:`attach` calls it. Collective over the world. Call it before
    ``accelerator.prepare``, and ``enable`` for the model.

    Returns:
        The data-parallel axis: one replica for each mesh.

    Raises:
        ConfigError: a parallel axis of Accelerate's own, dispatched batches, stateful data loaders,
            or data loaders that were prepared before. On every rank.
    """
    _check_accelerator(accelerator)
    replicas = data_parallel_ranks(mesh)
    kind = type(accelerator)
    if not isinstance(accelerator, ReplicatedAccelerator):
        accelerator.__class__ = type(kind.__name__, (ReplicatedAccelerator, kind), {})
    accelerator._usp_replicas = replicas
    accelerator._usp_first_ranks = _first_ranks(mesh, replicas)
    return replicas


def _check_accelerator(accelerator: Any) -> None:
    """ConfigError for settings that share batches or sequences in a way of Accelerate's own."""
    config = getattr(accelerator, "parallelism_config", None)
    axes = [axis for axis in _OTHER_AXES if config and getattr(config, f"{axis}_size", 1) > 1]
    if axes:
        sizes = ", ".join(f"{axis}_size={getattr(config, f'{axis}_size')}" for axis in axes)
        raise ConfigError(
            f"ParallelismConfig({sizes}): Accelerate would share sequences or weights in its own "
            "way. Leave these sizes out, the mesh says them; for sp_size with DeepSpeed call "
            "patch_accelerate instead"
        )
    if accelerator.dispatch_batches:
        raise ConfigError(
            "dispatch_batches=True sends other batches to every rank: leave it out. Every rank "
            "reads the data set itself"
        )
    if accelerator.use_stateful_dataloader:
        raise ConfigError(
            "use_stateful_dataloader=True: Accelerate counts the batches that a loader is ahead in "
            "ranks, so that it would resume at another one; leave it out, and skip batches "
            "(accelerator.skip_first_batches, as Trainer does)"
        )
    if accelerator._dataloaders:
        raise ConfigError(
            f"{len(accelerator._dataloaders)} data loaders were prepared before: their ranks read "
            "different batches. Call this before accelerator.prepare and before trainer.train"
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.state.num_processes != world:
        raise ConfigError(
            f"Accelerate knows {accelerator.state.num_processes} processes, torch.distributed "
            f"{world}"
        )


def _first_ranks(mesh: SequenceMesh, replicas: DataParallelRanks) -> list[int]:
    """Return, for each rank of the world, the first rank of its mesh. Collective over the world."""
    if not dist.is_initialized():
        return [0]
    world: Any = dist.group.WORLD
    gathered = all_gather_bytes(_RANK.pack(replicas.rank, mesh.rank), world)
    places = [_RANK.unpack(data) for data in gathered]
    return [places.index((replica, 0)) for replica, _ in places]


class ReplicatedAccelerator(Accelerator):
    """An ``Accelerator`` of accelerate 1.15 whose processes are replicas.

    It is put before the class of one that a program has made. Ranks stay ranks in
    ``process_index``, ``is_main_process``, ``split_between_processes`` and ``accelerate.utils``.
    """

    _usp_replicas: DataParallelRanks
    _usp_first_ranks: list[int]  # of each rank of the world, the first rank of its mesh
    _usp_takes_first = False  # inside of of_first_ranks

    @property
    def num_processes(self) -> int:
        # Programs multiply and divide by it what is counted of batches, and a scheduler's steps.
        # But Accelerate itself asks how many ranks hold a state or are in an engine.
        ranks: int = self.state.num_processes
        return ranks if _caller().startswith("accelerate.") else self._usp_replicas.size

    @property
    def process_index(self) -> int:
        rank: int = self.state.process_index
        is_rank = not self._usp_takes_first or _caller().startswith("accelerate.")
        return rank if is_rank else self._usp_replicas.rank

    @contextmanager
    def of_first_ranks(self) -> Iterator[None]:
        """Let gathers take what the first rank of each mesh has, and compare nothing, and
        ``process_index`` be the number of the mesh, by which code then takes its part."""
        self._usp_takes_first = True
        try:
            yield
        finally:
            self._usp_takes_first = False

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """Accelerate's, by replicas: its own would count ranks here. No loader dispatches batches.
        A loader that an accelerator has prepared is returned as it is."""
        from accelerate.data_loader import prepare_data_loader

        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        _share_seeds(self._usp_replicas, data_loader)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self._usp_replicas.size,
            process_index=self._usp_replicas.rank,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy() if self.rng_types else None,
            dispatch_batches=False,
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        _step_for_replicas(prepared, self._usp_replicas.size)
        return prepared

    def _prepare_deepspeed(self, *args: Any) -> Any:
        # Total steps of a scheduler that DeepSpeed makes are divided by the ranks.
        from accelerate.utils import DummyScheduler

        dummies = [x for x in args if isinstance(x, DummyScheduler) and x.total_num_steps]
        totals = [x.total_num_steps for x in dummies]
        for x in dummies:
            x.total_num_steps *= self.state.num_processes // self._usp_replicas.size
        try:
            prepared = super()._prepare_deepspeed(*args)
        finally:
            for x, total in zip(dummies, totals, strict=True):
                x.total_num_steps = total
        for x in prepared:
            _step_for_replicas(x, self._usp_replicas.size)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Gather each mesh's values once, in the order of ranks.

        Raises:
            DataError: values that are not the same on all ranks of a mesh; on every rank.
        """
        from accelerate.utils import recursively_apply

        return recursively_apply(self._once_a_replica, super().gather(tensor))

    def _once_a_replica(self, gathered: Tensor) -> Tensor:
        """Keep those rows of all ranks', ``[ranks * n, ...]``, that each mesh's first one has."""
        first_ranks = self._usp_first_ranks
        if self._usp_replicas.size == len(first_ranks):
            return gathered
        parts = gathered.reshape(len(first_ranks), -1, *gathered.shape[1:])
        for rank, first in enumerate(first_ranks):
            if not self._usp_takes_first and not _are_same(parts[rank], parts[first]):
                raise DataError(
                    f"gather: {list(parts.shape[1:])} {gathered.dtype} differs between ranks "
                    f"{first} and {rank}, which are one replica: it is of a shard, of a number of "
                    "each rank, or of another batch. Join shards by enabled.whole(x); "
                    "accelerate.utils.gather and reduce take every rank's"
                )
        return parts[sorted(set(first_ranks))].flatten(0, 1)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """``mean``: of all ranks, and so of gradients too; ``sum``: of each mesh once.

        Raises:
            DataError: as :meth:`gather`, of a sum.
            ConfigError: weights of LocalSGD, at its first mean.
        """
        from accelerate.utils import recursively_apply

        if _caller() == "accelerate.local_sgd":
            raise ConfigError(
                "LocalSGD lets ranks step by gradients of their own, and those of a mesh have "
                "shares of one: leave it out"
            )
        is_same = self._usp_replicas.size == len(self._usp_first_ranks)
        if is_same or reduction in ("mean", "max"):
            return super().reduce(tensor, reduction, scale)
        return recursively_apply(
            lambda x: self.gather(x[None]).sum(0, dtype=x.dtype), tensor, error_on_other_type=True
        )

    def gather_objects(self, objects: Any) -> list[Any]:
        """The lists of each mesh's first rank, one after the other; rl.py replaces TRL's by it."""
        from accelerate.utils import gather_object

        parts = gather_object([objects])
        return [x for rank in sorted(set(self._usp_first_ranks)) for x in parts[rank]]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """:meth:`gather`, or :meth:`gather_objects` of what is no tensor, without the samples that
        fill up the last batch of all replicas."""
        from accelerate.utils import recursively_apply

        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        data: Any = (self.gather_objects if use_gather_object else self.gather)(input_data)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        if use_gather_object:
            return data[: state.remainder]
        # One process gathers a number as it is: without a dim that has samples.
        return recursively_apply(lambda x: x[: state.remainder] if x.ndim else x, data)


def _caller() -> str:
    """The module whose code has called the method that calls this."""
    return sys._getframe(2).f_globals.get("__name__", "")


_ROUNDING = 1e-2  # of the largest: kernels that add in any order, in bf16 too


def _are_same(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    largest = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(one, other, rtol=0.0, atol=_ROUNDING * largest, equal_nan=True)


def _step_for_replicas(scheduler: Any, replicas: int) -> None:
    """Let ``AcceleratedScheduler`` step once for each replica; others stay as they are."""
    from accelerate.scheduler import AcceleratedScheduler

    # Else it is done when 1 / sp_degree of the training is: the loader is divided by replicas.
    is_stock = type(scheduler) is AcceleratedScheduler and "step" not in vars(scheduler)
    if not is_stock or scheduler.split_batches or not scheduler.step_with_optimizer:
        return
    scheduler.split_batches = True  # which it takes for: one step
    once, state = scheduler.step, scheduler.gradient_state

    def step(*args: Any, **kwargs: Any) -> None:
        for _ in range(replicas if state.sync_gradients else 1):
            total = getattr(scheduler.scheduler, "total_steps", None)  # of OneCycleLR
            if total is None or scheduler.scheduler._step_count <= total:
                once(*args, **kwargs)

    scheduler.step = step


def _share_seeds(replicas: DataParallelRanks, data_loader: DataLoader[Any]) -> None:
    """Let what is random in a data loader be the same on the ranks of a mesh."""
    from accelerate.data_loader import get_sampler

    worker_init = data_loader.worker_init_fn
    if isinstance(worker_init, partial) and "rank" in worker_init.keywords:
        # Trainer seeds workers by rank: random collators would differ within a mesh.
        data_loader.worker_init_fn = partial(worker_init, rank=replicas.rank)
    if replicas.size > 1 or isinstance(data_loader.dataset, IterableDataset):
        return
    # Of one replica Accelerate thinks that it has one process, which draws its order as it likes.
    sampler = get_sampler(data_loader)
    if getattr(sampler, "generator", "none") is None:
        generator = torch.Generator()
        generator.manual_seed(torch.initial_seed())
        sampler.generator = generator
