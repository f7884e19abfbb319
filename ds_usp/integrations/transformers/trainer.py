"""transformers' Trainer and TRL's trainers on a mesh.

Trainers count every rank as a data-parallel replica, and a mesh is one. Losses and gradients need
nothing: they are means over all ranks (see :mod:`ds_usp.integrations.replicas`). What else is
derived from the number of ranks comes from what an ``Accelerator`` counts, gathers and sums: there
ranks become replicas. What a trainer takes from its arguments instead, :func:`attach` sets right,
once a trainer and on every rank, by the functions before ``replicate_batches``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback

from ds_usp.comm.mesh import SequenceMesh, check_mesh
from ds_usp.comm.process_groups import all_gather_bytes
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.integrations.transformers.model import EnabledModel, enable, find_enabled
from ds_usp.integrations.transformers.own_losses import reads_tokens
from ds_usp.integrations.transformers.refusals import find_model, needs_whole_head
from ds_usp.integrations.transformers.replicated_accelerator import share_batches
from ds_usp.integrations.transformers.rl import (
    check_rollouts,
    correct_completion_counts,
    makes_rollouts,
    share_rollouts,
)
from ds_usp.training.data_loader import BatchBroadcast, data_parallel_ranks
from ds_usp.training.whole_batch import IGNORE_INDEX, LOSS_WEIGHTS, next_token_labels


def attach(trainer: Trainer, mesh: SequenceMesh, **options: Any) -> EnabledModel:
    """Let a Trainer, or one of TRL's, train with sequences that are sharded over a mesh.

    Collective over the world, which is a whole number of meshes. Call it after the trainer is
    made and before ``train``, ``evaluate`` or ``predict``. All ranks of a mesh then get the same
    batches: ``per_device_train_batch_size`` is the number of sequences of a *mesh*, and the total
    batch is that times accumulation times the number of meshes. Other models that the trainer
    holds, such as ``ref_model`` and ``teacher_model``, are enabled too. GRPO and RLOO leave the
    mesh while they generate. At the end of training the ranks are compared by
    :meth:`SequenceMesh.check`.

    Args:
        trainer: its model is enabled here if it is not yet.
        options: those of :func:`ds_usp.integrations.transformers.enable`, as ``share_prefixes``.

    Returns:
        The enabled model.

    Raises:
        ConfigError: an option of the trainer that would not train as one process does; another
            trainer or a callback that generates; a model that is enabled for another mesh, or
            before with other options; meshes of different sizes. On every rank.
        UnsupportedAttentionError: a model that is not served, which is named.
    """
    _check_trainer(trainer)
    enabled = find_enabled(trainer.model, find_model(trainer.model))
    if enabled is not None and options:
        raise ConfigError(
            f"the model is enabled already, and attach is given {', '.join(options)}: give its "
            "options to enable or to attach, not to both"
        )
    replicas = share_batches(trainer.accelerator, mesh)
    if makes_rollouts(trainer):
        correct_completion_counts(trainer, replicas.size)
    trainer.gather_function = partial(  # which it took from the accelerator when it was made
        trainer.accelerator.gather_for_metrics,
        use_gather_object=trainer.args.eval_use_gather_object,
    )
    enabled = enabled or enable(trainer.model, mesh, **options)
    _check_mesh_of(enabled, mesh, "model")
    _enable_others(trainer, enabled)
    _correct_rank_counts(trainer, mesh.sp_degree)
    _divide_by_loss_weights(trainer)
    if makes_rollouts(trainer):
        share_rollouts(trainer, mesh)
    _join_logits(trainer, enabled)
    trainer.add_callback(_CheckAtEnd(mesh))
    return enabled


class _CheckAtEnd(TrainerCallback):
    """Checks the mesh at the end of training, as no later call does."""

    def __init__(self, mesh: SequenceMesh) -> None:
        self._mesh = mesh

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._mesh.check()


def _check_mesh_of(enabled: EnabledModel, mesh: SequenceMesh, name: str) -> None:
    if enabled.mesh is not mesh:
        raise ConfigError(
            f"the trainer's {name} is enabled for another mesh ({enabled.mesh}) than that given "
            f"here ({mesh}): pass the same mesh to enable and attach; where the other one has "
            "failed for good, enable(model, mesh) on the new one first"
        )


def _enable_others(trainer: Trainer, policy: EnabledModel) -> None:
    """Enable the models that a trainer runs beside its own ``policy``, to save their memory too."""
    common = ("layout", "kernel", "tuning", "mlp_chunks", "share_prefixes")
    for name, model in _models_of(trainer):
        inner = find_model(model)
        if inner is policy._inner:
            continue
        enabled = find_enabled(model, inner)
        kwargs = {x: getattr(policy._options, x) for x in common}
        kwargs["share_prefixes"] &= not needs_whole_head(inner)  # a reward reads a row's last token
        try:
            enabled = enabled or enable(model, policy.mesh, **kwargs)
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
    """ConfigError for a trainer that would not train as one process does; nothing is changed."""
    if not hasattr(trainer, "accelerator") or not hasattr(trainer, "model_wrapped"):
        raise ConfigError(
            f"{type(trainer).__name__} is no Trainer of transformers or TRL; enable(model, mesh) "
            "serves models in a loop of your own"
        )
    args = trainer.args
    if "prediction_step" in vars(trainer):  # as _join_logits leaves it
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
_GENERATING = frozenset({"A2POTrainer", "AsyncDistillationTrainer", "AsyncGRPOTrainer"})
_GENERATING |= {"DistillationTrainer", "GOLDTrainer", "IWOPDTrainer", "OnlineDPOTrainer"}
_GENERATING |= {"SDFTTrainer", "SDPOTrainer", "LogCompletionsCallback", "WeaveCallback"}


def _reasons_it_generates(trainer: Trainer) -> Iterator[str]:
    """Yield why a trainer, or a callback of it, would generate in another way than GRPO's."""
    for option in ("lmbda", "seq_kd", "predict_with_generate", "generate_during_eval"):
        if value := getattr(trainer.args, option, None):
            yield f"{option}={value} lets {type(trainer).__name__} generate"
    for part in (trainer, *trainer.callback_handler.callbacks):
        names = [kind.__name__ for kind in type(part).__mro__]
        # Trainers of others: what they make of a prompt, they say in these options.
        many = part is trainer and getattr(trainer.args, "num_generations", None) is not None
        many = many and not makes_rollouts(trainer)
        if many or _GENERATING.intersection(names):
            yield f"{names[0]} generates completions"


