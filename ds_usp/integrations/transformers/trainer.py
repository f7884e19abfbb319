"""transformers' Trainer and TRL's trainers on a mesh.

Trainers count every rank as a data-parallel replica. That stays true for losses and gradients,
which are means over all ranks (see :mod:`ds_usp.integrations.replicas`); what else they derive from
the number of ranks is set right here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.errors import ConfigError
from ds_usp.integrations.transformers.model import EnabledModel, enable, find_enabled
from ds_usp.integrations.transformers.refusals import find_model
from ds_usp.training.data_loader import BatchBroadcast, DataParallelRanks, data_parallel_ranks


def attach(trainer: Trainer, mesh: SequenceMesh) -> EnabledModel:
    """Let a Trainer, or one of TRL's, train with sequences that are sharded over a mesh.

    Collective over the world, which is a whole number of meshes. Call it after the trainer is
    made and before ``train``, ``evaluate`` or ``predict``. All ranks of a mesh then get the same
    batches: ``per_device_train_batch_size`` is the number of sequences of a *mesh*, and the total
    batch is that times accumulation times the number of meshes.

    Args:
        trainer: its model is enabled here if it is not yet; enable it before with other options
            than the default ones.

    Returns:
        The enabled model.

    Raises:
        ConfigError: an option of the trainer that would not train as one process does; a model
            that is enabled for another mesh; meshes of different sizes. On every rank.
    """
    _check_trainer(trainer)
    share_batches(trainer.accelerator, mesh)
    trainer.gather_function = partial(  # which it took from the accelerator when it was made
        trainer.accelerator.gather_for_metrics,
        use_gather_object=trainer.args.eval_use_gather_object,
    )
    enabled = find_enabled(trainer.model, find_model(trainer.model)) or enable(trainer.model, mesh)
    if enabled.mesh is not mesh:
        raise ConfigError(
            f"the trainer's model is enabled for another mesh ({enabled.mesh}) than that given "
            f"here ({mesh}): pass the same mesh to enable and attach"
        )
    _count_replicas(trainer, mesh.sp_degree)
    _join_logits(trainer, enabled)
    return enabled


def _check_trainer(trainer: Trainer) -> None:
    if not hasattr(trainer, "accelerator") or not hasattr(trainer, "model_wrapped"):
        raise ConfigError(
            f"{type(trainer).__name__} is no Trainer of transformers or TRL; enable(model, mesh) "
            "serves models in a loop of your own"
        )
    args = trainer.args
    if trainer.model_wrapped is not trainer.model:
        raise ConfigError(
            "the trainer has wrapped its model already: call attach before train and evaluate"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"the trainer sees {args.n_gpu} GPUs in one process and would use DataParallel: start "
            "one process for each GPU (torchrun, accelerate launch, deepspeed)"
        )
    if trainer.model_init is not None:
        raise ConfigError(
            "model_init makes a new model in train, which would not be enabled: make the model "
            "before, and give it to the trainer"
        )
    if trainer.neftune_noise_alpha is not None:
        raise ConfigError(
            f"neftune_noise_alpha={trainer.neftune_noise_alpha}: its noise depends on the number "
            "of tokens that a rank holds; leave it out"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ConfigError(
            "train_sampling_strategy='batch_rebalance' deals batches out to all ranks: use "
            "'random', 'sequential' or 'group_by_length'"
        )


def _count_replicas(trainer: Trainer, sp_degree: int) -> None:
    """Set right what the trainer sums over all ranks, of which ``sp_degree`` have one batch."""
    # Losses and gradients need nothing: they are means over all ranks.
    total, flos = trainer.get_total_train_batch_size, trainer.floating_point_ops
    trainer.get_total_train_batch_size = lambda args: total(args) // sp_degree
    trainer.floating_point_ops = lambda inputs: flos(inputs) / sp_degree
    track = trainer._track_num_input_tokens

    def track_num_input_tokens(inputs: dict[str, Any]) -> None:
        before = trainer.state.num_input_tokens_seen
        track(inputs)
        counted = trainer.state.num_input_tokens_seen - before
        trainer.state.num_input_tokens_seen = before + counted // sp_degree

    trainer._track_num_input_tokens = track_num_input_tokens


def _join_logits(trainer: Trainer, enabled: EnabledModel) -> None:
    """Give metrics and predictions the logits of the whole batch."""
    step = trainer.prediction_step

    def prediction_step(
        model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, **kwargs: Any
    ) -> Any:
        with _whole_logits(enabled, not prediction_loss_only):
            return step(model, inputs, prediction_loss_only, **kwargs)

    trainer.prediction_step = prediction_step


# Logits of all tokens are made in such a pass, so its head is not in chunks.
@contextmanager
def _whole_logits(enabled: EnabledModel, wanted: bool) -> Iterator[None]:
    before = enabled._options
    if wanted:
        enabled._options = replace(before, logits="whole", loss_chunks=0)
    try:
        yield
    finally:
        enabled._options = before


_RANK = struct.Struct("qq")
_PLAN = struct.Struct("qq")  # batches in a pass, replicas that the sampler deals out to
# Accelerate's own ways to share a model or a sequence, which know nothing of the mesh.
_OTHER_AXES = ("tp", "cp", "sp")


def share_batches(accelerator: Any, mesh: SequenceMesh) -> DataParallelRanks:
    """Make the data loaders that an ``Accelerator`` prepares give all ranks of a mesh the same
    batches, and ``gather_for_metrics`` gather from one rank of each mesh.

    For loops of one's own; :func:`attach` calls it. Collective over the world. Call it before
    ``accelerator.prepare``, and ``enable`` for the model.

    Returns:
        The data-parallel axis: one replica for each mesh.

    Raises:
        ConfigError: a parallel axis of Accelerate's own, dispatched batches, or data loaders that
            were prepared before. On every rank.
    """
    _check_accelerator(accelerator)
    replicas = data_parallel_ranks(mesh)
    firsts = _first_ranks(mesh, replicas)
    accelerator.prepare_data_loader = partial(_prepare_data_loader, accelerator, replicas)
    accelerator.gather_for_metrics = partial(_gather_for_metrics, accelerator, firsts)
    return replicas


def _check_accelerator(accelerator: Any) -> None:
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
    if accelerator._dataloaders:
        raise ConfigError(
            f"{len(accelerator._dataloaders)} data loaders were prepared before: their ranks read "
            "different batches. Call this before accelerator.prepare and before trainer.train"
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes != world:
        raise ConfigError(
            f"Accelerate knows {accelerator.num_processes} processes, torch.distributed {world}"
        )


def _first_ranks(mesh: SequenceMesh, replicas: DataParallelRanks) -> list[int]:
    if not dist.is_initialized():
        return [0]
    world: Any = dist.group.WORLD
    gathered = all_gather_bytes(_RANK.pack(replicas.rank, mesh.rank), world)
    places = [_RANK.unpack(data) for data in gathered]
    return [places.index((replica, 0)) for replica in range(replicas.size)]


def _prepare_data_loader(
    accelerator: Any,
    replicas: DataParallelRanks,
    data_loader: DataLoader[Any],
    device_placement: bool | None = None,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
) -> DataLoader[Any]:
    """``Accelerator.prepare_data_loader`` of accelerate 1.15, but replicas are its processes.

    None dispatches batches to others either, as one does by default of iterable data sets.
    """
    from accelerate.data_loader import prepare_data_loader

    if getattr(data_loader, "_is_accelerate_prepared", False):
        return data_loader
    _seed_alike(accelerator, replicas, data_loader)
    placement = accelerator.device_placement if device_placement is None else device_placement
    prepared = prepare_data_loader(
        data_loader,
        accelerator.device,
        num_processes=replicas.size,
        process_index=replicas.rank,
        split_batches=accelerator.split_batches,
        put_on_device=placement,
        rng_types=accelerator.rng_types.copy() if accelerator.rng_types else None,
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        slice_fn_for_dispatch=slice_fn_for_dispatch,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    accelerator._dataloaders.append(prepared)
    return prepared


def _seed_alike(
    accelerator: Any, replicas: DataParallelRanks, data_loader: DataLoader[Any]
) -> None:
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


def _gather_for_metrics(
    accelerator: Any, firsts: list[int], input_data: Any, use_gather_object: bool = False
) -> Any:
    """``Accelerator.gather_for_metrics`` over one rank of each mesh: the others have the same."""
    from accelerate.utils import gather_object, recursively_apply

    world = accelerator.num_processes

    def of_firsts(x: Tensor) -> Tensor:
        parts = x.reshape(world, -1, *x.shape[1:])
        return parts[firsts].flatten(0, 1)

    try:
        recursively_apply(lambda x: x, input_data, error_on_other_type=True)
    except TypeError:
        use_gather_object = True
    data: Any
    if use_gather_object:
        parts = gather_object([input_data])
        data = [x for rank in firsts for x in parts[rank]]
    else:
        data = recursively_apply(of_firsts, accelerator.gather(input_data))
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return data
    # The last batch was filled up with samples that were there before.
    if use_gather_object:
        return data[: state.remainder]
    return recursively_apply(lambda x: x[: state.remainder], data)


def replicate_batches(loader: Iterable[Any] | None, mesh: SequenceMesh) -> ReplicatedBatches:
    """A data loader whose batches the first rank of each mesh reads and sends to the others.

    For training loops of one's own: whatever is random in reading or collating, the ranks of a
    mesh get the same batch, and only one of them reads. Replicas must read different samples::

        dp = ds_usp.training.data_parallel_ranks(mesh)
        sampler = DistributedSampler(data, num_replicas=dp.size, rank=dp.rank)
        loader = replicate_batches(DataLoader(data, sampler=sampler), mesh)

    A pass ends for the ranks of a mesh when its loader ends; give all replicas as many batches.
    Collective over the world when it is made, and over the mesh at each batch.

    Args:
        loader: any iterable of batches; it may be None except on the first rank of a mesh.

    Raises:
        ConfigError: at construction, on every rank of the mesh: a loader that deals batches out to
            another number of replicas than there are meshes.
        DataError: where the first rank could not read a batch; that rank raises its own error.
    """
    return ReplicatedBatches(loader, mesh)


class ReplicatedBatches:
    """What :func:`replicate_batches` returns."""

    def __init__(self, loader: Iterable[Any] | None, mesh: SequenceMesh) -> None:
        self.loader, self.mesh = loader, mesh
        replicas = data_parallel_ranks(mesh)
        length = -1
        with suppress(TypeError):  # an iterator has none
            length = len(cast(Sized, loader))
        plan = _PLAN.pack(length, _replicas_of(loader))
        if mesh.sp_group is not None:
            plan = all_gather_bytes(plan, mesh.sp_group)[0]
        self._length, dealt = _PLAN.unpack(plan)
        if dealt not in (0, replicas.size):
            raise ConfigError(
                f"the loader deals its batches out to {dealt} replicas, and there are "
                f"{replicas.size} meshes: use num_replicas={replicas.size}, rank={replicas.rank}, "
                "and a loader that Accelerate has not prepared"
            )

    def __len__(self) -> int:
        if self._length < 0:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return self._length

    def set_epoch(self, epoch: int) -> None:
        owner: Any
        for owner in (self.loader, getattr(self.loader, "sampler", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """One pass. Tensors are on the CPU, except on ranks of meshes of one rank."""
        if self.mesh.sp_degree == 1:
            yield from self.loader or ()
            return
        broadcast = BatchBroadcast(self.mesh.sp_group, "cpu")
        batches = iter(self.loader or ()) if self.mesh.rank == 0 else None
        while (entry := broadcast.next_of(batches)) is not None:
            yield entry[0]


def _replicas_of(loader: Any) -> int:
    """Replicas that a loader's sampler deals its samples out to; 0 where it does not."""
    places = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    places += [getattr(places[-1], "sampler", None), getattr(loader, "dataset", None)]
    for place in places:
        for name in ("num_replicas", "num_processes"):
            count = getattr(place, name, None)
            if isinstance(count, int):
                return count
    return 0
