"""transformers' Trainer and TRL's trainers on a mesh.

Trainers count every rank as a data-parallel replica. That stays true for losses and gradients,
which are means over all ranks (see :mod:`ds_usp.integrations.replicas`); what else they derive from
the number of ranks is set right here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import Trainer

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.integrations.transformers.data_loader import share_batches
from ds_usp.integrations.transformers.model import EnabledModel, enable, find_enabled
from ds_usp.integrations.transformers.refusals import find_model


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


@contextmanager
def _whole_logits(enabled: EnabledModel, wanted: bool) -> Iterator[None]:
    before = enabled._options
    if wanted:
        enabled._options = replace(before, logits="whole", loss_chunks=0)
    try:
        yield
    finally:
        enabled._options = before