def _correct_rank_counts(trainer: Trainer, sp_degree: int) -> None:
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
        samples_a_step = trainer.args.eval_batch_size * trainer.args.world_size // sp_degree
        for prefix in [x for x in samples if metrics.get(f"{x}_runtime")]:
            steps = math.ceil(samples.pop(prefix) / samples_a_step)
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


def _divide_by_loss_weights(trainer: Trainer) -> None:
    """Let a step's loss be divided by the weights of its labels, where batches have
    ``loss_weights``, and not by their number, as ``EnabledModel._set_targets`` does for a batch."""
    count = trainer._get_num_items_in_batch

    def num_items(batches: list[Any], device: torch.device) -> Any:
        # Called once a step, on every rank, with the batches that the step accumulates.
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
            targets, labels = batch.get("shift_labels"), batch.get("labels")
            if targets is None and labels is not None:
                targets = next_token_labels(labels)
            if targets is not None:
                counts = targets != IGNORE_INDEX
                total += (counts * batch.get(LOSS_WEIGHTS, counts)).sum(dtype=torch.float64).cpu()
        return of_all_ranks(total).float().to(device)

    trainer._get_num_items_in_batch = num_items


def _join_logits(trainer: Trainer, policy: EnabledModel) -> None:
    """Join outputs per token where ``prediction_step`` returns them or the program reads them."""
    own_loss = policy._options.logits != "shard" and reads_tokens(trainer)

    def joined(step: Any) -> Any:
        def call(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            # A callback may have disabled the model, and enabled it again since.
            enabled = find_enabled(trainer.model, find_model(trainer.model))
            loss_only = kwargs.get("prediction_loss_only", any(args[:1]))
            if enabled is None or (loss_only and not own_loss) or makes_rollouts(trainer):
                return step(model, inputs, *args, **kwargs)
            # Logits of all tokens are made in such a pass, so its head is not in chunks.
            before = enabled._options
            enabled._options = replace(before, logits="whole", loss_chunks=0)
            try:
                return step(model, inputs, *args, **kwargs)
            finally:
                enabled._options = before

        return call

    trainer.prediction_step = joined(trainer.prediction_step)
    if own_loss:
        trainer.training_step = joined(trainer.training_step)


_PLAN = struct.Struct("qq")  # batches in a pass, replicas that the sampler deals out to


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
    """The loader that :func:`replicate_batches` returns."""

    def __init__(self, loader: Iterable[Any] | None, mesh: SequenceMesh) -> None:
        check_mesh(mesh, loader)  # they may have been exchanged
        self.loader, self.mesh = loader, mesh
        replicas = data_parallel_ranks(mesh)  # collective over the world
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
    names = ("num_replicas", "num_processes")
    counts = (getattr(place, name, None) for place in places for name in names)
    return next((count for count in counts if isinstance(count, int)), 0)
