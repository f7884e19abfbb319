"""transformers' Trainer and TRL's trainers on a mesh.

Trainers count every rank as a data-parallel replica, and a mesh is one. Losses and gradients need
nothing: they are means over all ranks (see :mod:`ds_usp.integrations.replicas`). What else is
derived from the number of ranks comes from what an ``Accelerator`` counts, gathers and sums: there
ranks become replicas. What a trainer takes from its arguments instead, :func:`attach` sets right.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, Trainer

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.errors import ConfigError, DataError, UnsupportedAttentionError
from ds_usp.geometry.dealing import Cost
from ds_usp.integrations.transformers.model import EnabledModel, enable, find_enabled
from ds_usp.integrations.transformers.refusals import find_model, needs_whole_head
from ds_usp.integrations.transformers.rl import (
    check_rollouts,
    count_completions,
    makes_rollouts,
    share_rollouts,
)
from ds_usp.training.data_loader import BatchBroadcast, DataParallelRanks, data_parallel_ranks
from ds_usp.training.whole_batch import IGNORE_INDEX, LOSS_WEIGHTS, next_token_labels

if TYPE_CHECKING:
    from accelerate import Accelerator
else:
    Accelerator = object  # which enable can do without


def attach(
    trainer: Trainer,
    mesh: SequenceMesh,
    *,
    deal: bool = False,
    max_tokens: int | None = None,
    cost: Cost | None = None,
) -> EnabledModel:
    """Let a Trainer, or one of TRL's, train with sequences that are sharded over a mesh.

    Collective over the world, which is a whole number of meshes. Call it after the trainer is
    made and before ``train``, ``evaluate`` or ``predict``. All ranks of a mesh then get the same
    batches: ``per_device_train_batch_size`` is the number of sequences of a *mesh*, and the total
    batch is that times accumulation times the number of meshes. Other models that the trainer
    holds, such as ``ref_model`` and ``teacher_model``, are enabled too. GRPO and RLOO leave the
    mesh while they generate.

    Args:
        trainer: its model is enabled here if it is not yet; enable it before with other options
            than the default ones.
        deal: experimental; the samples of each batch are dealt to groups of the mesh's ranks
            (:meth:`EnabledModel.deal`, whose arguments ``max_tokens`` and ``cost`` are). Give a
            mesh of all ranks, and the samples of a step as its batch.

    Returns:
        The enabled model.

    Raises:
        ConfigError: an option of the trainer that would not train as one process does; another
            trainer or a callback that generates; a model that is enabled for another mesh; meshes
            of different sizes. On every rank.
        UnsupportedAttentionError: a model that is not served, which is named.
    """
    _check_trainer(trainer)
    if not deal and (max_tokens is not None or cost is not None):
        raise ConfigError(
            f"max_tokens={max_tokens} and cost are of dealt samples: give deal=True, or leave them "
            "out"
        )
    replicas = share_batches(trainer.accelerator, mesh)
    if makes_rollouts(trainer):
        count_completions(trainer, replicas.size)
    trainer.gather_function = partial(  # which it took from the accelerator when it was made
        trainer.accelerator.gather_for_metrics,
        use_gather_object=trainer.args.eval_use_gather_object,
    )
    enabled = find_enabled(trainer.model, find_model(trainer.model)) or enable(trainer.model, mesh)
    _check_mesh_of(enabled, mesh, "model")
    _enable_others(trainer, enabled)
    _count_replicas(trainer, mesh.sp_degree)
    _count_weights(trainer)
    if makes_rollouts(trainer):
        share_rollouts(trainer, mesh)
    _join_logits(trainer)
    if deal:
        enabled.deal(max_tokens, cost=cost)
    return enabled


def _check_mesh_of(enabled: EnabledModel, mesh: SequenceMesh, name: str) -> None:
    if enabled.mesh is not mesh:
        raise ConfigError(
            f"the trainer's {name} is enabled for another mesh ({enabled.mesh}) than that given "
            f"here ({mesh}): pass the same mesh to enable and attach"
        )


def _enable_others(trainer: Trainer, policy: EnabledModel) -> None:
    """Enable the models that a trainer runs beside its own: on whole sequences they would need the
    memory that sharding has saved."""
    options = policy._options
    for name, model in _models_of(trainer):
        inner = find_model(model)
        if inner is policy._inner:
            continue
        enabled = find_enabled(model, inner)
        given = options.of_frozen_model()
        given["share_prefixes"] &= not needs_whole_head(inner)  # a reward reads a row's last token
        try:
            enabled = enabled or enable(model, policy.mesh, **given)
        except UnsupportedAttentionError as reason:
            raise UnsupportedAttentionError(
                f"the trainer's {name} would run whole sequences on every rank. {reason}. Where it "
                "may run whole, hold it elsewhere than in the trainer"
            ) from None
        _check_mesh_of(enabled, policy.mesh, name)


def _models_of(trainer: Trainer) -> Iterator[tuple[str, nn.Module]]:
    """The transformers and PEFT models that a trainer holds, by the names of its attributes."""
    for name, value in vars(trainer).items():
        if name in ("train_dataset", "eval_dataset"):  # lists of rows
            continue
        values = value.values() if isinstance(value, Mapping) else value
        for module in values if isinstance(value, (Mapping, list, tuple)) else [value]:
            yield from ((name, model) for model in _models_in(module))


def _models_in(module: Any) -> Iterator[nn.Module]:
    """The outermost ones: DistributedDataParallel, FSDP and engines are around them."""
    if not isinstance(module, nn.Module):
        return
    if isinstance(module, PreTrainedModel) or hasattr(module, "peft_config"):
        yield module
    else:
        for child in module.children():
            yield from _models_in(child)


def _check_trainer(trainer: Trainer) -> None:
    if not hasattr(trainer, "accelerator") or not hasattr(trainer, "model_wrapped"):
        raise ConfigError(
            f"{type(trainer).__name__} is no Trainer of transformers or TRL; enable(model, mesh) "
            "serves models in a loop of your own"
        )
    args = trainer.args
    if "prediction_step" in vars(trainer):
        raise ConfigError("attach was called for this trainer before: it would count meshes twice")
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
    if getattr(args, "precompute_ref_log_probs", False):
        raise ConfigError(
            "precompute_ref_log_probs=True: the trainer has run its reference on whole sequences "
            "on every rank, before attach could shard it; leave it out, attach shards ref_model too"
        )
    if makes_rollouts(trainer):
        check_rollouts(trainer)
    for reason in _reasons_it_generates(trainer):
        raise ConfigError(
            f"{reason}, and there is no generation over a mesh. Train by GRPO or RLOO, which leave "
            "the mesh to generate; on completions that were made before, by SFT, DPO, KTO, ORPO, "
            "CPO or TPO; or generate between steps, where enabled.paused() gives the model back as "
            "it was"
        )


# Of TRL 1.16; their subclasses too. GKD generates by its option lmbda.
_GENERATING = frozenset(
    {
        "A2POTrainer",
        "AsyncDistillationTrainer",
        "AsyncGRPOTrainer",
        "DistillationTrainer",
        "GOLDTrainer",
        "IWOPDTrainer",
        "OnlineDPOTrainer",
        "SDFTTrainer",
        "SDPOTrainer",
        "LogCompletionsCallback",
        "WeaveCallback",
    }
)
_GENERATING_OPTIONS = ("lmbda", "seq_kd", "predict_with_generate", "generate_during_eval")


def _reasons_it_generates(trainer: Trainer) -> Iterator[str]:
    for option in _GENERATING_OPTIONS:
        value = getattr(trainer.args, option, None)
        if value:
            yield f"{option}={value} lets {type(trainer).__name__} generate"
    for part in (trainer, *trainer.callback_handler.callbacks):
        names = [kind.__name__ for kind in type(part).__mro__]
        # Trainers of others: what they make of a prompt, they say in these options.
        many = part is trainer and getattr(trainer.args, "num_generations", None) is not None
        many = many and not makes_rollouts(trainer)
        if many or _GENERATING.intersection(names):
            yield f"{names[0]} generates completions"


def _count_replicas(trainer: Trainer, sp_degree: int) -> None:
    """Set right what a trainer takes from the ranks that its arguments count, ``sp_degree`` of
    which have one batch."""
    total, flos = trainer.get_total_train_batch_size, trainer.floating_point_ops
    trainer.get_total_train_batch_size = lambda args: total(args) // sp_degree
    trainer.floating_point_ops = lambda inputs: flos(inputs) / sp_degree
    # Of an evaluation only its speed counts steps: samples by those of all ranks in a step.
    loop, log = trainer.evaluation_loop, trainer.log
    handler = trainer.callback_handler
    on_predict = handler.on_predict
    samples: dict[str, int] = {}

    def evaluation_loop(*args: Any, **kwargs: Any) -> Any:
        out = loop(*args, **kwargs)
        samples[kwargs.get("metric_key_prefix", "eval")] = out.num_samples
        return out

    def count_steps(metrics: dict[str, float]) -> None:
        in_a_step = trainer.args.eval_batch_size * trainer.args.world_size // sp_degree
        for prefix in [x for x in samples if metrics.get(f"{x}_runtime")]:
            steps = math.ceil(samples.pop(prefix) / in_a_step)
            speed = steps / metrics[f"{prefix}_runtime"]
            metrics[f"{prefix}_steps_per_second"] = round(speed, 3)

    def log_steps(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        count_steps(logs)
        log(logs, *args, **kwargs)

    def predicted(args: Any, state: Any, control: Any, metrics: dict[str, float]) -> Any:
        count_steps(metrics)
        return on_predict(args, state, control, metrics)

    trainer.evaluation_loop, trainer.log = evaluation_loop, log_steps
    handler.on_predict = predicted


def _count_weights(trainer: Trainer) -> None:
    """Let a step's loss be divided by the weights of its labels, where batches have
    ``loss_weights``, and not by their number."""
    count = trainer._get_num_items_in_batch

    def num_items(batches: list[Any], device: torch.device) -> Any:
        def of_all_ranks(number: Tensor) -> Tensor:
            if not trainer.args.average_tokens_across_devices:
                return number
            return trainer.accelerator.gather(number.to(device)).sum()

        # A replica whose rows share no prefix has no weights, and its Trainer would gather integers
        # while others gather floats: what each counts is the ranks' common decision.
        weighted = any(isinstance(x, Mapping) and LOSS_WEIGHTS in x for x in batches)
        if not of_all_ranks(torch.tensor(float(weighted), device=device)):
            return count(batches, device)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            given, labels = batch.get("shift_labels"), batch.get("labels")
            if given is None and labels is not None:
                given = next_token_labels(labels)
            if given is not None:
                counts = given != IGNORE_INDEX
                total += (counts * batch.get(LOSS_WEIGHTS, counts)).sum(dtype=torch.float64).cpu()
        return of_all_ranks(total).float().to(device)

    trainer._get_num_items_in_batch = num_items


def _join_logits(trainer: Trainer) -> None:
    step = trainer.prediction_step

    def prediction_step(
        model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, **kwargs: Any
    ) -> Any:
        # A callback may have disabled the model, and enabled it again since.
        enabled = find_enabled(trainer.model, find_model(trainer.model))
        if enabled is None or prediction_loss_only or makes_rollouts(trainer):
            return step(model, inputs, prediction_loss_only, **kwargs)
        with _whole_logits(enabled):
            return step(model, inputs, prediction_loss_only, **kwargs)

    trainer.prediction_step = prediction_step


# Logits of all tokens are made in such a pass, so its head is not in chunks.
@contextmanager
def _whole_logits(enabled: EnabledModel) -> Iterator[None]:
    before = enabled._options
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
    if not isinstance(accelerator, _OfReplicas):
        accelerator.__class__ = type(kind.__name__, (_OfReplicas, kind), {})
    accelerator._usp_replicas = replicas
    accelerator._usp_first_ranks = _first_ranks(mesh, replicas)
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
    """Of each rank of the world the first rank of its mesh."""
    if not dist.is_initialized():
        return [0]
    world: Any = dist.group.WORLD
    gathered = all_gather_bytes(_RANK.pack(replicas.rank, mesh.rank), world)
    places = [_RANK.unpack(data) for data in gathered]
    return [places.index((replica, 0)) for replica, _ in places]


class _OfReplicas(Accelerator):
    """An ``Accelerator`` of accelerate 1.15 whose processes are replicas.

    It is put before the class of one that a program has made. Ranks stay ranks in
    ``process_index``, ``is_main_process``, ``split_between_processes`` and ``accelerate.utils``.
    """

    _usp_replicas: DataParallelRanks
    _usp_first_ranks: list[int]
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
        """Inside, what the first rank of each mesh has is gathered, whatever the others have; and
        the number of a process is that of its mesh, as code that takes its part of what it has
        gathered needs it."""
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
        """Accelerate's, by replicas: its own would count ranks here. No loader dispatches batches,
        which is the default of iterable data sets. A loader that an accelerator has prepared is
        returned as it is; stateful ones are refused."""
        from accelerate.data_loader import prepare_data_loader

        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        _seed_alike(self._usp_replicas, data_loader)
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
        """Of each mesh once, in the order of ranks.

        Raises:
            DataError: values that are not the same on all ranks of a mesh; on every rank.
        """
        from accelerate.utils import recursively_apply

        return recursively_apply(self._of_replicas, super().gather(tensor))

    def _of_replicas(self, gathered: Tensor) -> Tensor:
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
        """The lists of each mesh's first rank, one after the other."""
        from accelerate.utils import gather_object

        parts = gather_object([objects])
        return [x for rank in sorted(set(self._usp_first_ranks)) for x in parts[rank]]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        from accelerate.utils import recursively_apply

        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        data: Any = (self.gather_objects if use_gather_object else self.gather)(input_data)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        # The last batch was filled up with samples that were there before.
        if use_gather_object:
            return data[: state.remainder]
        return recursively_apply(lambda x: x[: state.remainder], data)


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
    """Let ``AcceleratedScheduler`` step once for each replica. For each rank it would be done when
    ``1 / sp_degree`` of the training is, since the loader was divided by the replicas alone."""
    from accelerate.scheduler import AcceleratedScheduler

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


def _seed_alike(replicas: DataParallelRanks, data_loader: DataLoader[Any]) -> None:
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
