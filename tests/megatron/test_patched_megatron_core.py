"""Any program on megatron-core gets USP as its context parallelism by one line."""

import ast
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import recurrent_kernels
import stock_megatron_core
import torch
import torch.distributed as dist
import torch.nn.functional as F
from golden_curves import STEPS
from harness import RankContext, fork_world
from stock_megatron_core import DenseAttention, step, train

import megatron_patches
from ds_usp import (
    ConfigError,
    LayoutError,
    MeshError,
    PatchError,
    SequenceMesh,
    UnsupportedAttentionError,
)
from megatron_patches.megatron_core import cpu_fallbacks_patch_set
from megatron_patches.megatron_core.recurrent_layers import mamba_mixer

LIMIT = 1e-5
MHA, GQA = {"kv_heads": 8}, {"kv_heads": 2}
# Name: settings of apply, and what the program asks for.
CASES = {
    "2x2": ({"ulysses_degree": 2}, {"cp": 4, **GQA}),
    "4x1": ({"ulysses_degree": 4}, {"cp": 4, **GQA}),
    "1x4": ({"ulysses_degree": 1}, {"cp": 4, **GQA}),
    "4x1 MHA, all by default": ({}, {"cp": 4, **MHA}),
    "2x2 by the program's levels": ({}, {"cp": 4, "levels": [2, 2], **GQA}),
    "2x2 learned positions": ({"ulysses_degree": 2}, {"cp": 4, "rotary": False, **GQA}),
    "2x2 dense mask": ({"ulysses_degree": 2}, {"cp": 4, "dense_mask": True, **GQA}),
    "2x2 recomputed": ({"ulysses_degree": 2}, {"cp": 4, "recompute": True, **GQA}),
    "2x2 named": ({"ulysses_degree": 2}, {"cp": 4, "comm_type": "usp", **GQA}),
    "2x2 named a layer": ({"ulysses_degree": 2}, {"cp": 4, "comm_type": ["usp"] * 2, **GQA}),
    "2x2 named in the layer spec": ({"in_spec": 2}, {"cp": 4, **GQA}),
    "2x1, tp 2": ({"ulysses_degree": 2}, {"tp": 2, "cp": 2, **GQA}),
    "1x2, tp 2": ({"ulysses_degree": 1}, {"tp": 2, "cp": 2, **MHA}),
}
EIGHT = {
    "2x2, tp 2": ({"ulysses_degree": 2}, {"tp": 2, "cp": 4, **GQA}),
    "2x2, tp 2 MHA": ({"ulysses_degree": 2}, {"tp": 2, "cp": 4, **MHA}),
    "2x2, dp 2": ({"ulysses_degree": 2}, {"cp": 4, **MHA}),
}


HYBRID = {
    "hybrid": "ME*ME",
    "rotary": False,
    # megatron-core's own context parallelism wants heads that divide by the ranks.
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "mamba_state_dim": 8,
    "mamba_num_groups": 2,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 1,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "activation_func": F.silu,
}


def usp_core(ulysses: int) -> Any:
    """A spec of our attention that needs no patch of megatron-core's."""
    from megatron.core import parallel_state
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_patches.megatron_core.core_attention import USPCoreAttention

    mesh = SequenceMesh.from_group(parallel_state.get_context_parallel_group(), ulysses)
    return ModuleSpec(USPCoreAttention, params={"mesh": mesh, "layout": "context_parallel"})


def patched(settings: dict[str, Any]) -> dict[str, Any]:
    """Our one line, or options of the program where ours is named in the layer spec."""
    from megatron.core.jit import disable_jit_fuser

    recurrent_kernels.install()
    disable_jit_fuser()  # a gated delta net compiles its norm, in a second
    if "in_spec" in settings:
        cpu_fallbacks_patch_set().apply()
        return {"core": partial(usp_core, settings["in_spec"])}
    megatron_patches.apply("megatron_core", **settings)
    return {}


