"""ring_flash_attn's adapter for transformers: models of whatever version is there, against one
process. ``scripts/test.sh compat`` runs this file with each of constraints.txt."""

from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import pytest

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import torch
from flash_forward_runs import PACKED, TOKENS, alone, build, error_of, has, sharded, use_flash
from harness import RankContext
from transformers import modeling_flash_attention_utils as home
from transformers.integrations import flash_attention as caller
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_usp.compat import ring_flash_attn
from ds_usp.geometry.layout import TokenLayout

BOUND = 1e-5
OTHER = ((30, 18),)


def lengths_of(rows: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(rows[0])], dtype=torch.int32)


def errors(ctx: RankContext, kinds: list[str], ulysses: int) -> dict[str, Any]:
    """Of each model under the substituted attention; what is held on the way."""
    own, held = caller._flash_attention_forward, {}
    layout = TokenLayout("contiguous", TOKENS, ulysses, ctx.world // ulysses)
    with ring_flash_attn.install(ulysses_degree=ulysses):
        from ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
        from ring_flash_attn.adapters import hf_adapter

        for _ in range(2):  # again: of this group or of another
            substitute_hf_flash_attn(process_group=ctx.group, heads_k_stride=1)
        held["put in both places"] = (
            home._flash_attention_forward is caller._flash_attention_forward is not own
        )
        held["takes what the old one does"] = hf_adapter.check_params(
            own, caller._flash_attention_forward
        ) and not hf_adapter.check_params(own, lambda query_states: None)
        for kind in filter(has, kinds):
            model = use_flash(build(kind))
            for rows in (OTHER, PACKED):  # documents of the last call
                update_ring_flash_attn_params(lengths_of(rows), ctx.group)
                have = sharded(model, ctx, rows, layout)
                held[f"{kind} {rows}"] = error_of(have, alone(kind, rows))
        held["another batch's"] = error_of(have, alone(kind, OTHER))
        queries, *_ = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
            lengths_of(PACKED), True, ctx.rank, ctx.world
        )
        held["for llama3's functions"] = torch.equal(
            hf_adapter.DATA_PARAMS["cu_seqlens_q"], queries
        )
        hf_adapter.use_ring_attn(False)
        held["switched off"] = caller._flash_attention_forward is own
        hf_adapter.use_ring_attn(True)
        held["switched on"] = caller._flash_attention_forward is not own
        (forward,) = hf_adapter.create_ring_flash_attention_forward(ctx.group, 1)
        hf_adapter.use_ring_attn(False)
        home._flash_attention_forward = forward  # as axolotl does, there alone
        try:
            before = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
            ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = hf_adapter.flash_attention_forward
            have = sharded(use_flash(build("llama")), ctx, PACKED, layout)
            held["by its entry"] = error_of(have, alone("llama", PACKED))
        finally:
            ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = before
            home._flash_attention_forward = caller._flash_attention_forward = own
    held["restored"] = home._flash_attention_forward is caller._flash_attention_forward is own
    return held


def test_models_are_those_of_one_process(pool):
    for held in pool.run(errors, 4, kinds=["gemma2", "gpt_oss"], ulysses=2):
        assert held.pop("another batch's") > 1e-3
        wrong = {
            name: value
            for name, value in held.items()
            if value is not True and not (isinstance(value, float) and value <= BOUND)
        }
        assert len(held) >= 9 and not wrong
