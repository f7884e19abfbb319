"""Everything that ``plan --emit`` writes is started: on gloo ranks, with a tiny model, and trains
as one rank does.

Megatron-DeepSpeed itself is started by tests/megatron_deepspeed/test_mds_parity.py.
"""

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stock_megatron_core
import torch
from harness import RankContext, fork_world
from trainer_runs import (
    PLAIN_SGD,
    TRAINER,
    Numbers,
    degrees,
    relative_difference,
    train,
    trainer_of,
)

import megatron_patches
from ds_usp.planner import ModelShape, ParallelConfig, Workload
from ds_usp.planner.emit import emit

LIMIT = 1e-5
SHAPE = ModelShape("tiny", 2, 32, 64, 4, 2, 64, rope_theta=500000.0, norm_epsilon=1e-3)
GPT = replace(SHAPE, gated=False, tied=True, learned_positions=True, biases=True)
PLAIN = ParallelConfig(tp_sequence=False)
SPREAD = PLAIN.replace(
    ulysses=2, ring=2, recompute="gemm-last", offload_ratio=0.5, offload_unit="layer"
)


def command(work: Workload, split: ParallelConfig, folder: Path) -> list[str]:
    """The trainer's flags that the emitted script comes to, as ``launch.sh`` prints them."""
    (folder / "launch.sh").write_text(f'. "{TRAINER}/launch.sh"\n')
    script = folder / "planned.sh"
    script.write_text(emit("script", work, split))
    settings = {
        "DRY_RUN": "1",
        "DEVICE": "cpu",
        "PRECISION": "fp32",
        "NUM_GPUS": str(split.gpus),
        "TRAIN_ITERS": "2",
    }
    kept = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    done = subprocess.run(
        ["bash", str(script)], env={**kept, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = shlex.split(done.stdout.replace("\\\n", " "))
    (start,) = (n for n, word in enumerate(printed) if word.endswith("pretrain_gpt_usp.py"))
    return printed[start + 1 :]


def trained(ctx: RankContext, *, runs: list[list[str]], folder: str) -> list[tuple[Numbers, Any]]:
    """Loss and gradient norm of two steps of every run, and its arguments."""
    from usp_trainer.arguments import parse

    outcomes = []
    for flags in runs:
        trainer = trainer_of(parse([*flags, "--quiet", "--output-dir", folder]))
        done = [trainer.train(1e-3) for _ in range(2)]
        outcomes.append(([(step.loss, step.grad_norm) for step in done], vars(trainer.args)))
    return outcomes


def test_the_script_starts_the_trainer(tmp_path):
    runs = {}
    for world, split in ((1, PLAIN), (4, SPREAD)):
        commands = [
            command(Workload(shape, 64, 2), split.replace(fused_loss=world > 1), tmp_path)
            for shape in (SHAPE, GPT)
        ]
        ranks = fork_world(trained, world, runs=commands, folder=str(tmp_path))
        runs[world] = ranks[0]
    for (expected, _), (numbers, args) in zip(runs[1], runs[4], strict=True):
        assert relative_difference(numbers, expected) < LIMIT
        assert (args["ulysses_degree"], args["ds_sequence_parallel_size"]) == (2, 4)
        assert (args["usp_recompute"], args["usp_offload_ratio"]) == ("gemm-last", 0.5)
        assert args["usp_loss_chunks"] == 1 and args["layernorm_epsilon"] == 1e-3
    llama, gpt = (args for _, args in runs[4])
    assert llama["rotary_base"] == 500000 and llama["use_rotary_position_embeddings"]
    assert (llama["swiglu"], llama["normalization"]) == (True, "rmsnorm")
    assert (gpt["swiglu"], gpt["normalization"]) == (False, "layernorm")
    assert llama["num_key_value_heads"] == 2 and llama["ffn_hidden_size"] == 64
    for fact in ("disable_bias_linear", "untie_embeddings_and_output_weights"):
        assert llama[fact] and not gpt[fact]
    assert not gpt["use_rotary_position_embeddings"]


@pytest.mark.parametrize("zero", [1, 3])
def test_the_configuration_starts_deepspeed(tmp_path, zero):
    """As the trainer's ``--deepspeed_config``."""
    config = emit("ds-config", Workload(SHAPE, 64, 4), PLAIN.replace(ulysses=2, dp=2, zero=zero))
    (tmp_path / "ds_config.json").write_text(config)
    flags = degrees(sp=2, u=2, zero=zero) + PLAIN_SGD + " --bf16 --clip-grad 1.0"
    emitted_too = f"{flags} --deepspeed_config {tmp_path / 'ds_config.json'}"
    own, emitted = train(4, flags, emitted_too, output_dir=tmp_path)
    assert relative_difference(emitted, own) < LIMIT


# Flag of Megatron-LM -> field of megatron-core's TransformerConfig that its arguments.py fills
# from it. None: a switch.
CONFIG = {
    "--tensor-model-parallel-size": ("tensor_model_parallel_size", int),
    "--context-parallel-size": ("context_parallel_size", int),
    "--pipeline-model-parallel-size": ("pipeline_model_parallel_size", int),
    "--cp-comm-type": ("cp_comm_type", str),
    "--sequence-parallel": ("sequence_parallel", None),
    "--num-layers": ("num_layers", int),
    "--hidden-size": ("hidden_size", int),
    "--num-attention-heads": ("num_attention_heads", int),
    "--ffn-hidden-size": ("ffn_hidden_size", int),
    "--kv-channels": ("kv_channels", int),
    "--num-query-groups": ("num_query_groups", int),
    "--add-qkv-bias": ("add_qkv_bias", None),
    "--qk-layernorm": ("qk_layernorm", None),
    "--normalization": ("normalization", str),
    "--norm-epsilon": ("layernorm_epsilon", float),
    "--attention-dropout": ("attention_dropout", float),
    "--hidden-dropout": ("hidden_dropout", float),
    "--recompute-granularity": ("recompute_granularity", str),
    "--recompute-method": ("recompute_method", str),
    "--recompute-num-layers": ("recompute_num_layers", int),
}
# What Megatron-LM makes of its other flags, which this test does by hand.
OTHERS = {
    "--hierarchical-context-parallel-sizes",
    "--no-create-attention-mask-in-dataloader",
    "--swiglu",
    "--disable-bias-linear",
    "--group-query-attention",
    "--untie-embeddings-and-output-weights",
    "--tokenizer-type",
    "--vocab-size",
    "--seq-length",
    "--max-position-embeddings",
    "--micro-batch-size",
    "--global-batch-size",
    "--bf16",
    "--position-embedding-type",
    "--rotary-base",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
}
CORE = replace(SHAPE, layers=2, hidden=32, heads=8, kv_heads=4, head_dim=8)
MODELS = {
    "llama": CORE,
    "qwen": replace(CORE, qkv_bias=True, qk_norm=True, rope_theta=1e6),
    "gpt": replace(GPT, heads=8, kv_heads=8, head_dim=4),
}


def parsed(text: str) -> dict[str, list[str]]:
    """Flag -> its values."""
    flags: dict[str, list[str]] = {}
    for line in text.replace("\\", "").splitlines():
        name, *values = line.split()
        flags[name] = values
    assert flags.keys() <= CONFIG.keys() | OTHERS
    return flags


def from_flags(text: str) -> tuple[dict[str, Any], dict[str, Any], list[int] | None]:
    """What Megatron-LM gives TransformerConfig, GPTModel and its groups."""
    flags = parsed(text)
    config: dict[str, Any] = {
        field: True if kind is None else kind(flags[flag][0])
        for flag, (field, kind) in CONFIG.items()
        if flag in flags
    }
    config["gated_linear_unit"] = "--swiglu" in flags
    config["activation_func"] = torch.nn.functional.silu if "--swiglu" in flags else None
    config["add_bias_linear"] = "--disable-bias-linear" not in flags
    levels = flags.get("--hierarchical-context-parallel-sizes")
    model = {
        "vocab_size": int(flags["--vocab-size"][0]) + 1,
        "max_sequence_length": int(flags["--max-position-embeddings"][0]),
        "position_embedding_type": flags.get("--position-embedding-type", ["learned_absolute"])[0],
        "rotary_base": int(flags.get("--rotary-base", ["10000"])[0]),
        "share_embeddings_and_output_weights": "--untie-embeddings-and-output-weights" not in flags,
    }
    return config, model, None if levels is None else [int(level) for level in levels]


def from_shape(shape: ModelShape) -> tuple[dict[str, Any], dict[str, Any], None]:
    """The same for one rank, from the model itself."""
    config = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "ffn_hidden_size": shape.ffn,
        "kv_channels": shape.head_dim,
        "num_query_groups": shape.kv_heads,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "normalization": "LayerNorm" if shape.biases else "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gated_linear_unit": shape.gated,
        "activation_func": torch.nn.functional.silu if shape.gated else None,
        "add_bias_linear": shape.biases,
    }
    model = {
        "vocab_size": shape.vocab,
        "max_sequence_length": stock_megatron_core.S,
        "position_embedding_type": "learned_absolute" if shape.learned_positions else "rope",
        "rotary_base": int(shape.rope_theta),
        "share_embeddings_and_output_weights": shape.tied,
    }
    return config, model, None


def core_step(config: dict[str, Any], model: dict[str, Any], levels: Any) -> Any:
    """One forward and backward pass of megatron-core's GPT on its local layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_batch_on_this_cp_rank

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.get("tensor_model_parallel_size", 1),
        context_parallel_size=config.get("context_parallel_size", 1),
        hierarchical_context_parallel_sizes=levels,
    )
    model_parallel_cuda_manual_seed(1)
    settings = {
        **config,
        "activation_func": config["activation_func"] or torch.nn.functional.gelu,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
    }
    made = TransformerConfig(**settings)
    torch.manual_seed(1)
    spec = get_gpt_layer_local_spec(
        qk_layernorm=made.qk_layernorm, normalization=made.normalization
    )
    gpt = GPTModel(made, spec, **model)
    batch = get_batch_on_this_cp_rank(stock_megatron_core.full_batch(False))
    losses = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    loss = (losses * batch["loss_mask"]).sum() / losses.new_tensor(
        stock_megatron_core.B * stock_megatron_core.S
    )
    kinds = {type(m).__name__ for m in gpt.modules() if "Attention" in type(m).__name__}
    return *stock_megatron_core.reduced(gpt, loss), kinds


def core_steps(ctx: RankContext, *, cases: list[Any]) -> list[Any]:
    from megatron.core import parallel_state

    outcomes = []
    for case in cases:
        megatron_patches.apply("megatron_core")  # with no setting: the flags say it all
        outcomes.append(core_step(*case))
        parallel_state.destroy_model_parallel()
        megatron_patches.restore()
    return outcomes


def test_the_flags_of_megatron_core_run_ours():
    """With nothing but ``apply("megatron_core")`` beside them."""
    splits = {(2, 2): "full", (4, 1): "none", (1, 4): "none"}
    pairs = [("llama", pair) for pair in splits] + [(name, (2, 2)) for name in ("qwen", "gpt")]
    emitted = [
        emit(
            "megatron-core",
            Workload(MODELS[name], stock_megatron_core.S, 2),
            ParallelConfig(ulysses=u, ring=r, recompute=splits[u, r], micro_batch=2),
        )
        for name, (u, r) in pairs
    ]
    cases = [from_flags(text) for text in emitted]
    (expected,) = fork_world(core_steps, 1, cases=[from_shape(shape) for shape in MODELS.values()])
    outcomes = fork_world(core_steps, 4, cases=cases)[0]
    for (name, _), (loss, gradients, kinds) in zip(pairs, outcomes, strict=True):
        one_loss, one_gradients, _ = expected[list(MODELS).index(name)]
        assert "USPCoreAttention" in kinds and "DotProductAttention" not in kinds
        assert loss == pytest.approx(one_loss, rel=LIMIT)
        assert gradients.keys() == one_gradients.keys()
        for weight, (gradient, _) in gradients.items():
            true = one_gradients[weight][0]
            assert (gradient - true).norm() <= LIMIT * true.norm() + 1e-12, (name, weight)
