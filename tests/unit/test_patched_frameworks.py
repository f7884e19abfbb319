"""Patches of Megatron-DeepSpeed and Megatron-LM, as far as they need no checkout."""

import contextlib
import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from argument_page import named, plain, unnamed
from torch import Tensor

import ds_usp
import megatron_patches
from ds_usp import testing as oracle
from ds_usp.errors import ConfigError
from ds_usp.planner import ModelShape, ParallelConfig, Workload
from ds_usp.training import apply_rotary
from megatron_patches import missing_modules, run
from megatron_patches.flags import solved_ratio
from megatron_patches.megatron_core.context_parallel import check_degrees
from megatron_patches.megatron_deepspeed import CHECKOUT, compat, speedups, state
from megatron_patches.megatron_deepspeed.arguments import _choose_flash
from megatron_patches.megatron_deepspeed.attention import SequenceParallelAttention, rotary_table
from megatron_patches.megatron_deepspeed.groups import group_table, make_grid
from megatron_patches.megatron_deepspeed.state import FrameworkState
from megatron_patches.megatron_deepspeed.unsupported import refuse_framework_failures
from megatron_patches.megatron_lm import connections, unsupported
from megatron_patches.megatron_lm.context_parallel_kind import NotGiven, is_mixed, resolve, uses_usp
from megatron_patches.megatron_lm.planned import key_value_heads, planned_run
from megatron_patches.step import dropout_seeds

TOKENS, BATCH, HEAD_DIM = 24, 2, 16


def test_a_table_holds_the_positions_of_its_rank():
    layout = ds_usp.TokenLayout("zigzag", TOKENS, 2, 2)
    for rank in range(4):
        x = torch.randn(layout.length(rank), BATCH, 3, HEAD_DIM)
        table = rotary_table(layout, rank, HEAD_DIM, 10000.0, x.device)
        expected = oracle.rotated(x, layout.positions(rank), HEAD_DIM, 10000.0, token_dim=0)
        (rotated,) = apply_rotary([x], *table, token_dim=0)
        assert oracle.relative_error(rotated, expected) < 1e-6


def test_groups_that_are_destroyed_leave_no_documents(monkeypatch):
    """The next run's batches may have no mask of their own."""
    holder = ModuleType("megatron.core.parallel_state")
    monkeypatch.setattr(state, "_holder", lambda: holder)
    assert state.current_mask().is_causal
    state.set_mask(ds_usp.MaskSpec.causal(((0, 3, TOKENS),)))
    assert not state.current_mask().is_causal
    state.set_state(None)
    assert state.current_mask().is_causal


@pytest.mark.parametrize("rotary_dim", [0, HEAD_DIM])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_a_layers_attention_from_its_projection(heads, kv_heads, rotary_dim):
    """The projection's features are all queries, then all keys, then all values."""
    mesh = ds_usp.SequenceMesh.single()
    state = FrameworkState(
        ds_usp.RankGrid({}), mesh, mesh.layout("zigzag", TOKENS), kernel="auto", active=True
    )
    layer = SimpleNamespace(
        num_attention_heads_per_partition=heads,
        num_key_value_heads_per_partition=kv_heads,
        hidden_size_per_attention_head=HEAD_DIM,
    )
    attention = SequenceParallelAttention(
        state, layer, rotary_dim=rotary_dim, rotary_base=1e4, flash=None
    )
    assert not attention.state_dict()
    q = torch.randn(TOKENS, BATCH, heads, HEAD_DIM)
    k, v = torch.randn(2, TOKENS, BATCH, kv_heads, HEAD_DIM)
    out = attention(torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1))
    assert out.is_contiguous()
    if rotary_dim:
        rotate = partial(oracle.rotated, positions=range(TOKENS), dim=rotary_dim, base=1e4)
        q, k = (rotate(x, token_dim=0) for x in (q, k))
    expected, _ = oracle.dense_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), oracle.causal(range(TOKENS), range(TOKENS))
    )
    assert oracle.relative_error(out, expected.transpose(0, 1).flatten(2)) < 1e-6


