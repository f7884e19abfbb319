"""DeepSpeed under sequence parallelism: mpu, gradient reduction, clipping, refused settings. A
training loop calls it at start, on every rank; at ZeRO-0 a hook clips in each optimizer step.

Every rule here was found by comparing gradient norms under plain SGD with one rank's (DeepSpeed
0.19.8); losses under Adam with clipping hide all of them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import align_group_counters, new_local_group, timeout_of
from ds_usp.errors import ConfigError, require_package, warn_once
from ds_usp.geometry.degrees import zero_refusal
from ds_usp.training.data_loader import data_parallel_ranks


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """This rank's process groups, one for each parallel axis.

    Args:
        tp: ranks that share each weight matrix.
        sp: ranks that share each sequence.
        dp: ranks with the same tokens' positions but other sequences.
        sp_dp: all ranks that hold different tokens: sequence x data parallel.
        model: all ranks that hold different weights: tensor x pipeline parallel.
        stages: pipeline stages.
    """

    tp: dist.ProcessGroup
    sp: dist.ProcessGroup
    dp: dist.ProcessGroup
    sp_dp: dist.ProcessGroup
    model: dist.ProcessGroup
    stages: int = 1

    @classmethod
    def from_mesh(cls, mesh: SequenceMesh) -> ParallelGroups:
        """The groups of sequence x data parallelism alone. Collective over the world, which must be
        a whole number of meshes of one size.

        Raises:
            ConfigError: a mesh without process groups, or meshes of different sizes.
        """
        if mesh.sp_group is None:
            raise ConfigError(
                "a mesh of one process has no groups for DeepSpeed: start torch.distributed and "
                "use SequenceMesh.build or SequenceMesh.from_group, one process will do"
            )
        replicas = data_parallel_ranks(mesh)
        world = cast(dist.ProcessGroup, dist.group.WORLD)
        align_group_counters(world)
        data = new_local_group(replicas.ranks, timeout=timeout_of(world))
        own_group = new_local_group([dist.get_rank()])
        return cls(tp=own_group, sp=mesh.sp_group, dp=data, sp_dp=world, model=own_group)


@dataclass(frozen=True)
class GradientRule:
    """Gradient reduction of DeepSpeed over the ranks that hold different tokens.

    Args:
        data_axis: the group that its ``data parallel`` must mean: ``dp`` or ``sp_dp``.
        divisor: gradients are summed over all of sequence x data parallel, then divided by this.
    """

    data_axis: str
    divisor: int

    def loss_scale(self, micro_batches: int) -> int:
        """Factor on the loss that undoes every division: the divisor's and accumulation's."""
        return self.divisor * micro_batches


def gradient_rule(zero_stage: int, groups: ParallelGroups) -> GradientRule:
    """The rule for one ZeRO stage, alone or under a pipeline."""
    # Note [what DeepSpeed divides by]
    # ZeRO-0 to 2 sum gradients over sequence x data parallel ranks and divide by the data-parallel
    # size only, if an mpu has a group of each. ZeRO-3 partitions over the mpu's *data-parallel*
    # group, and its default reduce-scatter divides by that group's whole size: it must be given
    # all ranks that hold different tokens. Pipelines know no sequence axis: it is folded into the
    # data axis, which they divide by.
    if groups.stages > 1 or zero_stage == 3:
        return GradientRule("sp_dp", dist.get_world_size(groups.sp_dp))
    return GradientRule("dp", dist.get_world_size(groups.dp))


def check_zero_stage(zero_stage: int, *, stages: int, bf16: bool) -> None:
    """Refuse what DeepSpeed does not train as one rank does.

    Raises:
        ConfigError: a pipeline with ZeRO-2 or 3, or bf16 with ZeRO-0; no stage of 0 to 3.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ConfigError(f"ZeRO stage {zero_stage!r} must be 0, 1, 2 or 3")
    if refusal := zero_refusal(zero_stage, stages, bf16=bf16):
        raise ConfigError(refusal.message)


def deepspeed_mpu(groups: ParallelGroups, rule: GradientRule) -> SimpleNamespace:
    """The ``mpu`` for ``deepspeed.initialize``: its names for the groups of ``groups``."""
    # DeepSpeed asks an mpu by several names for one axis, and falls back where one is missing.
    axes = {
        "model_parallel": groups.model,
        "tensor_model_parallel": groups.tp,
        "data_parallel": getattr(groups, rule.data_axis),
        "sequence_parallel": groups.sp,
        "sequence_data_parallel": groups.sp_dp,
    }
    methods: dict[str, Callable[[], Any]] = {}
    for axis, group in axes.items():
        methods[f"get_{axis}_group"] = partial(_identity, group)
        methods[f"get_{axis}_rank"] = partial(dist.get_rank, group)
        methods[f"get_{axis}_world_size"] = partial(dist.get_world_size, group)
    return SimpleNamespace(**methods)


