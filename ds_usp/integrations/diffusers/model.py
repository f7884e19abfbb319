"""``enable``: a diffusion transformer, or a pipeline's, sharded over a mesh."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import diffusers
from diffusers import DiffusionPipeline, ModelMixin
from packaging.version import Version

from ds_usp.attention.tuning import AUTO_TUNING, Tuning
from ds_usp.comm.keywords import explain_keywords
from ds_usp.comm.mesh import SequenceMesh, check_mesh
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.integrations.diffusers.branches import branches_of, degrees_of_branch
from ds_usp.integrations.diffusers.derived_plans import plan_of_diffusers
from ds_usp.integrations.diffusers.graphs import check_graphs, check_modules
from ds_usp.integrations.diffusers.hooks import (
    ShardedTransformer,
    check_attention,
    check_transformer,
    leave_other_mesh,
)
from ds_usp.integrations.diffusers.pass_state import Options
from ds_usp.integrations.diffusers.plans import PLANS, WITHOUT_PLAN, Plan
from ds_usp.integrations.model_comparison import ModelComparison
from ds_usp.integrations.replicas import Reduction
from ds_usp.kernels.registry import AUTO

OLDEST, BEFORE = "0.42", "1"
_OF_A_PIPELINE = ("transformer", "transformer_2", "unconditional_transformer")


@explain_keywords
def enable(
    model_or_pipeline: ModelMixin | DiffusionPipeline,
    mesh: SequenceMesh,
    *,
    kernel: str = AUTO,
    plan: Plan | None = None,
    gradients: Reduction = "mean",
    tuning: Tuning = AUTO_TUNING,
    cfg_degree: int = 1,
    cuda_graphs: bool = False,
    step_cache: bool = False,
) -> EnabledTransformer:
    """Shard every forward pass of a diffusion transformer over the ranks of a mesh.

    To everything around the transformer the ranks of the mesh are data-parallel replicas that were
    given the same batch: each gives whole latents, text and timesteps, the same on every rank, and
    gets the whole output; the mean over the ranks of the gradients is the gradient. Call it on
    every rank, before DistributedDataParallel, ``fully_shard`` or ``deepspeed.initialize`` takes
    the transformer. Ranks need the same noise: seed generators equally. An enabled transformer
    goes on over another mesh by the same call, as when its mesh has failed for good.

    Image tokens are sharded, and text tokens where they take part in the same attention; text that
    is attended to by cross-attention stays whole. Any number of text tokens, and of image tokens at
    least one for each rank.

    Args:
        model_or_pipeline: a transformer of a class of :data:`PLANS`, or a pipeline: then its
            ``transformer`` and, where it has them, ``transformer_2`` of Wan and Ideogram's
            ``unconditional_transformer``.
        kernel, tuning: as of :func:`ds_usp.usp_attention`.
        plan: of a class that has none in :data:`PLANS`, or instead of that one.
        gradients: what is done with the ranks' gradients: their ``mean`` over all ranks (DDP,
            FSDP2, ZeRO without an mpu), or their ``sum`` over the mesh.
        cfg_degree: 2 computes both branches of classifier-free guidance at once, each on half of
            the mesh's ranks: half of the ring if its degree is even, else half of the Ulysses axis.
            A batch that holds both branches is halved. Where a pipeline calls the transformer once
            for each branch, the first call returns a promise, which is computed with the second
            call, or by all ranks once it is read. Any divisor of an axis; sampling only.
        cuda_graphs: capture forward passes without gradients in CUDA graphs: of the passes with
            equal shapes the first runs without a graph, the second is captured, all others are
            replayed. For calls that are launch-bound, as at a few thousand tokens. Needs GPUs that
            exchange by copy engines. The memory of one pass stays allocated.
        step_cache: code of your own skips blocks of some passes, and decides by what is equal on
            all ranks, as the time or the number of the step, never by tokens. Ranks that decide
            otherwise are refused.

    Raises:
        ConfigError: another version of diffusers, no transformer, one that is enabled on this mesh
            already, or that the plan does not fit; diffusers' own parallelism; CUDA graphs without
            a GPU, or where exchanges are by NCCL.
        UnsupportedAttentionError: a class without a plan, an option of the configuration that
            treats tokens by their index, an IP-Adapter, a cache or an attention backend.
        MeshError: on every rank, if their options or configurations differ; collective over the
            mesh.
    """
    check_mesh(mesh)
    with mesh.agreeing("enable") as compared:
        if not Version(OLDEST) <= Version(diffusers.__version__) < Version(BEFORE):
            raise ConfigError(
                f"diffusers {diffusers.__version__} is not served: install "
                f"diffusers>={OLDEST},<{BEFORE} (Python 3.11 or newer)"
            )
        options = Options(kernel, gradients, tuning, cuda_graphs, step_cache)
        transformers = _transformers_of(model_or_pipeline)
        plans = [plan or _plan_of(transformer) for transformer in transformers]
        names = ", ".join(type(x).__name__ for x in transformers)
        compared.append(f"{names} with {options}, cfg_degree {cfg_degree}")
    # The checks need transformers as they were before any enable. If a rank refuses, those of
    # another mesh are sharded over it again: they must not compute whole batches on each rank.
    on_other_mesh: list[ShardedTransformer] = []
    comparisons = [ModelComparison(mesh, x) for x in transformers]
    try:
        with mesh.agreeing("enable") as compared:
            for transformer, its_plan in zip(transformers, plans, strict=True):
                on_other_mesh += leave_other_mesh(transformer, mesh)
                ulysses_degree, _ring_degree = degrees_of_branch(mesh, cfg_degree)
                caches = _check(transformer, its_plan, ulysses_degree)
                compared += [caches] if caches else []
                if cuda_graphs:
                    check_graphs(mesh, tuning)
                    check_modules(transformer)
        for transformer, comparison in zip(transformers, comparisons, strict=True):
            comparison.begin(f"enable {type(transformer).__name__}", "")
    except Exception:
        for sharded in on_other_mesh:
            sharded.install()
        raise
    for sharded in on_other_mesh:
        sharded.remove()
    branches = branches_of(mesh, cfg_degree)
    enabled = EnabledTransformer(model_or_pipeline, mesh)
    for transformer, its_plan, comparison in zip(transformers, plans, comparisons, strict=True):
        sharded = ShardedTransformer(transformer, mesh, branches, its_plan, options, comparison)
        enabled._sharded.append(sharded)
    return enabled


class EnabledTransformer(AbstractContextManager["EnabledTransformer"]):
    """Returned by :func:`enable`, whose changes it undoes, at the end of a ``with`` too.

    Attributes:
        model: the transformer, or the pipeline, that was given to :func:`enable`.
        mesh: the ranks that share each batch.
    """

    def __init__(self, model: ModelMixin | DiffusionPipeline, mesh: SequenceMesh) -> None:
        self.model, self.mesh = model, mesh
        self._sharded: list[ShardedTransformer] = []

    @property
    def transformers(self) -> tuple[ModelMixin, ...]:
        """The transformers that are sharded; none once it is disabled."""
        return tuple(sharded.transformer for sharded in self._sharded)

    def disable(self) -> None:
        """Leave the transformers as they were; ConfigError within a forward pass. No collective."""
        for sharded in self._sharded:
            sharded.check_idle()
        for sharded in self._sharded:
            sharded.remove()
        self._sharded.clear()

    def __exit__(self, *_: object) -> None:
        self.disable()


def _transformers_of(model_or_pipeline: Any) -> list[ModelMixin]:
    if isinstance(model_or_pipeline, DiffusionPipeline):
        candidates = [getattr(model_or_pipeline, name, None) for name in _OF_A_PIPELINE]
        transformers = list({id(x): x for x in candidates if x is not None}.values())
        if not transformers:
            raise ConfigError(
                f"{type(model_or_pipeline).__name__} has neither "
                f"{' nor '.join(_OF_A_PIPELINE)}: pipelines with a UNet are not served"
            )
    else:
        transformers = [model_or_pipeline]
    for transformer in transformers:
        if not isinstance(transformer, ModelMixin):
            if any(kind.__name__ == "PreTrainedModel" for kind in type(transformer).__mro__):
                raise ConfigError(
                    f"{type(transformer).__name__} is a model of transformers: give it to "
                    "ds_usp.integrations.transformers.enable"
                )
            raise ConfigError(
                f"{type(transformer).__name__} is no transformer (ModelMixin) and no "
                "DiffusionPipeline. Enable a transformer before DistributedDataParallel, "
                "deepspeed.initialize or torch.compile wraps it; of a ModularPipeline enable "
                "pipeline.transformer"
            )
    return transformers


def _plan_of(transformer: ModelMixin) -> Plan:
    # Own plans first: diffusers has its plans for some of these classes, too.
    name = type(transformer).__name__
    derived = None if name in (*PLANS, *WITHOUT_PLAN) else plan_of_diffusers(transformer)
    if derived is not None:
        return derived
    if name not in PLANS:
        why = f": {WITHOUT_PLAN[name]}" if name in WITHOUT_PLAN else ""
        raise UnsupportedAttentionError(
            f"there is no plan for {name}{why}; there are plans for {', '.join(PLANS)}. Give one "
            "of your own (plan=...) if all that it does with tokens but for attention is done for "
            "each by itself; enable a transformer before fully_shard renames its class"
        )
    return PLANS[name]


def _check(transformer: ModelMixin, plan: Plan, ulysses_degree: int) -> str:
    """Refuse what the plan cannot shard; returns the text of its caches, which ranks compare."""
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan={plan!r} must be a Plan, or None for one of {', '.join(PLANS)}")
    plan.check(transformer)
    caches = check_transformer(transformer)
    check_attention(transformer, plan, ulysses_degree)
    for option, value in plan.refused.items():
        if transformer.config[option] == value:
            raise UnsupportedAttentionError(
                f"{type(transformer).__name__} with {option}={value!r} treats tokens by their "
                "index, which a shard does not know: it is not served"
            )
    return caches.text
