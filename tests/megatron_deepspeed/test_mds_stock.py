"""One rank a sequence trains as without patches; and single patches have their effect."""

from __future__ import annotations

import importlib.util
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mds_runs import TrainingServer, flags, losses_of, relative_difference

from megatron_patches.megatron_deepspeed import speedups

ADAM = "--optimizer adam --lr 1e-3 --clip-grad 1.0 --micro-batch-size 1 --hidden-dropout 0.1"
COMPILE = "megatron.data.dataset_utils:compile_helper"


def skip(original: Any) -> None:
    """The index builder is compiled by the server."""


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (1, {"zero": 0}),
        (2, {"zero": 3}),
        (2, {"tp": 2, "zero": 1}),
        (4, {"tp": 2, "pp": 2, "zero": 1}),
    ],
)
def test_one_rank_a_sequence_trains_as_without_patches(
    server: TrainingServer, world: int, degrees: dict[str, Any]
) -> None:
    text = flags(more=ADAM, **degrees)
    stock = server.run(world, text, patched=False, own_weights=True, extra=((COMPILE, skip),))
    patched = server.run(world, text, own_weights=True)
    assert losses_of(patched) == losses_of(stock)
    assert patched[0]["norms"] == stock[0]["norms"]


@pytest.mark.parametrize(
    ("without", "degrees"),
    [
        ("gradients.scatter_gradients", {"sp": 2, "u": 1, "zero": 3}),
        ("gradients.reduce_gradients", {"sp": 2, "u": 1, "pp": 2, "zero": 0}),
    ],
)
def test_without_the_patch_deepspeed_scales_gradients_wrongly(
    server: TrainingServer, without: str, degrees: dict[str, Any]
) -> None:
    right = losses_of(server.run(1, flags(zero=1)))
    world = 2 * degrees.get("pp", 1)
    wrong = [each["losses"] for each in server.run(world, flags(**degrees), without=without)]
    assert abs(wrong[0][0] / right[0] - 1) < 1e-6  # the first loss knows no gradient yet
    assert abs(wrong[0][1] / right[1] - 1) > 1e-3


def test_gelu_is_megatron_deepspeeds(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for GPUs against Megatron-DeepSpeed's in fp64, where rounding is negligible."""
    file = checkout / "megatron" / "model" / "fused_bias_gelu.py"
    spec = importlib.util.spec_from_file_location("hosts_gelu", file)
    assert spec is not None and spec.loader is not None
    stock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)
    function = stock.GeLUFunction
    x = torch.randn(6, 2, 16, dtype=torch.float64).mul(3).requires_grad_()
    bias = torch.randn(16, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(6, 2, 16, dtype=torch.float64)

    def results() -> tuple[torch.Tensor, ...]:
        y = function.apply(x, bias)
        return y, *torch.autograd.grad(y, (x, bias), dy)

    expected = results()
    torchs, used = F.gelu, []

    def gelu(x: torch.Tensor, **options: str) -> torch.Tensor:
        used.append(options)
        return torchs(x, **options)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(F, "gelu", gelu)
    for name, patched in (("forward", speedups.gelu), ("backward", speedups.gelu_backward)):
        wrapped = staticmethod(partial(patched, None))  # without the original
        monkeypatch.setattr(function, name, wrapped)
    patched = results()
    assert used == [{"approximate": "tanh"}]
    for result, original in zip(patched, expected, strict=True):
        torch.testing.assert_close(
            result, original, rtol=1e-6, atol=1e-7
        )  # its constants have 8 digits


def test_tensor_parallel_ranks_wait_for_the_index_of_a_first_run(server: TrainingServer) -> None:
    shutil.rmtree(server.folder / "index-cache", ignore_errors=True)
    assert len(server.run(4, flags(sp=2, u=1, tp=2, zero=1))) == 4
    assert (server.folder / "index-cache").is_dir()


def test_dropout_differs_between_shards_and_is_the_same_again(server: TrainingServer) -> None:
    text = flags(sp=2, u=1, tp=2, zero=1, more="--hidden-dropout 0.2 --bf16")
    first, second = (server.run(4, text, watch_dropout=True) for _ in range(2))
    assert [seen["dropped"] for seen in first] == [seen["dropped"] for seen in second]
    assert [seen["losses"] for seen in first] == [seen["losses"] for seen in second]
    tp0_of_sp0, tp1_of_sp0, tp0_of_sp1, tp1_of_sp1 = (seen["dropped"] for seen in first)
    assert tp0_of_sp0 == tp1_of_sp0 and tp0_of_sp1 == tp1_of_sp1  # they hold the same activations
    for mask, other_mask in zip(tp0_of_sp0, tp0_of_sp1, strict=True):
        assert mask != other_mask
    assert len(set(tp0_of_sp0)) == len(tp0_of_sp0)


def test_dropout_differs_between_replicas(server: TrainingServer) -> None:
    """Data-parallel ranks hold other sequences."""
    text = flags(sp=2, u=1, zero=1, more="--hidden-dropout 0.2 --bf16 --micro-batch-size 1")
    first, second = (server.run(4, text, watch_dropout=True) for _ in range(2))
    assert [seen["dropped"] for seen in first] == [seen["dropped"] for seen in second]
    for masks in zip(*(seen["dropped"] for seen in first), strict=True):
        assert len(set(masks)) == 4


def test_dropout_is_the_same_when_activations_are_recomputed(server: TrainingServer) -> None:
    text = "--hidden-dropout 0.2"
    recompute = " --checkpoint-activations --deepspeed-activation-checkpointing"
    saved, recomputed = (
        losses_of(server.run(2, flags(sp=2, u=1, zero=1, more=more)))
        for more in (text, text + recompute)
    )
    assert relative_difference(recomputed, saved) < 1e-6


@pytest.mark.parametrize("degrees", [{"sp": 2, "u": 2}, {"sp": 2, "u": 1}], ids=["u2", "r2"])
def test_a_flash_attention_that_is_installed_serves_without_a_ring(
    server: TrainingServer, degrees: dict[str, int]
) -> None:
    more = "--bf16 --use-flash-attn-v2 --num-key-value-heads 2"
    ranks = server.run(2, flags(zero=1, more=more, **degrees), fake_flash=True)
    assert all((seen["flash_calls"] > 0) == (degrees["u"] == 2) for seen in ranks)
    expected = losses_of(server.run(1, flags(zero=1, more="--bf16 --num-key-value-heads 2")))
    assert relative_difference(losses_of(ranks), expected) < 2e-4
