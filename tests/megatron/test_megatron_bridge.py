"""Megatron-Bridge's providers and its start of groups get USP by ``megatron_patches.apply``.

It runs in Megatron-Bridge's overlay (``scripts/test.sh bridge``), with stand-ins for the packages
that Megatron-Bridge imports and that need a GPU."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import recurrent_kernels
import stock_megatron_core
from harness import RankContext, fork_world

import megatron_patches
from ds_usp.errors import USPError
from megatron_patches.megatron_core import cpu_fallbacks_patch_set
from megatron_patches.missing_modules import exists

needs_bridge = pytest.mark.skipif(
    not exists("megatron.bridge"),
    reason="** MEGATRON-BRIDGE IS NOT HERE: its providers do NOT run (scripts/test.sh bridge)",
)
LIMIT = 1e-5
STAND_INS = (
    *("transformer_engine", "transformer_engine_torch", "causal_conv1d", "triton", "mamba_ssm"),
    *("modelopt", "nvidia_resiliency_ext", "wandb", "mlflow", "comet_ml", "tensorboard"),
)


class Anything(type):
    """Classes that have every attribute, themselves such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(Anything(self.__name__, (), {}), name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of :data:`STAND_INS` that are not installed."""

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def load_bridge() -> None:
    """Import it; afterwards TransformerEngine is missing again, for megatron-core and patches."""
    recurrent_kernels.install()
    import megatron.core.models.gpt.gpt_layer_specs  # without TransformerEngine

    finder = StandIns()
    sys.meta_path.append(finder)
    import megatron.bridge.models.gpt_provider
    import megatron.bridge.training.initialize  # noqa: F401

    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if isinstance(sys.modules[name], StandIn)]:
        del sys.modules[name]


def provider(**fields: Any) -> Any:
    """A provider as recipes make them, whose fields they set before it is finalized."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec

    sizes = stock_megatron_core
    made = GPTModelProvider(
        num_layers=sizes.LAYERS,
        hidden_size=sizes.HEADS * sizes.HEAD_DIM,
        num_attention_heads=sizes.HEADS,
        num_query_groups=2,
        ffn_hidden_size=64,
        seq_length=sizes.S,
        vocab_size=sizes.VOCAB,
        position_embedding_type="rope",
        transformer_layer_spec=local_layer_spec,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=False,
    )
    made.attention_dropout = 0.0
    made.attention_backend = None  # as its recipes say "automatic"
    for name, value in fields.items():
        setattr(made, name, value)
    made.finalize()
    return made


def trained(config: Any) -> tuple[Any, float, dict[str, Any]]:
    """A model by Megatron-Bridge's own start of groups; its loss and gradients."""
    from megatron.bridge.training.config import DistributedInitConfig
    from megatron.bridge.training.initialize import _initialize_distributed
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.utils import get_batch_on_this_cp_rank

    config._pg_collection = _initialize_distributed(
        model_config=config,
        dist_config=DistributedInitConfig(distributed_backend="gloo"),
        num_distributed_optimizer_instances=1,
        get_embedding_ranks=None,
        get_position_embedding_ranks=None,
    )
    model_parallel_cuda_manual_seed(1)
    model = config.provide()
    stock_megatron_core.draw_by_name(model)
    batch = stock_megatron_core.full_batch(dense_mask=False)
    batch = get_batch_on_this_cp_rank(batch, cp_group=config._pg_collection.cp)
    weights = batch.pop("loss_mask")
    losses = model(input_ids=batch.pop("tokens"), **batch) * weights
    tokens = stock_megatron_core.B * stock_megatron_core.S * config._pg_collection.dp.size()
    return model, *stock_megatron_core.reduced(model, losses.sum() / tokens)


def run(fields: dict[str, Any], settings: dict[str, Any] | None) -> dict[str, Any] | str:
    """What one set of fields and settings gives; settings None: Megatron-Bridge alone."""
    from megatron.core import parallel_state

    if settings is None:
        patches = cpu_fallbacks_patch_set()
        patches.apply()
    else:  # after the import, before groups
        patches = megatron_patches.apply("megatron_core", **settings)
    try:
        model, loss, gradients = trained(provider(**fields))
        core = model.decoder.layers[0].self_attention.core_attention
        seen = {"loss": loss, "class": type(core).__name__}
        seen["gradients"] = {name: x for name, (x, _) in gradients.items()}
        if settings is not None:
            mesh = parallel_state.get_sequence_mesh()
            seen["degrees"] = (mesh.ulysses_degree, mesh.ring_degree)
        return seen
    except USPError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        parallel_state.destroy_model_parallel()
        patches.restore()


def run_all(ctx: RankContext) -> dict[str, Any]:
    load_bridge()
    return {name: run(fields, settings) for name, (fields, settings, _) in CASES.items()}


CP4 = {"context_parallel_size": 4}
ALONE = "Megatron-Bridge alone, each rank with the whole batch"
SERVED = {
    "a degree of ours": (CP4, {"ulysses_degree": 2}, (2, 2)),
    "levels of the recipe": ({**CP4, "hierarchical_context_parallel_sizes": [1, 4]}, {}, (1, 4)),
    "named": ({**CP4, "cp_comm_type": "usp"}, {"ulysses_degree": 4}, (4, 1)),
}
REFUSED = {
    "a2a of a recipe": (
        {**CP4, "cp_comm_type": "a2a"},
        {"ulysses_degree": 2},
        "ConfigError: layer 1 asks for cp_comm_type='a2a'",
    ),
    "degrees that differ": (
        {**CP4, "hierarchical_context_parallel_sizes": [2, 2]},
        {"ulysses_degree": 4},
        "ConfigError: hierarchical_context_parallel_sizes=[2, 2] is not ulysses x ring = [4, 1]",
    ),
}
CASES: dict[str, Any] = {ALONE: ({}, None, None), **SERVED, **REFUSED}


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    """All cases in one start: each rank imports Megatron-Bridge for seven seconds."""
    return fork_world(run_all, 4, timeout=300)


@needs_bridge
@pytest.mark.parametrize("name", SERVED)
def test_a_provider_trains_as_on_one_rank(name, ranks):
    for seen in ranks:
        one, rank = seen[ALONE], seen[name]
        assert one["class"] == "DotProductAttention"
        assert rank["class"] == "USPCoreAttention"
        assert rank["degrees"] == SERVED[name][2]
        assert rank["loss"] == pytest.approx(one["loss"], rel=LIMIT)
        for weight, gradient in one["gradients"].items():
            difference = (rank["gradients"][weight] - gradient).norm() / gradient.norm()
            assert difference < LIMIT, weight


@needs_bridge
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_recipe_says_otherwise_is_refused(name, ranks):
    for seen in ranks:
        assert isinstance(seen[name], str) and REFUSED[name][2] in seen[name], seen[name]