def test_the_apex_stubs_compute_what_apex_does():
    apex_modules = compat.apex_modules()
    norm = apex_modules["apex.normalization"].MixedFusedRMSNorm(8, 1e-5, sequence_parallel=True)
    x = torch.randn(3, 8)
    assert torch.equal(norm(x), F.rms_norm(x, (8,), norm.weight, 1e-5))
    function = apex_modules["apex.normalization.fused_layer_norm"].FusedLayerNormAffineFunction
    weight, bias = torch.randn(2, 8)
    arguments = (x, weight, bias, torch.Size([8]), 1e-5)
    assert torch.equal(function.apply(*arguments), F.layer_norm(x, (8,), weight, bias, 1e-5))
    applier = apex_modules["apex.multi_tensor_apply"].multi_tensor_applier
    tensors, overflow = [torch.randn(5), torch.randn(2, 3)], torch.zeros(1, dtype=torch.int)
    flat = torch.cat([t.flatten() for t in tensors])
    norm_of_all, _ = applier(apex_modules["amp_C"].multi_tensor_l2norm, overflow, [tensors], False)
    assert torch.allclose(norm_of_all, flat.norm())
    targets = [torch.empty_like(t) for t in tensors]
    applier(apex_modules["amp_C"].multi_tensor_scale, overflow, [tensors, targets], 0.5)
    assert all(torch.equal(a * 0.5, b) for a, b in zip(tensors, targets, strict=True))
    for name in ("FusedAdam", "FusedSGD"):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = getattr(apex_modules["apex.optimizers"], name)(
            [weight], lr=0.1, weight_decay=0.0
        )
        weight.grad = torch.ones(3)
        optimizer.step()
        assert torch.allclose(weight, torch.full((3,), 0.9))


def test_using_a_stub_raises_with_what_to_install():
    row = missing_modules.Stub("nemo", "nemo", "fishing: pip install nemo")
    module = missing_modules._MissingModule(row)
    tokenizer = module.AutoTokenizer
    for use in (lambda: tokenizer("x"), lambda: tokenizer.from_pretrained, lambda: bool(tokenizer)):
        with pytest.raises(ConfigError, match=r"nemo is not installed, .*AutoTokenizer was used"):
            use()
    assert not hasattr(module, "__path__")  # what import asks of every module


def test_a_path_in_no_checkout_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        CHECKOUT.find(tmp_path / "nowhere")
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    for refused in (
        lambda: CHECKOUT.find(script),
        lambda: run.main([str(script), "--flag"]),
        lambda: megatron_patches.check("megatron_deepspeed", tmp_path),
    ):
        with pytest.raises(ConfigError, match="is in no checkout of Megatron-DeepSpeed"):
            refused()
    with pytest.raises(ConfigError, match="give the path of a checkout"):
        megatron_patches.check("megatron_deepspeed")
    with pytest.raises(ConfigError, match="no script to run"):
        run.main(["--local_rank=0"])


SPAWNS = """
import multiprocessing
print("the script as", __name__, __file__)
if __name__ == "__main__":
    print("the queue", multiprocessing.get_context("spawn").Manager().Queue().qsize())
"""