def programs(ctx: RankContext, *, cases: dict[str, tuple[dict, dict]]) -> dict[str, Any]:
    """Each whole program: one line of ours, then megatron-core. Those of the same settings are
    patched once, as every loaded module is searched by it."""
    from megatron.core import parallel_state

    results = {}
    by_settings: dict[str, dict[str, Any]] = {}
    for name, (settings, options) in cases.items():
        by_settings.setdefault(repr(settings), {})[name] = settings, options
    for alike in by_settings.values():
        of_spec = patched(next(iter(alike.values()))[0])
        for name, (_, options) in alike.items():
            loss, gradients = step(**options, **of_spec)
            results[name] = SimpleNamespace(
                loss=loss,
                gradients=gradients,
                tp_rank=parallel_state.get_tensor_model_parallel_rank(),
                replicas=parallel_state.get_data_parallel_world_size(),
            )
            parallel_state.destroy_model_parallel()
        megatron_patches.restore()
    return results


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    """Stock attention on one rank, for each model that the cases train."""
    models = {name: _model(options) for name, (_, options) in {**CASES, **EIGHT}.items()}
    unique = {str(model): ({}, model) for model in models.values()}
    (results,) = fork_world(programs, 1, cases=unique)
    return {name: results[str(model)] for name, model in models.items()}


def _model(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("kv_heads", "rotary") if key in options}


def check(name: str, result: Any, expected: Any, tp: int = 1) -> None:
    """Compare loss and gradients with one rank's."""
    replicas = result.replicas  # each has the same batch, and gradients are summed
    assert result.loss / replicas == pytest.approx(expected.loss, rel=LIMIT), name
    assert result.gradients.keys() == expected.gradients.keys()
    for weight, (gradient, dim) in result.gradients.items():
        full, _ = expected.gradients[weight]
        local = full if dim is None else full.chunk(tp, dim)[result.tp_rank]
        difference = (gradient / replicas - local).norm() / local.norm()
        assert difference < LIMIT, f"{name}: {weight} differs by {difference:.1e}"


@pytest.mark.parametrize(("cases", "world"), [(CASES, 4), (EIGHT, 8)], ids=["4 ranks", "8 ranks"])
def test_a_stock_program_gives_one_ranks_loss_and_gradients(one_rank, cases, world):
    for results in fork_world(programs, world, cases=cases):
        for name, result in results.items():
            check(name, result, one_rank[name], cases[name][1].get("tp", 1))


def recorded_steps(ctx: RankContext) -> tuple[list[float], list[float]]:
    megatron_patches.apply("megatron_core", ulysses_degree=2)
    return train(STEPS, cp=2, kv_heads=2)


def test_twenty_steps_are_the_recorded_ones(golden):
    golden.check("megatron-core, 2x1, SGD", *fork_world(recorded_steps, 2)[0])


def attention_classes(ctx: RankContext, *, everywhere: bool) -> list[str]:
    """What stands in the slot at context parallel 1, where no degree matters, and above."""
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    megatron_patches.apply("megatron_core", ulysses_degree=2, everywhere=everywhere)
    names = []
    for size in (1, 2):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=size)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            context_parallel_size=size,
            attention_dropout=0.0,
        )
        core = DotProductAttention(config, 1, AttnMaskType.causal, "self")
        names.append(type(core).__name__)
        assert parallel_state.get_sequence_mesh().sp_degree == size
    return names


@pytest.mark.parametrize("everywhere", [False, True])
def test_layers_without_context_parallelism_are_ours_on_request(everywhere):
    alone = "USPCoreAttention" if everywhere else "DotProductAttention"
    names = fork_world(attention_classes, 2, everywhere=everywhere)
    assert names == [[alone, "USPCoreAttention"]] * 2


def groups_on_rank(ctx: RankContext) -> list[list[int]]:
    from megatron.core import parallel_state

    megatron_patches.apply("megatron_core")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2,
        context_parallel_size=4,
        hierarchical_context_parallel_sizes=[2, 2],
    )
    usp_groups = (
        parallel_state.get_ulysses_parallel_group(),
        parallel_state.get_ring_parallel_group(),
    )
    megatron_groups = parallel_state.get_hierarchical_context_parallel_groups()
    return [dist.get_process_group_ranks(group) for group in (*usp_groups, *megatron_groups)]


