"""The core attention slot: megatron-core's own result on one rank, and what it refuses."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import RankContext, fork_world

from ds_usp import MaskSpec, MeshError, SequenceMesh, UnsupportedAttentionError
from ds_usp import testing as oracle

S, B, H, G, D = 24, 2, 4, 2, 8
SERVED = {
    "causal": {},
    "no_mask": {"mask": "no_mask"},
    "causal window": {"config": {"window_size": (5, 0)}},
    "window on both sides": {"mask": "no_mask", "config": {"window_size": (5, 3)}},
    "full attention layer between windows": {
        "config": {"window_size": (5, 0), "window_attn_skip_freq": 2},
        "layer_number": 2,
    },
    "own scale": {"softmax_scale": 0.2},
    "softmax off by one": {"config": {"softmax_type": "off-by-one"}},
    "learnable softmax offset": {"config": {"softmax_type": "learnable"}},
}
REFUSED = {
    "dropout": ({"config": {"attention_dropout": 0.1}}, "set attention_dropout=0"),
    "cross-attention": ({"slot": {"attention_type": "cross"}}, "with kv_layout="),
    "splits of a kernel": ({"slot": {"num_splits": 1}}, "leave both out"),
    "one result for all batches": (
        {"config": {"batch_invariant_mode": True}, "backend": "flash"},
        "leave both out",
    ),
    "deterministic kernels without torch's switch": (
        {"config": {"deterministic_mode": True}},
        "torch.use_deterministic_algorithms(True)",
    ),
    "attention in FP8": ({"config": {"fp8_dot_product_attention": True}}, "switch both off"),
    "all of attention in FP8": ({"config": {"fp8_multi_head_attention": True}}, "switch both off"),
    "another softmax": ({"config": {"softmax_type": "none"}}, "off-by-one or learnable"),
    "logged logits": ({"config": {"log_max_attention_logit": True}}, "switch both off"),
    "window into the future": ({"config": {"window_size": (5, 3)}}, "window_size=(5, 0)"),
    "padding mask": ({"mask": "padding"}, "AttnMaskType.causal"),
    "attention mask": ({"call": {"attention_mask": 1}}, "Pass attention_mask=None"),
    "bias": ({"call": {"attention_bias": 1}}, "Pass attention_bias=None"),
    "packed": ({"call": {"packed_seq_params": 1}}, "Pass PackedSeqParams(qkv_format='sbhd'"),
    "other documents of keys": (
        {"packed": ("sbhd", [0, 9, S], [0, 8, S])},
        "must be the same documents",
    ),
    "another mask": ({"call": {"attn_mask_type": "no_mask"}}, "Set attn_mask_type"),
}


def loaded(ctx: RankContext, *, softmax_type: str) -> dict[str, torch.Tensor]:
    """The state after a checkpoint of ``TEDotProductAttention`` was loaded into a layer's slot."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.megatron_core.core_attention import USPCoreAttention

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H * D,
        num_attention_heads=H,
        attention_dropout=0.0,
        softmax_type=softmax_type,
    )
    core = USPCoreAttention(
        mesh=SequenceMesh.single(),
        layout="contiguous",
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
    )
    layer = torch.nn.ModuleDict({"core_attention": core})
    saved = {"core_attention._extra_state": torch.empty(0, dtype=torch.uint8)}
    if softmax_type == "learnable":
        saved["core_attention.softmax_offset"] = torch.arange(float(H))
    layer.load_state_dict(saved, strict=True)
    assert len(saved) == len(layer.state_dict()) + 1
    assert (
        layer.core_attention.sharded_state_dict("core_attention.").keys()
        == layer.state_dict().keys()
    )
    return dict(layer.state_dict())


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_a_checkpoint_of_transformer_engine_loads(softmax_type):
    (state,) = fork_world(loaded, 1, softmax_type=softmax_type)
    if softmax_type != "learnable":
        assert not state
    else:
        assert state["core_attention.softmax_offset"].tolist() == [0.0, 1.0, 2.0, 3.0]


