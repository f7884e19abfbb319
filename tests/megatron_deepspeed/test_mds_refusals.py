"""What cannot be trained exactly is refused on every rank, before a group exists."""

from __future__ import annotations

from typing import Any

import pytest
from mds_runs import TrainingServer, flags, losses_of, relative_difference

from ds_usp.errors import ConfigError, LayoutError, PatchError

SP2 = {"sp": 2, "u": 1}
CHECKPOINT = "--checkpoint-activations --deepspeed-activation-checkpointing"
REFUSED = [
    (SP2, "--sequence-parallel", "shards the sequence over tensor-parallel ranks"),
    (SP2, "--ds-sequence-parallel-fpdt", "--ds-sequence-parallel-fpdt has an attention"),
    ({"sp": 2, "u": 3}, "", "--ulysses-degree 3 does not divide --ds-sequence-parallel-size 2"),
    ({"sp": 2, "u": "auto"}, "--usp-cluster b9", "no cluster 'b9'; there are a100"),
    (
        {"sp": 2, "u": "auto"},
        "--usp-cluster l20 --seq-length 9999999 --max-position-embeddings 9999999",
        "--ulysses-degree auto: nothing fits into 46.1 GiB",
    ),
    (SP2, "--usp-cluster l20", "--usp-cluster l20 is for --ulysses-degree auto"),
    ({"sp": 2, "u": 0}, "", "--ulysses-degree 0 must be a whole number of 1 or more"),
    (
        {"sp": 2},
        "--num-attention-heads 1 --kv-channels 64",
        "--ulysses-degree 2 needs at least 2 query heads on each tensor-parallel rank, there are 1"
        ". Use one of 1 (ring 2)",
    ),
    (SP2, "--seq-length 1", "1 tokens leave a rank of ulysses 1 x ring 2 (zigzag) without any"),
    (SP2, "--attention-dropout 0.1", "Set --attention-dropout 0"),
    (SP2, "--attention-dropout 0.1 --use-flash-attn-v2", "Set --attention-dropout 0"),
    ({**SP2, "pipe": True}, "--reset-attention-mask", "Add --no-pipeline-parallel"),
    (
        {"sp": 2, "u": 2},
        "--reset-attention-mask --attention-dropout 0.1 --use-flash-attn-v2",
        "Set --attention-dropout 0",
    ),
    (
        {},
        "--reset-position-ids --use-rotary-position-embeddings",
        "does not reach rotary positions",
    ),
    *((SP2, f"--num-experts{switch} 2", "mixture of experts") for switch in ("", "-switch")),
    (SP2, "--data-efficiency-curriculum-learning", "Train at one length"),
    (SP2, "--random-ltd", "Train at one length"),
    *((SP2, flag, "Train a plain GPT") for flag in ("--kd", "--mos", "--retro-add-retriever")),
    *((SP2, flag, "one token at a time") for flag in ("--inference", "--ds-inference")),
    (SP2, "--log-params-norm", "fails at the first log line. Leave it out"),
    ({}, "--checkpoint-activations", "Add --deepspeed-activation-checkpointing"),
    (SP2, f"{CHECKPOINT} --checkpoint-in-cpu", "where there is no GPU"),
    (SP2, f"{CHECKPOINT} --partition-activations", "calls layers with more arguments"),
    (SP2, "--transformer-impl transformer_engine", "Use --transformer-impl local"),
    ({**SP2, "pipe": True}, "--usp-loss-chunks 2", "--no-pipeline-parallel"),
    (SP2, f"--usp-recompute full {CHECKPOINT}", "leave one of them out"),
    (SP2, "--usp-mlp-chunks 99999", "--usp-mlp-chunks 99999: a rank has"),
    (
        SP2,
        "--usp-states-on-host --cpu-optimizer",
        "--usp-states-on-host and --cpu-optimizer do not go together",
    ),
    (SP2, "--usp-checkpoint-layers 2", "Use --usp-recompute full, or attention"),
    (
        SP2,
        "--usp-checkpoint-layers 2 --usp-recompute full --deepspeed-activation-checkpointing",
        "do not go together: DeepSpeed keeps the input",
    ),
    ({"tp": 2}, "--usp-mlp-chunks 2 --sequence-parallel", "do not go together"),
    ({"tp": 2}, "--usp-projection-overlap recompute", "Use --tensor-model-parallel-size 1, or"),
    (
        SP2,
        "--usp-projection-overlap recompute --usp-recompute gemm-last",
        "both replace the projections",
    ),
    (
        SP2,
        "--usp-projection-overlap recompute --usp-recompute attention",
        "what is saved of attention has no projections. Use --usp-recompute full, or",
    ),
    (
        {**SP2, "pipe": True},
        "--usp-projection-overlap recompute --enable-zbh1-pipeline",
        "Leave out --enable-zbh1-pipeline, or --usp-projection-overlap off",
    ),
    (
        {},
        "--usp-recompute gemm-last --apply-residual-connection-post-layernorm",
        "--apply-residual-connection-post-layernorm do not go together",
    ),
]


