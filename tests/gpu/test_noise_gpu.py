"""Dropout over shards on GPUs: noise of its own on each rank, from the generator of the GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import mesh_of
from gpu_ranks import needs_two, run_on_gpus

pytest.importorskip("peft")
pytest.importorskip("diffusers")  # which the adapters' test on CPUs imports
pytestmark = [needs_two, pytest.mark.several_gpus]


def rank_main(rank: int, world: int, folder: str) -> None:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "integrations"))
    import test_noise
    from training_models import batch_of, gradients, llama

    from ds_usp.integrations.shard_noise import ShardNoise
    from ds_usp.integrations.transformers import enable

    model = test_noise.adapted(llama()).cuda()
    batch = {name: x.cuda() for name, x in batch_of(test_noise.TOKENS).items()}
    enable(model, mesh_of(2))
    masks = test_noise.recorded(model)

    def run() -> dict[str, Any]:
        torch.manual_seed(11)
        model.zero_grad()
        loss = model(**batch).loss
        dropped = {name: x.cpu() for name, x in masks.items()}
        loss.backward()
        drawn = torch.rand(3, device="cuda").cpu(), torch.rand(3)
        return {"dropped": dropped, "gradients": gradients(model), "drawn": drawn}

    results = {"first": run(), "alike": test_noise.alike(run()["dropped"])}
    for name, reentrant in test_noise.CHECKPOINTS.items():
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        results[name] = run()
    noise = ShardNoise(rank)
    torch.cuda.set_sync_debug_mode("error")  # seeding waits for nothing that the GPU computes
    noise.begin(torch.device("cuda"), draws=True)
    torch.rand((), device="cuda")
    noise.end()
    torch.cuda.set_sync_debug_mode("default")
    torch.save(results, Path(folder, f"{rank}.pt"))


def test_each_rank_drops_its_own_elements_and_drops_them_again(tmp_path):
    run_on_gpus(rank_main, 2, str(tmp_path))
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    fractions = of_ranks[0]["alike"].values()
    assert 0.4 < sum(fractions) / len(fractions) < 0.6  # 0.5 is independent
    for kind in ("first", "reentrant", "not reentrant"):
        for first, second in zip(*(results[kind]["drawn"] for results in of_ranks), strict=True):
            assert torch.equal(first, second)
        for results in of_ranks:
            once, again = results["first"], results[kind]
            assert all(
                torch.equal(x, again["dropped"][name]) for name, x in once["dropped"].items()
            )
            for name, gradient in once["gradients"].items():
                torch.testing.assert_close(again["gradients"][name], gradient, rtol=1e-5, atol=1e-6)
