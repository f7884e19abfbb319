"""The patches of Megatron-DeepSpeed, as far as they need no checkout."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import ds_usp
import megatron_patches
from ds_usp import testing as oracle
from ds_usp.errors import ConfigError
from ds_usp.training import apply_rotary
from megatron_patches import missing_modules, run
from megatron_patches.megatron_deepspeed import CHECKOUT, compat
from megatron_patches.megatron_deepspeed.attention import SequenceParallelAttention, rotary_table
from megatron_patches.megatron_deepspeed.state import FrameworkState
from megatron_patches.step import dropout_seeds

TOKENS, BATCH, HEAD_DIM = 24, 2, 16


def test_a_table_holds_the_positions_of_its_rank() -> None:
    layout = ds_usp.TokenLayout("zigzag", TOKENS, 2, 2)
    for rank in range(4):
        x = torch.randn(layout.length(rank), BATCH, 3, HEAD_DIM)
        table = rotary_table(layout, rank, HEAD_DIM, 10000.0, x.device)
        expected = oracle.rotated(x, layout.positions(rank), HEAD_DIM, 10000.0, token_dim=0)
        (rotated,) = apply_rotary([x], *table, token_dim=0)
        assert oracle.relative_error(rotated, expected) < 1e-6


@pytest.mark.parametrize("rotary_dim", [0, HEAD_DIM])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_a_layers_attention_from_its_projection(heads: int, kv_heads: int, rotary_dim: int) -> None:
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


def test_the_apex_stubs_compute_what_apex_does() -> None:
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


def test_using_a_stub_raises_with_what_to_install() -> None:
    row = missing_modules.Stub("nemo", "nemo", "fishing: pip install nemo")
    module = missing_modules._MissingModule(row)
    tokenizer = module.AutoTokenizer
    for use in (lambda: tokenizer("x"), lambda: tokenizer.from_pretrained, lambda: bool(tokenizer)):
        with pytest.raises(ConfigError, match=r"nemo is not installed, .*AutoTokenizer was used"):
            use()
    assert not hasattr(module, "__path__")  # what import asks of every module


def test_a_path_in_no_checkout_is_refused(tmp_path: Path) -> None:
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


def test_a_process_that_a_script_spawns_does_not_run_the_script(tmp_path: Path) -> None:
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


def test_the_framework_is_that_of_the_innermost_checkout(tmp_path: Path) -> None:
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


def test_another_loaded_megatron_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("megatron")
    other.__path__ = ["/elsewhere/megatron"]
    monkeypatch.setitem(sys.modules, "megatron", other)
    before = list(sys.path)
    with pytest.raises(ConfigError, match="megatron is loaded already, from /elsewhere/megatron"):
        CHECKOUT.prepend_to_path(tmp_path)
    assert sys.path == before


def test_dropout_seeds_differ_over_ranks_with_other_tokens() -> None:
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