def another_class(original: Any, linear: Any, *args: Any, **kwargs: Any) -> None:
    """``RowParallelLinear.__init__`` of a subclass."""
    original(linear, *args, **kwargs)
    linear.__class__ = type("Scaled", (type(linear),), {})


@pytest.mark.parametrize(("degrees", "more", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_unsupported_options_are_refused(
    server: TrainingServer, degrees: dict[str, int], more: str, message: str
) -> None:
    for seen in server.attempt(2, flags(zero=1, more=more, **degrees)):
        assert isinstance(seen.get("refused"), (ConfigError, LayoutError)), seen
        assert message in str(seen["refused"])
        assert not seen["groups"]


def test_partitioned_activations_work_in_a_pipeline(server: TrainingServer) -> None:
    more = f"{CHECKPOINT} --partition-activations"
    ranks = server.run(4, flags(**SP2, tp=2, pipe=True, zero=1, more=more))
    expected = losses_of(server.run(1, flags(zero=1)))
    assert relative_difference(losses_of(ranks), expected) < 1e-5


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--use-flash-attn-v2", "use-flash-attn-v2: not used, because flash-attn is not installed"),
        ("--use-flash-attn-triton", "use-flash-attn-triton: not used, because"),
        ("", ""),
    ],
)
def test_an_unused_flash_attention_is_printed_once(
    server: TrainingServer, more: str, why: str
) -> None:
    server.run(2, flags(**SP2, zero=1, more=more))
    folder = max(server.folder.glob("run*"), key=lambda path: path.stat().st_mtime)
    first, second = ((folder / f"log{rank}").read_text() for rank in range(2))
    assert first.count("not used, because") == bool(why) and why in first
    assert "not used, because" not in second


def test_deepspeeds_configuration_is_read_too(server: TrainingServer) -> None:
    for config, message in (
        ({"sequence_parallel_size": 2}, "Leave it out: --ds-sequence-parallel-size is enough"),
        ({"curriculum_learning": {"enabled": True}}, "Train at one length"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "ZeRO++ and MiCS"),
        ({"optimizer": {"type": "OneBitAdam"}}, "1-bit optimizer"),
    ):
        for seen in server.attempt(2, flags(config=config, **SP2)):
            assert message in str(seen["refused"])


def test_projections_under_exchanges_refuse_what_multiplies_other_weights(
    server: TrainingServer,
) -> None:
    again = "--usp-projection-overlap recompute"
    for config, message in (
        ({"compression_training": {}}, "Leave out compression_training, or"),
        ({"torch_autocast": {"enabled": True}}, "Use --bf16, or --usp-projection-overlap off"),
    ):
        for seen in server.attempt(2, flags(config=config, more=again, **SP2)):
            assert message in str(seen["refused"])
    text = flags(sp=2, u=2, zero=1, more=f"--bf16 --use-flash-attn-v2 {again}")
    for seen in server.attempt(2, text, fake_flash=True):
        assert "Leave out --use-flash-attn-v1 and --use-flash-attn-v2" in str(seen["refused"])
        assert not seen["groups"]


def test_a_linear_layer_of_another_class_is_refused(server: TrainingServer) -> None:
    extra = (("megatron.core.tensor_parallel:RowParallelLinear.__init__", another_class),)
    text = flags(zero=1, more="--usp-projection-overlap recompute", **SP2)
    for seen in server.attempt(2, text, extra=extra):
        assert "dense of layer 1 is a Scaled. Use --usp-proj" in str(seen["refused"])


def test_a_pipeline_with_zero_2_is_refused(server: TrainingServer) -> None:
    for seen in server.attempt(2, flags(pp=2, zero=2, more="--use-rotary-position-embeddings")):
        assert "cannot use ZeRO-2" in str(seen["refused"])
        assert not seen["groups"]


def test_a_second_apply_is_refused(server: TrainingServer) -> None:
    for seen in server.attempt(2, flags(**SP2), applied_before=True):
        assert isinstance(seen["refused"], PatchError)
        assert "patched already" in str(seen["refused"])