def test_the_axes_are_megatron_cores_hierarchical_groups():
    for rank, (ulysses, ring, inner, outer) in enumerate(fork_world(groups_on_rank, 8)):
        assert (ulysses, ring) == (inner, outer)
        assert rank in ulysses and ulysses[1] - ulysses[0] == 2 and ring[1] - ring[0] == 4


def attributes() -> dict[tuple[str, str], Any]:
    """Every attribute of megatron-core, of torch's tensors and of CUDA, and of their classes."""
    values: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if name in ("torch", "torch.cuda") or name.split(".")[0] == "megatron":
            values.update({(name, key): value for key, value in vars(module).items()})
            for cls in vars(module).values():
                if isinstance(cls, type):
                    where = f"{name}:{cls.__qualname__}"
                    values.update({(where, key): value for key, value in vars(cls).items()})
    return values


def test_restore_leaves_every_attribute_as_it_was():
    megatron_patches.patch_set("megatron_core").verify()  # imports what it looks at
    before = attributes()
    patches = megatron_patches.apply("megatron_core", ulysses_degree=2)
    try:
        changed = {key for key, value in attributes().items() if before.get(key) is not value}
        assert len(changed) > len(patches.patches) - 1
        assert patches.stale() == ()
    finally:
        megatron_patches.restore()
    after = attributes()
    assert after.keys() == before.keys()
    assert [key for key, value in after.items() if before[key] is not value] == []


def raised(ctx: RankContext, *, cases: dict[str, tuple[dict, dict]]) -> dict[str, Any]:
    """What each case raises, and whether megatron-core's groups exist by then."""
    from megatron.core import parallel_state

    errors = {}
    for name, case in cases.items():
        try:
            settings, options = case
            errors[name] = step(**options, **patched(settings)), None
        except ValueError as error:
            errors[name] = error, parallel_state.is_initialized()
        parallel_state.destroy_model_parallel()
        megatron_patches.restore()
    return errors


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
    "add_bias_linear": False,
    "moe_ffn_hidden_size": 32,
}