def test_a_process_that_a_script_spawns_does_not_run_the_script(tmp_path):
    """Megatron-LM saves checkpoints beside such a process, in which nothing is patched."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    program = "import sys; from pathlib import Path; from megatron_patches.run import run_as_main\n"
    done = subprocess.run(
        [sys.executable, "-c", program + "run_as_main(Path(sys.argv[1]))", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"the script as __main__ {script}\nthe queue 0\n", done.stderr


def test_the_framework_is_that_of_the_innermost_checkout(tmp_path):
    outer, inner, both = (tmp_path / name for name in ("outer", "outer/inner", "both"))
    for root, arguments in (
        (outer, ("megatron/arguments.py",)),
        (inner, ("megatron/training/arguments.py",)),
        (both, ("megatron/arguments.py", "megatron/training/arguments.py")),
    ):
        for marker in (*arguments, "megatron/core/parallel_state.py", "pretrain_gpt.py"):
            (root / marker).parent.mkdir(parents=True, exist_ok=True)
            (root / marker).touch()
    assert megatron_patches.framework_of(outer / "pretrain_gpt.py") == "megatron_deepspeed"
    assert megatron_patches.framework_of(inner / "pretrain_gpt.py") == "megatron_lm"
    with pytest.raises(ConfigError, match=r"is a checkout of .* at once"):
        megatron_patches.framework_of(both / "pretrain_gpt.py")


def test_another_loaded_megatron_is_refused(tmp_path, monkeypatch):
    other = ModuleType("megatron")
    other.__path__ = ["/elsewhere/megatron"]
    monkeypatch.setitem(sys.modules, "megatron", other)
    before = list(sys.path)
    with pytest.raises(ConfigError, match="megatron is loaded already, from /elsewhere/megatron"):
        CHECKOUT.prepend_to_path(tmp_path)
    assert sys.path == before


def test_dropout_seeds_differ_over_ranks_with_other_tokens():
    """One seed a pipeline stage, replica and shard; tensor-parallel ranks share the first."""
    ranks = [
        {"pp": pp, "dp": dp, "sp": sp, "tp": tp}
        for pp, dp, sp, tp in itertools.product(range(2), repeat=4)
    ]
    seeds = [dropout_seeds(1234, step, **rank) for step in range(2) for rank in ranks]
    assert len({replicated for replicated, _ in seeds}) == len(seeds) / 2
    split = {tensor_parallel for _, tensor_parallel in seeds}
    assert len(split) == len(seeds)
    assert not split & {replicated for replicated, _ in seeds}
    for rank in ranks:
        shared = [dropout_seeds(1234, 0, **{**rank, "tp": tp})[0] for tp in range(4)]
        assert len(set(shared)) == 1


# The axes that differ inside a group of this name. That a grid's groups are right: test_degrees.py.
DIFFER = {
    "_TENSOR_MODEL_PARALLEL_GROUP": ("tp",),
    "_ULYSSES_PARALLEL_GROUP": ("ulysses",),
    "_RING_PARALLEL_GROUP": ("ring",),
    "_SEQUENCE_PARALLEL_GROUP": ("ulysses", "ring"),
    "_DATA_PARALLEL_GROUP": ("dp",),
    "_SEQUENCE_DATA_PARALLEL_GROUP": ("ulysses", "ring", "dp"),
    "_PIPELINE_MODEL_PARALLEL_GROUP": ("pp",),
    "_MODEL_PARALLEL_GROUP": ("tp", "pp"),
    "_AMAX_REDUCTION_GROUP": ("tp", "ulysses", "ring", "dp"),
}


@pytest.mark.parametrize("degrees", [(2, 3, 2, 2, 3), (3, 2, 1, 2, 2), (1, 2, 2, 3, 1)], ids=str)
def test_a_groups_name_says_its_axes(degrees):
    tp, ulysses, ring, _, pp = degrees
    grid = make_grid(math.prod(degrees), tp=tp, ulysses=ulysses, ring=ring, pp=pp)
    assert tuple(grid.size(axis) for axis in ("tp", "ulysses", "ring", "dp", "pp")) == degrees
    assert grid.order == ("tp", "ulysses", "ring", "dp", "pp")
    table = group_table(grid, use_fp8=True)
    assert table.keys() - DIFFER.keys() == {"_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GROUP"}
    for name, axes in DIFFER.items():
        assert sorted(table[name]) == sorted(grid.groups(*axes)), name
    pipelines = grid.groups("pp")
    ends = {(ranks[0], ranks[-1]) if pp > 1 else ranks for ranks in pipelines}
    assert set(table["_EMBEDDING_GROUP"]) == ends
    assert set(table["_POSITION_EMBEDDING_GROUP"]) == {ranks[:1] for ranks in pipelines}


@pytest.mark.parametrize(
    ("split", "words", "positions"), [(1, (0, 2, 6), (0, 2)), (3, (0, 6), (0, 6))]
)
def test_a_decoder_that_begins_at_a_stage_has_embeddings_too(split, words, positions):
    table = group_table(make_grid(8, tp=2, ulysses=1, ring=1, pp=4), split)
    assert table["_EMBEDDING_GROUP"][0] == words
    assert table["_POSITION_EMBEDDING_GROUP"][0] == positions


def test_a_world_that_does_not_divide_is_refused():
    for world in (6, 12):
        with pytest.raises(ConfigError, match=r"--tensor-model-parallel-size 4 x .* = 8 ranks"):
            make_grid(world, tp=4, ulysses=2, ring=1, pp=1)


PLAIN = {
    **dict.fromkeys(
        (
            *("checkpoint_activations", "checkpoint_in_cpu", "contigious_checkpointing"),
            *("deepspeed_activation_checkpointing", "cpu_optimizer", "cpu_torch_adam"),
            *("distribute_checkpointed_activations", "distribute_saved_activations"),
            *("init_method_xavier_uniform", "log_optimizer_states_to_tensorboard"),
            *("log_params_norm", "partition_activations"),
        ),
        False,
    ),
    "lazy_mpu_init": None,
    "no_pipeline_parallel": True,
    "optimizer": "sgd",
    "tensor_model_parallel_size": 4,
}
CHECKPOINT = {"checkpoint_activations": True, "deepspeed_activation_checkpointing": True}
PARTITIONED = {**CHECKPOINT, "partition_activations": True}
# Options of Megatron-DeepSpeed, and what the message says to set instead; "": they work.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"distribute_saved_activations": True}, "--usp-offload-ratio 1"),
    ({"distribute_checkpointed_activations": True}, "--usp-offload-ratio 1"),
    ({"init_method_xavier_uniform": True}, "--init-method-std"),
    ({"cpu_optimizer": True, "cpu_torch_adam": True}, "offload the optimizer"),
    ({"log_params_norm": True}, "--log-params-norm"),
    ({"lazy_mpu_init": True}, "--lazy-mpu-init"),
    ({"log_optimizer_states_to_tensorboard": True}, "--optimizer is sgd"),
    ({"checkpoint_activations": True}, "--deepspeed-activation-checkpointing"),
    (PARTITIONED, "--no-pipeline-parallel"),
    ({**CHECKPOINT, "contigious_checkpointing": True}, "--partition-activations"),
    ({}, ""),
    (CHECKPOINT, ""),
    ({"checkpoint_activations": True, "no_pipeline_parallel": False}, ""),
    ({**PARTITIONED, "no_pipeline_parallel": False}, ""),
    ({"log_optimizer_states_to_tensorboard": True, "optimizer": "adam"}, ""),
]


@pytest.mark.parametrize(("options", "fix"), OPTIONS)
def test_options_that_fail_in_the_framework_and_no_others_are_refused(options, fix):
    said = pytest.raises(ConfigError, match=fix) if fix else contextlib.nullcontext()
    with said:
        refuse_framework_failures(SimpleNamespace(**{**PLAIN, **options}))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unused_flash_attention_is_printed_on_rank_0(rank, capsys, monkeypatch):
    names = ("v1", "v2", "triton", "builder")
    config = ds_usp.USPConfig(sp_degree=2, ulysses_degree=1)
    for installed, why in ((None, "flash-attn is not installed"), (object(), "a ring of 2")):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=installed: found)
        args = SimpleNamespace(rank=rank, **{f"use_flash_attn_{name}": False for name in names})
        _choose_flash(args, config)
        assert not capsys.readouterr().out
        args.use_flash_attn_v2 = True
        _choose_flash(args, config)
        printed = capsys.readouterr().out
        assert not args.use_flash_attn_v2
        assert (f"--use-flash-attn-v2: not used, because {why}" in printed or why in printed) == (
            not rank
        )


DEFAULT = NotGiven(["p2p"])


def arguments(**changes: Any) -> SimpleNamespace:
    """Validated arguments of a GPT with 4 ranks a sequence."""
    values = SimpleNamespace(
        num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, kv_channels=8,
        group_query_attention=False, num_query_groups=1, swiglu=False, vocab_size=None,
        untie_embeddings_and_output_weights=False, add_bias_linear=True, seq_length=64,
        position_embedding_type="rope", global_batch_size=4, micro_batch_size=1, bf16=True,
        fp16=False, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None, context_parallel_size=4, world_size=8, rank=0,
        sequence_parallel=False, use_distributed_optimizer=True, overlap_grad_reduce=True,
        recompute_granularity=None, transformer_impl="transformer_engine", cp_comm_type=DEFAULT,
        ulysses_degree=None, usp_kernel="auto", usp_recompute="none", usp_cluster=None,
        usp_mlp_chunks=0, use_torch_fsdp2=False, use_megatron_fsdp=False,
    )  # fmt: skip
    return SimpleNamespace(**(vars(values) | changes))


KINDS: list[tuple[dict[str, Any], bool, list[str]]] = [  # USP computes some layers; the kinds
    ({}, True, ["usp"]),
    ({"cp_comm_type": ["usp"], "ulysses_degree": 2}, True, ["usp"]),
    ({"cp_comm_type": ["usp", "a2a"], "ulysses_degree": 2}, True, ["usp", "a2a"]),
    ({"cp_comm_type": ["p2p"]}, False, ["p2p"]),
    ({"context_parallel_size": 1}, False, ["p2p"]),
    ({"context_parallel_size": 1, "cp_comm_type": ["a2a"]}, False, ["a2a"]),
]
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"cp_comm_type": ["p2p"], "ulysses_degree": 4}, "--ulysses-degree 4"),
    ({"cp_comm_type": ["p2p"], "usp_kernel": "sdpa"}, "--usp-kernel sdpa"),
    ({"cp_comm_type": ["usp", "p2p"], "transformer_impl": "local"}, "local"),
    ({"cp_comm_type": ["ring"]}, "--cp-comm-type ring"),
    ({"cp_comm_type": ["usp"] * 3}, "3 entries, and the model 2"),
]


@pytest.mark.parametrize(("given", "usp", "kinds"), KINDS)
def test_who_computes_context_parallelism(given, usp, kinds):
    args = arguments(**given)
    resolve(args)
    assert (uses_usp(args), is_mixed(args)) == (usp, len(kinds) > 1)
    assert (args.cp_comm_type, type(args.cp_comm_type)) == (kinds, list)


@pytest.mark.parametrize(("given", "number"), CONTRADICTIONS)
def test_a_contradiction_is_refused(given, number):
    with pytest.raises(ConfigError, match=number):
        resolve(arguments(**given))


def test_the_degree_follows_from_what_is_given():
    assert check_degrees(4, None, None) == 4
    assert check_degrees(4, None, [2, 2]) == 2
    assert check_degrees(4, 1, None, heads=2) == 1
    with pytest.raises(ConfigError, match=r"\[2, 2\] is not ulysses x ring = \[4, 1\]"):
        check_degrees(4, 4, [2, 2])


def test_the_planner_reads_the_run():
    run = planned_run(arguments(ulysses_degree=2, tensor_model_parallel_size=2, world_size=16))
    config, model = run.parallel_config(), run.model_shape()
    assert (config.tp, config.ulysses, config.ring, config.dp) == (2, 2, 2, 2)
    assert (config.zero, config.schedule, config.recompute) == (1, "1f1b", "none")
    assert config.overlap_gradients
    assert (model.kv_heads, model.learned_positions) == (8, False)
    virtual = planned_run(
        arguments(
            num_layers=8,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            recompute_granularity="selective",
        )
    ).parallel_config()
    assert (virtual.layers_per_virtual_stage, virtual.recompute) == (2, "attention-only")


def test_every_tensor_parallel_rank_has_a_key_value_head():
    grouped = {"group_query_attention": True, "num_query_groups": 2}
    assert key_value_heads(arguments(**grouped)) == 2
    assert key_value_heads(arguments(**grouped, tensor_model_parallel_size=4)) == 4


def test_only_the_check_sees_one_queue(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    checked = ModuleType("megatron.training.arguments")
    checked.os = os  # type: ignore[attr-defined]
    training = ModuleType("megatron.training")
    training.arguments = checked  # type: ignore[attr-defined]
    for name, module in packages(training, checked):
        monkeypatch.setitem(sys.modules, name, module)

    def seen(**changes: Any) -> str | None:
        args = arguments(**changes)
        resolve(args)
        with connections.not_demanded(args):
            assert checked.os.getenv("PATH") == os.getenv("PATH")
            assert "PATH" in checked.os.environ.copy()
            value: str | None = checked.os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        assert checked.os is os
        return value

    assert seen() == "1"
    assert seen(tensor_model_parallel_size=2) is None
    assert seen(cp_comm_type=["usp", "p2p"]) is None
    assert seen(use_torch_fsdp2=True) is None


def packages(*modules: ModuleType) -> Iterable[tuple[str, ModuleType]]:
    """``sys.modules`` entries of modules, with a parent where there is none."""
    if "megatron" not in sys.modules:
        yield "megatron", ModuleType("megatron")
    for module in modules:
        yield module.__name__, module


def test_a_number_goes_to_a_gpu_without_a_copy(monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(torch, "full", lambda *args, **options: calls.append((args, options)))
    module = speedups.lazy_sync_torch()
    module.tensor(0.5, device=torch.device("cuda", 1), dtype=torch.bfloat16)
    options = {"device": torch.device("cuda", 1), "dtype": torch.bfloat16}
    assert calls == [(((), 0.5), options)]
    for data, device in ((0.5, None), (0.5, "cpu"), ([1, 2], "cpu")):
        assert torch.equal(module.tensor(data, device=device), torch.tensor(data))
    assert len(calls) == 1
    monkeypatch.setattr(torch, "bmm", changed := object())  # as a profiler would
    assert (
        module.bmm is changed
        and module.nn is torch.nn
        and module.Tensor is torch.Tensor
        and torch.tensor is not module.tensor
    )


def test_the_bias_dropout_fusion_of_torchscript_is_off():
    args = SimpleNamespace(
        bias_dropout_fusion=True, masked_softmax_fusion=True, gradient_accumulation_fusion=True
    )
    compat.switch_off_missing_fusions(args)
    assert not args.bias_dropout_fusion


pytest.importorskip("deepspeed")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = ((7, 5), (3,), (1,), (64, 33), (2, 2, 2))


def random_gradients(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The last ones are the largest by far."""
    drawn = (torch.randn(shape) * 10**power for power, shape in enumerate(SHAPES))
    return [x.to(device, dtype) for x in drawn]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", [2, 3.0, math.inf])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_is_deepspeeds(dtype, rank, norm_type, device, monkeypatch):
    """With padding, which does not count, and parameters sharded over ranks or replicated."""
    from deepspeed.runtime.zero import stage_1_and_2

    monkeypatch.setattr(stage_1_and_2.dist, "all_reduce", lambda *_, **__: None)
    optimizer = SimpleNamespace(
        model_parallel_rank=rank,
        dp_process_group=None,
        device=torch.device(device),
        _model_parallel_all_reduce=lambda **_: None,
    )
    counts: list[int] = []

    def deepspeed_norm(self: Any, gradients: Any, params: Any, kind: float) -> Tensor:
        counts.append(len(gradients))
        return stage_1_and_2.DeepSpeedZeroOptimizer.get_grad_norm_direct(
            self, gradients, params, kind
        )

    gradients = random_gradients(device, dtype)
    padding = torch.full((4,), 1e9, dtype=dtype, device=device)
    padding._zero_padding = True  # type: ignore[attr-defined]
    gradients.insert(2, padding)
    params = [
        SimpleNamespace(model_parallel=index in (0, 3), ds_pipe_replicated=index == 1)
        for index in range(len(SHAPES))
    ]
    expected = deepspeed_norm(optimizer, gradients, params, norm_type)
    norm = speedups.gradient_norm(deepspeed_norm, optimizer, iter(gradients), params, norm_type)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6) and norm.dtype == expected.dtype
    assert float(expected) > 1e3
    assert counts[1] <= 3 or norm_type == math.inf  # kinds of parameters, not parameters