def run(case: dict[str, Any], attention: str, context_parallel_size: int = 1) -> list[torch.Tensor]:
    """Output and gradients of one core attention, from the same numbers each time."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnBackend, AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.megatron_core.core_attention import USPCoreAttention

    parallel_state.initialize_model_parallel()
    mesh = SequenceMesh.single()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=H * D,
        num_attention_heads=H,
        num_query_groups=G,
        context_parallel_size=context_parallel_size,
        masked_softmax_fusion=False,
        attention_backend=AttnBackend[case.get("backend", "auto")],
        **{"attention_dropout": 0.0, **case.get("config", {})},
    )
    common = {
        "config": config,
        "layer_number": case.get("layer_number", 1),
        "attn_mask_type": AttnMaskType[case.get("mask", "causal")],
        "attention_type": "self",
        "softmax_scale": case.get("softmax_scale"),
        **case.get("slot", {}),
    }
    if attention == "megatron-core":
        core = DotProductAttention(**common)
    else:
        layout = mesh.layout("zigzag", seq_len=S)
        core = USPCoreAttention(mesh=mesh, layout=layout, **common)
    for offset in core.parameters():
        offset.data = torch.linspace(-1.0, 3.0, H)
    call = dict(case.get("call", {}))
    if "attn_mask_type" in call:
        call["attn_mask_type"] = AttnMaskType[call["attn_mask_type"]]
    if "packed" in case:
        qkv_format, *borders = case["packed"]
        tensors = (None if each is None else torch.tensor(each) for each in borders)
        call["packed_seq_params"] = PackedSeqParams(qkv_format, *tensors)
    torch.manual_seed(1)
    q, k, v = (torch.randn(S, B, heads, D, requires_grad=True) for heads in (H, G, G))
    out = core(q, k, v, **{"attention_mask": None, **call})
    out.backward(torch.randn(out.shape))
    grads = [x.grad for x in (q, k, v, *core.parameters())]
    return [out.detach(), *grads]


PACKED = {
    "the same documents": [0, 9, 10, S],
    "documents of each sample": [[0, 9, 10, S], [0, S, S, S]],
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_are_the_oracles(name):
    ((out, *grads),) = fork_world(usp_packed, 1, borders=PACKED[name])
    torch.manual_seed(1)
    q, k, v = (torch.randn(S, B, heads, D).transpose(0, 1).double() for heads in (H, G, G))
    for x in (q, k, v):
        x.requires_grad_()
    dout = torch.randn(S, B, H * D).transpose(0, 1).unflatten(2, (H, D)).double()
    rows = PACKED[name] if isinstance(PACKED[name][0], list) else [PACKED[name]] * B
    same = [
        oracle.same_document(range(S), range(S), [b - a for a, b in pairwise(each)])
        for each in rows
    ]
    allowed = torch.stack(same) & oracle.causal(range(S), range(S))
    want, _ = oracle.dense_attention(q, k, v, allowed)
    expected = [want.flatten(2), *torch.autograd.grad(want, (q, k, v), dout)]
    for actual, reference in zip((out, *grads), expected, strict=True):
        assert oracle.relative_error(actual.transpose(0, 1), reference) < 1e-5


def usp_packed(ctx: RankContext, *, borders: list[Any]) -> list[torch.Tensor]:
    return run({"packed": ("sbhd", borders)}, "ours")


def usp_and_stock(ctx: RankContext, *, case: dict[str, Any]) -> list[list[torch.Tensor]]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_patches.megatron_core import cpu_fallbacks_patch_set

    usp = run(case, "ours")
    parallel_state.destroy_model_parallel()
    patches = cpu_fallbacks_patch_set()
    patches.apply()  # megatron-core's own attention asks CUDA for a device and a random state
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        parallel_state.destroy_model_parallel()
        return [usp, run(case, "megatron-core")]
    finally:
        patches.restore()


@pytest.mark.parametrize("name", SERVED)
def test_one_rank_gives_megatron_cores_result(name):
    ((usp, stock),) = fork_world(usp_and_stock, 1, case=SERVED[name])
    for actual, expected in zip(usp, stock, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def refused(ctx: RankContext, **kwargs: Any) -> Exception | None:
    try:
        run(attention="ours", **kwargs)
    except ValueError as error:
        return error
    return None


def test_deterministic_mode_is_torchs():
    (error,) = fork_world(deterministic, 1, case={"config": {"deterministic_mode": True}})
    assert error is None


def deterministic(ctx: RankContext, **kwargs: Any) -> Exception | None:
    torch.use_deterministic_algorithms(True)
    return refused(ctx, **kwargs)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused(name):
    case, message = REFUSED[name]
    (error,) = fork_world(refused, 1, case=case)
    assert isinstance(error, UnsupportedAttentionError)
    assert message in str(error), error


def test_another_group_than_megatron_cores_is_refused():
    (error,) = fork_world(refused, 1, case={}, context_parallel_size=2)
    assert isinstance(error, MeshError)
    assert "context_parallel_size=2" in str(error)


def test_a_dense_mask_is_compared_once_and_again_when_it_changes(monkeypatch):
    from megatron_patches.megatron_core import core_attention

    compared = []
    equals_rule = core_attention._equals_rule
    monkeypatch.setattr(
        core_attention, "_equals_rule", lambda *x: compared.append(x) or equals_rule(*x)
    )
    mesh, mask = SequenceMesh.single(), torch.ones(1, 1, 8, 8).triu(1).bool()
    causal = MaskSpec.causal()
    for _ in range(3):
        core_attention.check_dense_mask(mask, causal, "contiguous", mesh, 8)
    assert len(compared) == 1
    with pytest.raises(UnsupportedAttentionError):
        core_attention.check_dense_mask(mask, MaskSpec.window(4), "contiguous", mesh, 8)
    mask[..., -1, 0] = True
    with pytest.raises(UnsupportedAttentionError):
        core_attention.check_dense_mask(mask, causal, "contiguous", mesh, 8)
    assert len(compared) == 3