def scaled() -> type:
    """A core attention that scales queries by their positions before megatron-core's own."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Scaled(DotProductAttention):
        def forward(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(query * (1 + len(query)), *args, **kwargs)

    return Scaled


CP4, UNSUPPORTED = {"cp": 4}, UnsupportedAttentionError
SINKHORN = {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "sinkhorn"}
# Settings of apply, what the program asks for, the error, and what its message names.
Refused = tuple[dict[str, Any], dict[str, Any], type[Exception], str]
REFUSED_BEFORE_GROUPS: dict[str, Refused] = {
    "degrees": ({"ulysses_degree": 3}, CP4, ConfigError, "3 does not divide context_parallel"),
    "levels": ({"ulysses_degree": 4}, {"cp": 4, "levels": [2, 2]}, ConfigError, "[4, 1]"),
    "three levels": ({}, {"cp": 4, "levels": [2, 2, 1]}, ConfigError, "[2, 2, 1]"),
    "no degree": ({"ulysses_degree": 0}, CP4, ConfigError, "ulysses_degree=0"),
    "no layout": ({"layout": "zigzig"}, CP4, LayoutError, "'zigzig'"),
    "no setting": ({"ulysses": 2}, CP4, ConfigError, "'ulysses'"),
}
REFUSED_BY_LAYERS: dict[str, Refused] = {
    "another kind": ({}, {"cp": 4, "comm_type": "p2p"}, ConfigError, "cp_comm_type='p2p'"),
    "dropout": ({}, {"cp": 4, "dropout": 0.1}, UNSUPPORTED, "attention_dropout=0"),
    "experts that drop tokens": (
        {},
        {"cp": 4, **EXPERTS, "moe_expert_capacity_factor": 1.0},
        UNSUPPORTED,
        "moe_expert_capacity_factor=1.0",
    ),
    "experts of a balanced shard": (
        {},
        {"cp": 4, **EXPERTS, **SINKHORN},
        UNSUPPORTED,
        "'sinkhorn'",
    ),
    "losses of routers a token": (
        {},
        {"cp": 4, **EXPERTS, "calculate_per_token_loss": True},
        UNSUPPORTED,
        "calculate_per_token_loss=False",
    ),
    "experts at random": (
        {},
        {"cp": 4, **EXPERTS, "moe_router_force_load_balancing": True},
        UNSUPPORTED,
        "at random",
    ),
    "M-RoPE positions of a shard": (
        {},
        {"cp": 4, "mrope_section": [1, 1, 0], "sharded_positions": True},
        UNSUPPORTED,
        "M-RoPE are of 8 tokens, and the 4 context-parallel ranks have 8 each",
    ),
    "documents of one rank": (
        {},
        {"cp": 4, "documents": ([8, 16], [8, 16]), "other_offsets": [0, 8, 32]},
        (LayoutError, MeshError),
        "documents end at 32, the sequence has 24 tokens",
    ),
    "a z-loss beside padding": (
        {},
        {"cp": 4, **EXPERTS, "padding_mask": True},
        UNSUPPORTED,
        "moe_z_loss_coeff=0.1 with a padding_mask",
    ),
    "a subclass that computes more": ({}, {"cp": 4, "core": scaled}, UNSUPPORTED, "Scaled"),
    "a delta net with gelu": (
        {},
        {"cp": 4, **HYBRID, "activation_func": F.gelu},
        UNSUPPORTED,
        "layer 2: with activation_func=gelu",
    ),
    "a state in a striped layout": (
        {"layout": "striped", "ulysses_degree": 2},
        {"cp": 4, **HYBRID},
        LayoutError,
        "consecutive",
    ),
}


def test_bad_input_raises_on_every_rank():
    cases = {**REFUSED_BEFORE_GROUPS, **REFUSED_BY_LAYERS}
    for errors in fork_world(raised, 4, cases={name: case[:2] for name, case in cases.items()}):
        for name, (error, has_groups) in errors.items():
            *_, kind, message = cases[name]
            assert isinstance(error, kind), (name, error)
            assert message in str(error), (name, error)
            assert has_groups is (name in REFUSED_BY_LAYERS), name


def test_a_mixer_over_ranks_refuses_inference():
    where = SimpleNamespace(mesh=SimpleNamespace(sp_degree=4))
    mixer = SimpleNamespace(usp_mesh=where, layer_number=3)
    with pytest.raises(UnsupportedAttentionError, match="a Mamba mixer over 4 ranks keeps"):
        mamba_mixer(None, mixer, torch.ones(2, 1, 4), inference_context=object())


def another_mask(ctx: RankContext) -> Exception:
    """Hide one pair more, of a query in the last chunk, which the first rank holds."""
    mask = stock_megatron_core.causal_mask()
    mask[:, :, -1, 0] = True
    stock_megatron_core.causal_mask = lambda: mask
    case = {"ulysses_degree": 2}, {"cp": 4, "dense_mask": True}
    return raised(ctx, cases={"mask": case})["mask"][0]


def test_a_dense_mask_that_says_something_else_is_refused_on_every_rank():
    errors = fork_world(another_mask, 4)
    assert isinstance(errors[0], UnsupportedAttentionError)
    assert all(isinstance(error, MeshError) for error in errors[1:])
    assert all("Pass attention_mask=None" in str(error) for error in errors)


def test_an_unknown_body_is_refused_by_name(monkeypatch):
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def other(self: Any, config: Any) -> None:
        self.config = config

    monkeypatch.setattr(DotProductAttention, "__init__", other)
    with pytest.raises(PatchError, match=r"DotProductAttention.__init__: its source is another"):
        megatron_patches.apply("megatron_core", ulysses_degree=2)
    assert vars(DotProductAttention)["__init__"] is other


class TestTransformerEngine:
    """It needs a GPU, so here are the row, its guard, and the decision with a stand-in class."""

    def row(self) -> Any:
        patches = megatron_patches.patch_set("megatron_core", ulysses_degree=1).patches
        return next(patch for patch in patches if "TEDotProductAttention" in patch.target)

    def test_the_row_is_left_out_without_transformer_engine(self):
        row = self.row()
        assert row.needs == "transformer_engine"
        if not row.applies:
            assert list(row.mismatches()) != []
            megatron_patches.patch_set("megatron_core").verify()

    def test_the_guard_is_the_fingerprint_of_the_installed_source(self, tmp_path, monkeypatch):
        import megatron.core

        module, _, name = self.row().target.partition(":")
        path = Path(megatron.core.__path__[0], *module.split(".")[2:]).with_suffix(".py")
        source = path.read_text()
        (cls,) = (
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ClassDef) and node.name == name.split(".")[0]
        )
        init = next(node for node in cls.body if getattr(node, "name", "") == "__init__")
        (tmp_path / "te_init.py").write_text(
            "from __future__ import annotations\nOptional = {}\n" + ast.unparse(init)
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        import te_init

        assert megatron_patches.fingerprint(te_init.__init__) in self.row().guard.fingerprints

    def test_layers_that_name_another_kind_keep_it_where_some_are_ours(self):
        assert fork_world(mixed_layers, 2) == [["USPCoreAttention", "Stock"]] * 2


def mixed_layers(ctx: RankContext) -> list[str]:
    """What two layers of ``cp_comm_type=["usp", "p2p"]`` are built as."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Stock(torch.nn.Module):
        def __init__(  # type: ignore[no-untyped-def]
            self, config, layer_number, attn_mask_type, attention_type, cp_comm_type="p2p",
            pg_collection=None,
        ):  # fmt: skip
            super().__init__()

    row = TestTransformerEngine().row()
    Stock.__init__ = row.build(Stock.__init__)
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    kinds = ["usp", "p2p"]
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "attention_dropout": 0.0}
    config = TransformerConfig(context_parallel_size=2, cp_comm_type=kinds, **sizes)
    layers = (
        Stock(config, number, AttnMaskType.causal, "self", cp_comm_type=kind)
        for number, kind in enumerate(kinds, 1)
    )
    return [type(layer).__name__ for layer in layers]


