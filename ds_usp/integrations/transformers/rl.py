"""TRL's trainers that generate while they train: GRPO and RLOO on a mesh.

Such a trainer makes its batches itself, from completions of its own model. Generation leaves the
mesh: each rank runs the whole model, and the first rank of a mesh gives its completions to the
others. In rewards, advantages and logs each mesh is one process. ``trainer.attach`` calls what
changes a trainer once, on every rank; what is put into it communicates, the functions do not.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from inspect import iscoroutinefunction
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from transformers import Trainer

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.integrations.transformers.model import find_enabled
from ds_usp.integrations.transformers.refusals import find_model
from ds_usp.integrations.transformers.replicated_accelerator import ReplicatedAccelerator
from ds_usp.training.data_loader import BatchBroadcast

# Of TRL 1.16; their subclasses too, as GMPO.
_SERVED = frozenset({"GRPOTrainer", "RLOOTrainer"})
# Before it, the head of these trainers is given logits_to_keep, which a shard does not know.
_OLDEST_TRL = "1.15"
# What makes rollouts, and what makes batches of them.
_GENERATE, _SCORE = "_generate_single_turn", "_generate_and_score_completions"
# Where TRL deals completions out to processes besides the trainers' own modules.
_VLLM = "trl.generation.vllm_generation"


def makes_rollouts(trainer: Trainer) -> bool:
    """Whether a trainer generates its batches in a way that is served."""
    return not _SERVED.isdisjoint(kind.__name__ for kind in type(trainer).__mro__)


def check_rollouts(trainer: Trainer) -> None:
    """ConfigError for what would differ between the ranks of a mesh."""
    name = type(trainer).__name__
    is_known = all(hasattr(trainer, x) for x in (_GENERATE, _SCORE))
    if not is_known or Version(version("trl")) < Version(_OLDEST_TRL):
        raise ConfigError(
            f"{name} generates in another way than that of TRL {_OLDEST_TRL} and later, which "
            f"leaves the mesh for it; there is no generation over a mesh: use trl>={_OLDEST_TRL}"
        )
    for option in ("tools", "environments", "environment_factories"):
        if getattr(trainer, option, None):
            raise ConfigError(
                f"{name} with {option}: every rank of a mesh would call them, and what they give "
                "may differ. Call them in rollout_func, of which the first rank's completions "
                "count, or leave them out"
            )


def correct_completion_counts(trainer: Any, num_meshes: int) -> None:
    """Set right what a trainer's arguments have derived from the number of ranks.

    Raises:
        ConfigError: the completions of a prompt would be in several batches.
    """
    args = trainer.args
    micro, steps = args.per_device_train_batch_size, args.steps_per_generation
    size = micro * num_meshes * steps
    if size % trainer.num_generations:
        raise ConfigError(
            f"{num_meshes} meshes make {size} completions at once (per_device_train_batch_size="
            f"{micro}, of a mesh, and steps_per_generation={steps}), which is no multiple of "
            f"num_generations={trainer.num_generations}: set one of the three"
        )
    evaluated = args.per_device_eval_batch_size * num_meshes
    evaluates = args.do_eval and args.eval_strategy != "no"
    if evaluates and evaluated % trainer.num_generations_eval:
        raise ConfigError(
            f"{num_meshes} meshes evaluate {evaluated} completions at once "
            f"(per_device_eval_batch_size={args.per_device_eval_batch_size}, of a mesh), which is "
            f"no multiple of {trainer.num_generations_eval} for each prompt: set "
            "per_device_eval_batch_size or num_generations_eval"
        )
    args.generation_batch_size = size
    for name, kept in trainer._logs.items():  # as many as are made at once
        if isinstance(kept, deque):
            trainer._logs[name] = deque(kept, maxlen=size)


def share_rollouts(trainer: Any, mesh: SequenceMesh) -> None:
    """Let the ranks of a mesh train on the same completions, made without it; once a trainer, after
    ``share_batches`` has made its accelerator one of replicas. What generates, rewards and scores
    is collective over the mesh from then on."""
    from accelerate.utils import set_seed

    accelerator: ReplicatedAccelerator = trainer.accelerator
    # TRL has seeded each rank with a number of its own, so that their completions differ.
    set_seed(trainer.args.seed + accelerator._usp_replicas.rank)
    broadcast = BatchBroadcast(mesh.sp_group, "cpu")  # tensors arrive there

    def value_of_first_rank(name: str, make: Callable[[], Any]) -> Any:
        """Call ``make`` on every rank, and return on every rank what it gave on the first."""
        with mesh.agreeing(name):
            value = make()
            message = broadcast.pack(value) if mesh.rank == 0 else None
        return broadcast.send(message)

    def without_mesh(make: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``make`` with the model as it was before it was enabled; all ranks get what the
        first one's call returns."""

        def run_and_share(*args: Any, **kwargs: Any) -> Any:
            enabled = find_enabled(trainer.model, find_model(trainer.model))

            def run_paused() -> Any:
                with enabled.paused() if enabled else nullcontext():
                    return make(*args, **kwargs)

            # Sent even where all ranks draw from the same random state: sums of a GPU may differ in
            # order, and an engine of vLLM has a seed of its own.
            return value_of_first_rank("completions", run_paused)

        return run_and_share

    def once(reward: Callable[..., Any]) -> Callable[..., Any]:
        """Call ``reward`` on the first rank alone."""

        # It may cost money, or draw random numbers.
        def rewards(*args: Any, **kwargs: Any) -> Any:
            return value_of_first_rank(
                "rewards", lambda: reward(*args, **kwargs) if mesh.rank == 0 else None
            )

        return rewards

    setattr(trainer, _GENERATE, without_mesh(getattr(trainer, _GENERATE)))
    if getattr(trainer, "rollout_func", None) is not None:
        trainer.rollout_func = without_mesh(trainer.rollout_func)
    # Reward models are sharded, and so called on all ranks; async functions run in any order, so
    # that none can send. Rewards are gathered from first ranks: those of other ranks are dropped.
    trainer.reward_funcs = [
        f if isinstance(f, nn.Module) or _is_async(f) else once(f) for f in trainer.reward_funcs
    ]
    score = getattr(trainer, _SCORE)
    names = [_VLLM, *(kind.__module__ for kind in type(trainer).__mro__)]

    def scored(inputs: Any) -> Any:
        with _gathering_by_mesh(accelerator, [sys.modules[x] for x in names if x in sys.modules]):
            batch = score(inputs)
        # TRL shuffles by this state next, and rewards of the first rank may have drawn of it.
        torch.set_rng_state(value_of_first_rank("a random state", torch.get_rng_state))
        return batch

    setattr(trainer, _SCORE, scored)


def _is_async(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)


@contextmanager
def _gathering_by_mesh(accelerator: ReplicatedAccelerator, modules: list[Any]) -> Iterator[None]:
    """Gather from the first rank of each mesh, in a ``with`` block, what TRL's ``modules`` gather
    past the accelerator, and let TRL take its part of that by the number of its mesh."""
    from accelerate.utils import gather, gather_object

    functions = [(gather, accelerator.gather), (gather_object, accelerator.gather_objects)]
    with ExitStack() as stack:
        for original, function in functions:
            name = original.__name__
            for module in [x for x in modules if getattr(x, name, None) is original]:
                setattr(module, name, function)
                stack.callback(setattr, module, name, original)
        stack.enter_context(accelerator.of_first_ranks())
        yield