def _identity(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return group


def prepare_deepspeed() -> None:
    """Import DeepSpeed, set its logger to errors only and switch off its CPU shared-memory op.

    Call it before ``deepspeed.init_distributed`` and ``deepspeed.initialize``, which compile that
    op on a CPU (20 to 80 s); groups of ``torch.distributed`` may exist already.
    """
    require_package("deepspeed", "prepare_deepspeed()")
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    # Training never calls that op, and to compile it takes a C++ compiler.
    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def initialize_deepspeed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any],
    groups: ParallelGroups,
) -> tuple[Any, GradientRule]:
    """``deepspeed.initialize`` for a model whose sequences are sharded over ``groups.sp``.

    Args:
        model: a plain module, or a ``PipelineModule`` if ``groups.stages`` is above 1.
        optimizer: at ZeRO-0 it gets the hook of :func:`own_clipping`.
        config: DeepSpeed's configuration. Batch sizes per replica: leave out
            ``train_batch_size``, which DeepSpeed counts differently in each case.

    Returns:
        The engine, whose ``get_global_grad_norm()`` is right at every stage, and the rule by which
        the loss must be scaled.

    Raises:
        ConfigError: a stage or a configuration that DeepSpeed trains wrongly; other arguments.
    """
    import deepspeed

    _check_arguments(optimizer, config, groups)
    stage = int(config.get("zero_optimization", {}).get("stage", 0))
    bf16 = bool(config.get("bf16", {}).get("enabled"))
    check_zero_stage(stage, stages=groups.stages, bf16=bf16)
    _check_config(config, groups)
    config = with_large_enough_buckets(config, model.parameters())
    rule = gradient_rule(stage, groups)
    if stage == 0:
        config = own_clipping(config, optimizer, groups)
    with contextlib.redirect_stdout(io.StringIO()):  # its bf16 optimizer prints memory tables
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=dict(config),
            mpu=deepspeed_mpu(groups, rule) if groups.stages == 1 else None,
            dist_init_required=False,
        )
    return engine, rule


def _check_arguments(optimizer: object, config: object, groups: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r} must be a torch.optim.Optimizer: none is made of DeepSpeed's "
            "configuration"
        )
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config={config!r} must be a dict: json.load a file of DeepSpeed's configuration"
        )
    for key in ("zero_optimization", "bf16"):
        if not isinstance(config.get(key, {}), Mapping):
            raise ConfigError(f"{key}={config[key]!r} of DeepSpeed's configuration must be a dict")
    if not isinstance(groups, ParallelGroups):
        raise ConfigError(
            f"groups={type(groups).__name__} must be ParallelGroups: ParallelGroups.from_mesh(mesh)"
        )


def _check_config(config: Mapping[str, Any], groups: ParallelGroups) -> None:
    """ConfigError for settings under which a step would not be that of one process."""
    if "sequence_parallel_size" in config:
        raise ConfigError(
            f"sequence_parallel_size={config['sequence_parallel_size']} in DeepSpeed's "
            "configuration makes a device mesh along which ZeRO-0 to 2 never sum gradients over "
            "the sequence-parallel ranks. Leave it out: the groups come from the mpu"
        )
    if "train_batch_size" in config:
        raise ConfigError(
            f"train_batch_size={config['train_batch_size']} means another number at each ZeRO "
            "stage and under a pipeline. Give train_micro_batch_size_per_gpu and "
            "gradient_accumulation_steps"
        )
    zero, tp = config.get("zero_optimization", {}), dist.get_world_size(groups.tp)
    if zero.get("zero_hpz_partition_size", 1) > 1 and tp > 1:
        raise ConfigError(
            f"zero_hpz_partition_size={zero['zero_hpz_partition_size']} takes ranks that follow "
            f"each other for those of the same weights, and {tp} tensor-parallel ranks have "
            "others. Leave it out, or use no tensor parallelism"
        )
    for key, disabled in (("zero_quantized_gradients", False), ("mics_shard_size", -1)):
        if zero.get(key, disabled) > disabled:
            raise ConfigError(
                f"{key}={zero[key]} reduces gradients by groups of its own, in 4 bits or over "
                "parts of the ranks: the step would not be that of one process. Leave it out"
            )