GRIDS = {"1x1": (1, 1), "2x1": (2, 2), "1x2": (1, 2), "2x2": (2, 4)}  # ulysses, cp
MLA = {
    "mla": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
}
YARN = {
    **MLA,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
DOCUMENTS = {"documents": ([5, 9, 16], [8, 16, 16])}
M_ROPE = {"mrope_section": [1, 1, 0]}
WINDOWS = {"window_size": (5, 0), "window_attn_skip_freq": 2, "kv_heads": 2}
UP_PROJECTION = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
MODELS = {
    "hybrid": HYBRID,
    "hybrid, packed and padded": {**HYBRID, **DOCUMENTS},
    "MLA": MLA,
    "MLA without a query projection": {**MLA, "q_lora_rank": None},
    "MLA, YaRN": YARN,
    "MLA packed and padded": {**YARN, **DOCUMENTS},
    "windows between full layers, learnable sinks": {**WINDOWS, "softmax_type": "learnable"},
    "windows in turn, softmax off by one": {
        **WINDOWS,
        "window_attn_skip_freq": [1, 0],
        "softmax_type": "off-by-one",
    },
    "packed and padded": {"kv_heads": 2, **DOCUMENTS},
    "ranks with other numbers of loss tokens": {"scheduled": True},
    "multi-token prediction": {"mtp_num_layers": 1, "scheduled": True},
    "multi-token prediction, packed and padded": {
        "mtp_num_layers": 1,
        "calculate_per_token_loss": True,
        **DOCUMENTS,
    },
    "learned positions": {"rotary": False},
    "M-RoPE": M_ROPE,
    "M-RoPE, packed and padded": {**M_ROPE, **DOCUMENTS},
    "experts, all-to-all": {
        **EXPERTS,
        "ep": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": 16,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "experts, all-gather": {**EXPERTS, "ep": 4, "moe_token_dispatcher_type": "allgather"},
}
# What is computed another way, with the same result.
RECOMPUTED = {
    "MLA, YaRN": UP_PROJECTION,
    "packed and padded": CORE,
    "multi-token prediction, packed and padded": {"recompute": True},
    "windows between full layers, learnable sinks": CORE,
}


@pytest.fixture(scope="module")
def one_rank_of() -> dict[str, Any]:
    """Each document alone on one rank: dense attention for MLA, else megatron-core's own."""
    cases = {}
    for name, model in MODELS.items():
        options = {**model, "ep": 1}
        if "documents" in model:
            options["alone"] = True
        cases[name] = ({}, {**options, "core": dense} if "mla" in model else options)
    (results,) = fork_world(programs, 1, cases=cases)
    return results


def dense() -> type:
    return DenseAttention


@pytest.mark.parametrize("grid", GRIDS)
def test_a_mesh_gives_one_ranks_loss_and_gradients(one_rank_of, grid):
    ulysses, cp = GRIDS[grid]
    settings = {"ulysses_degree": ulysses, "everywhere": True}
    cases = {name: (settings, {"cp": cp, **model}) for name, model in MODELS.items()}
    # Of what computes the same in another way all is on both axes, and half on either alone.
    extras = [(f"{name}: recomputed", extra) for name, extra in RECOMPUTED.items()]
    chosen = {"1x1": [], "2x1": extras[::2], "1x2": extras[1::2], "2x2": extras}[grid]
    for name, extra in chosen:
        cases[name] = settings, {**cases[name.partition(": ")[0]][1], **extra}
    if cp == 1:  # megatron-core's own, which refuses documents
        del cases["hybrid, packed and padded"]
    if grid == "2x2":
        for name in ("hybrid", "MLA, YaRN", "M-RoPE", "multi-token prediction"):
            contiguous = {**MODELS[name], "cp": cp, "contiguous": True}
            cases[f"{name}: contiguous"] = {**settings, "layout": "contiguous"}, contiguous
    # Experts lie over replicas too; of all else a replica computes what the first one does.
    experts = {name: cases.pop(name) for name, model in MODELS.items() if "ep" in model}
    for world, alike in ((cp, cases), (4, experts)):
        for results in fork_world(programs, world, cases=alike):
            for name, result in results.items():
                check(name, result, one_rank_of[name.partition(": ")[0]])


def padded_with(ctx: RankContext, *, ulysses: int, model: dict[str, Any]) -> list[Any]:
    """Loss and gradients of the same documents with two other paddings."""
    results = []
    for token in (1, 40):
        case = {"ulysses_degree": ulysses}, {"cp": ctx.world, "padding_token": token, **model}
        (result,) = programs(ctx, cases={"": case}).values()
        results.append((result.loss, {k: x for k, (x, _) in result.gradients.items()}))
    return results


@pytest.mark.parametrize("name", ["packed and padded", "MLA packed and padded"])
def test_what_padding_is_reaches_no_loss_and_no_gradient(name):
    for (loss, gradients), (other_loss, others) in fork_world(
        padded_with, 2, ulysses=1, model=MODELS[name]
    ):
        assert loss == other_loss
        for weight, gradient in gradients.items():
            assert torch.equal(gradient, others[weight]), weight


def named_in_the_spec(ctx: RankContext, *, model: dict[str, Any]) -> float:
    """The loss with the core named in the layer spec, without a patch of megatron-core's."""
    from megatron_patches.megatron_core import cpu_fallbacks_patch_set

    cpu_fallbacks_patch_set().apply()
    with mock.patch("megatron.core.transformer.multi_latent_attention.HAVE_TE", False):
        loss, _ = stock_megatron_core.step(cp=ctx.world, core=partial(usp_core, 2), **model)
    megatron_patches.restore()
    return loss


def test_mla_may_name_the_core_in_its_layer_spec(one_rank_of):
    for loss in fork_world(named_in_the_spec, 2, model=YARN):
        assert loss == pytest.approx(one_rank_of["MLA, YaRN"].loss, rel=LIMIT)
