"""Which layers of megatron-core cannot have their projections under the exchanges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import RankContext, fork_world
from overlapped_layers import layers_of, overlap
from stock_megatron_core import gpt_model, step

import megatron_patches
from ds_usp import ConfigError
from ds_usp.experimental import projected_attention

REASONS = {
    "a hook": "a projection has hooks, which only its own call runs",
    "a hook, with weights of ZeRO-3": "a projection has hooks, which only its own call runs",
    "a hook of attention": "core attention has hooks, which only its own call runs",
    "an adapter": "a projection is a Adapted, no ColumnParallelLinear",
    "norms of queries and keys": "queries or keys are normalized between their projection and",
    "checkpoints within": "megatron-core recomputes parts of the layer",
    "features rotated in pairs": "megatron-core's rotary_interleaved is set",
}


def built(case: str) -> Any:
    """A model with something that its layers do not go with."""
    options: dict[str, dict[str, Any]] = {
        "checkpoints within": {"recompute_granularity": "selective"},
        "features rotated in pairs": {"rotary_interleaved": True},
    }
    model = gpt_model(tp=1, cp=2, **options.get(case, {}))
    change(model, case)
    return model


def change(model: Any, case: str) -> None:
    attention = layers_of(model)[1].self_attention
    if "ZeRO-3" in case:
        attention.linear_qkv.weight.ds_id = 0  # as DeepSpeed's partitioned parameters have
    if case.startswith("a hook,") or case == "a hook":
        attention.linear_proj.register_forward_hook(lambda *_: None)
    elif case == "a hook of attention":
        attention.core_attention.register_forward_pre_hook(lambda *_: None)
    elif case == "an adapter":
        kind = type(attention.linear_qkv)
        attention.linear_qkv.__class__ = type("Adapted", (kind,), {})
    elif case == "norms of queries and keys":
        attention.q_layernorm = torch.nn.LayerNorm(4)


def refusals(ctx: RankContext) -> dict[str, str]:
    """What is refused when layers are overlapped, and what an adapter that comes later does."""
    from megatron.core import parallel_state

    megatron_patches.apply("megatron_core", ulysses_degree=2)
    parallel_state.initialize_model_parallel(context_parallel_size=ctx.world)
    messages = {}
    for case in REASONS:
        with pytest.raises(ConfigError) as refused:
            overlap(built(case))
        messages[case] = str(refused.value)

    def adapt(model: Any) -> None:
        overlap(model)
        change(model, "an adapter")

    parallel_state.destroy_model_parallel()
    with pytest.raises(ConfigError) as refused:
        step(cp=ctx.world, change=adapt)
    return messages | {"later": str(refused.value)}


def test_a_layer_that_cannot_be_served_is_refused() -> None:
    for messages in fork_world(refusals, 2):
        for case, reason in REASONS.items():
            assert reason in messages[case], case
            assert messages[case].endswith("(--usp-projection-overlap off)")
        assert "layer 2: a projection is a Adapted" in messages["later"]


def with_hooks(ctx: RankContext) -> list[Any]:
    """Losses without and with hooks that come after the layers were overlapped, the calls of a
    hook, and the reasons that are logged."""
    from megatron.core import parallel_state

    calls: list[int] = []
    reasons: list[str] = []
    projected_attention.warn_plain = lambda reason, mesh: reasons.append(reason)

    def hooked(model: Any) -> None:
        overlap(model, may_be_plain=True)
        projection = layers_of(model)[0].self_attention.linear_qkv
        projection.register_forward_hook(lambda *_: calls.append(1))

    megatron_patches.apply("megatron_core", ulysses_degree=2)
    losses = []
    for changed in (None, hooked):
        losses.append(step(cp=ctx.world, change=changed)[0])
        parallel_state.destroy_model_parallel()
    return [*losses, len(calls), reasons]


def test_hooks_that_come_later_run() -> None:
    for plain, hooked, calls, reasons in fork_world(with_hooks, 2):
        assert hooked == pytest.approx(plain, rel=1e-6)
        assert calls == 1
        assert reasons == [REASONS["a hook"]]


def tables(ctx: RankContext) -> list[Any]:
    """Tables of angles, of their first use under inference mode and later, and of other halves."""
    from megatron_patches.megatron_core.rotary import rotary_table

    options = ("apply_rope_fusion", "rotary_interleaved", "multi_latent_attention")
    attention = SimpleNamespace(
        config=SimpleNamespace(**dict.fromkeys(options, False)),
        pg_collection=SimpleNamespace(cp=ctx.group),
    )
    angles = torch.linspace(-9, 9, 48).view(8, 1, 1, 6)
    hidden = torch.empty(8, 2, 5, dtype=torch.bfloat16)
    with torch.inference_mode():
        rotary_table(attention, angles, None, hidden)
    first = rotary_table(attention, angles, None, hidden)
    again = rotary_table(attention, angles, None, hidden)
    fp32 = rotary_table(attention, angles, None, hidden.float())
    shared = [a is b for a, b in zip(first, again, strict=True)]
    return [angles, first, fp32, shared, first[0].is_inference()]


def test_layers_share_a_table_that_megatron_core_rotates_by() -> None:
    ((angles, bf16, fp32, shared, is_inference),) = fork_world(tables, 1)
    expected = angles.flatten(1).cos(), angles.flatten(1).sin()
    for table, known in zip((*bf16, *fp32), 2 * expected, strict=True):
        assert torch.equal(table, known.to(table.dtype))
    assert shared == [True, True] and not is_inference