def test_gradients_that_foreach_does_not_take_are_left_to_deepspeed():
    mixed = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    for gradients, norm_type in ((mixed, 2), ([], 2), ([torch.ones(2)], math.inf)):
        calls: list[Any] = []
        speedups.gradient_norm(
            lambda *args, calls=calls: calls.append(args[1:]),
            SimpleNamespace(),
            iter(gradients),
            ["owner"],
            norm_type,
        )
        assert calls == [(gradients, ["owner"], norm_type)]
    optimizer = SimpleNamespace(averaged_gradients={0: [None]}, bit16_groups=[[]])
    assert speedups.has_overflow(lambda _: "DeepSpeed's", optimizer) == "DeepSpeed's"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", range(len(SHAPES)))
def test_an_overflow_is_found_in_any_gradient(bad, position, device):
    gradients: list[Any] = random_gradients(device)
    gradients[0].view(-1)[0] = torch.finfo(torch.float32).max
    if bad is not None:
        gradients[position].view(-1)[-1] = bad
    groups = {0: [*gradients[:2], None], 1: gradients[2:]}
    optimizer = SimpleNamespace(averaged_gradients=groups, bit16_groups=[[], []])
    overflow = speedups.has_overflow(pytest.fail, optimizer)
    assert overflow.shape == (1,) and overflow.dtype == torch.bool
    assert bool(overflow) == (bad is not None)