def own_clipping(
    config: Mapping[str, Any], optimizer: torch.optim.Optimizer, groups: ParallelGroups
) -> dict[str, Any]:
    """Install a pre-step hook on ``optimizer`` that computes the global gradient norm, collective
    over ``groups.model``, and clips by it; with a norm that is not finite no parameter changes. For
    ZeRO-0 in fp32, where gradients are on the parameters.

    Returns:
        The configuration without DeepSpeed's clipping, which is 1.0 by default.
    """
    # DeepSpeed's ZeRO-0 in fp32 reports no gradient norm, and clips by that of one stage's
    # parameters where there are pipeline stages: each stage would clip by another number.
    clip = float(config.get("gradient_clipping", 1.0))

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = global_gradient_norm(parameters, groups)
        if not math.isfinite(norm):
            for p in parameters:
                p.grad = None  # no update, as in DeepSpeed's own optimizers
        elif clip > 0.0:
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(min(1.0, clip / (norm + 1e-6)))
        # The engine reads it off its optimizer, as it does off the ZeRO ones.
        optimizer._global_grad_norm = norm  # type: ignore[attr-defined]

    optimizer.register_step_pre_hook(before_step)
    return {**config, "gradient_clipping": 0.0}


def owned_parameters(
    parameters: Iterable[nn.Parameter], groups: ParallelGroups
) -> Iterator[nn.Parameter]:
    """Yield the parameters that this rank adds to a norm, so that over ``groups.model`` each weight
    counts once: one that is split over tensor-parallel ranks on all of them, each with its part, a
    replicated one on the first only, and one that another pipeline stage owns not at all."""
    first = dist.get_rank(groups.tp) == 0
    for p in parameters:
        if not getattr(p, "ds_pipe_replicated", False) and (
            first or getattr(p, "tensor_model_parallel", False)
        ):
            yield p


def global_gradient_norm(parameters: Sequence[nn.Parameter], groups: ParallelGroups) -> float:
    """2-norm of the gradients of the whole model, each weight counted once, after they are reduced
    over data and sequence parallel ranks. Collective over ``groups.model``; waits for the GPU."""
    total = torch.zeros((), device=parameters[0].device)
    for p in owned_parameters(parameters, groups):
        if p.grad is not None:
            total += p.grad.float().norm() ** 2
    dist.all_reduce(total, group=groups.model)
    return total.sqrt().item()


_DEFAULT_ELEMENTS = 500_000_000  # DeepSpeed's


def with_large_enough_buckets(
    config: Mapping[str, Any], parameters: Iterable[nn.Parameter]
) -> dict[str, Any]:
    """DeepSpeed's configuration with buckets that hold the largest gradient, where they have to:
    with a larger ``reduce_bucket_size``, of which rank 0 warns.

    Args:
        parameters: of this rank; those that are trained count.
    """
    # Note [gradients larger than a bucket]
    # ZeRO-2 with overlap_comm reduces a gradient that is larger than reduce_bucket_size where it
    # lies, on a stream of its own, and frees it on the ranks that do not keep it before that stream
    # has read it (DeepSpeed 0.19.8, stage_1_and_2.py: record_stream is called on the rank that
    # keeps it alone). The backward pass then writes over it: gradients are wrong. With matrices of
    # 89 M elements and buckets of 40 M on two H200 the norm was 160.5 instead of 180.7.
    zero = config.get("zero_optimization")
    elements = zero.get("reduce_bucket_size", _DEFAULT_ELEMENTS) if isinstance(zero, Mapping) else 0
    if not isinstance(zero, Mapping) or not isinstance(elements, (int, float)):
        return dict(config)  # DeepSpeed refuses it
    in_place = zero.get("contiguous_gradients", True)  # else they are freed a bucket later
    overlapped = zero.get("stage") == 2 and zero.get("overlap_comm") and in_place
    largest = max((p.numel() for p in parameters if p.requires_grad), default=0)
    if not overlapped or largest <= elements:
        return dict(config)
    warn_once(
        f"reduce_bucket_size={int(elements)} of DeepSpeed's configuration is raised to {largest}, "
        "the elements of the largest parameter: with overlap_comm ZeRO-2 frees larger gradients "
        "before they are reduced",
        rank=dist.get_rank(),
    )
    return {**config, "zero_optimization": {**zero, "reduce_bucket_size": largest}}