def test_the_page_of_arguments_has_every_field_that_meets_attention():
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    fields = [field.name for field in dataclasses.fields(config.MLATransformerConfig)]
    assert unnamed([*fields, "attention_sparsity"]) == ["attention_sparsity"]


def test_the_page_of_arguments_has_every_refused_one():
    tables = ("_ATTENTION", "_MODEL", "_EXPERTS", "_LOSS", "_SCHEDULE")
    for row in itertools.chain.from_iterable(getattr(unsupported, name) for name in tables):
        flags = {plain(flag) for flag in re.findall(r"--[a-z][\w-]+", f"{row.reason} {row.fix}")}
        assert flags & named(column=2), row.reason


def test_the_offload_ratio_that_auto_stands_for():
    shape = ModelShape("24 layers", 24, 1024, 4096, 8, 8, 32000, gated=False)
    planned = Workload(shape, 65536), ParallelConfig(fused_loss=True, offload_unit="layer")
    cpu = torch.device("cpu")
    ratios = [solved_ratio("auto", *planned, cpu, gib * 2**30) for gib in (200, 50, 40)]
    assert ratios[0] == 0 < ratios[1] < ratios[2] < 1
    assert solved_ratio(0.3, *planned, cpu) == 0.3
    with pytest.raises(ConfigError, match="5 GiB even with everything offloaded"):
        solved_ratio("auto", *planned, cpu, 5 * 2**30)
    with pytest.raises(ConfigError, match="the device is cpu"):
        solved_ratio("auto", *planned, cpu)
