"""Forward passes that one rank leaves: the others raise at once, and the next pass is exact."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import tiny_diffusers
import tiny_models
import torch
import torch.distributed as dist
from cases import mesh_of, short_patience
from harness import RankContext
from model_runs import BOUND, plain_batch, relative

import ds_usp
from ds_usp.integrations import diffusers, transformers

WORLD, TIMEOUT_S = 4, 60.0
MESSAGE = "CUDA out of memory"
WAN, SD3 = "WanTransformer3DModel", "SD3Transformer2DModel"


def no_memory(*_: Any) -> None:
    raise RuntimeError(MESSAGE)


def said_and_next(run: Callable[[], Any], layer: Any, fails: bool) -> tuple[str, torch.Tensor]:
    """What a pass says whose ``layer`` has no memory on one rank, and the result of the next."""
    handle = layer.register_forward_hook(no_memory) if fails else None
    text = ""
    try:
        run()
    except (RuntimeError, ds_usp.MeshError) as error:
        text = str(error)
    if handle is not None:
        handle.remove()
    return text, run()


def llama_left(ctx: RankContext) -> list[tuple[str, float]]:
    """In a layer before attention's exchanges of the next one, at the head, after the loss."""
    model, batch = tiny_models.build("llama"), plain_batch()
    want = float(model(**batch).loss.detach())
    results = []
    with transformers.enable(model, mesh_of(2)):
        for layer in (model.model.layers[0].mlp, model.lm_head, model):

            def run() -> float:
                loss = model(**batch).loss
                loss.backward()
                return float(loss.detach())

            text, have = said_and_next(run, layer, ctx.rank == 1)
            results.append((text, abs(have - want)))
    return results


def test_a_llama_goes_on_after_a_pass_that_one_rank_left(pool):
    results = pool.run(llama_left, WORLD, timeout=TIMEOUT_S)
    for rank, each in enumerate(results):
        for place, (text, error) in enumerate(each):
            assert MESSAGE in text if rank == 1 or place < 2 else "forward pass" in text, text
            assert error < BOUND, (place, error)
        if rank != 1:
            assert re.search(r"rank 1: it has left forward pass \d+, of Llama", each[0][0])


def passes_ahead(ctx: RankContext) -> list[float]:
    """After rank 0 has tried two passes while rank 1 was in a collective of the caller's."""
    model, batch = tiny_models.build("llama"), plain_batch()
    want, losses = float(model(**batch).loss), []
    with transformers.enable(model, mesh_of(2)), torch.no_grad(), short_patience():
        model(**batch)
        for _ in range(2 if ctx.rank == 0 else 0):
            with pytest.raises(ds_usp.MeshError):
                model(**batch)
        dist.all_reduce(torch.ones(1))
        for _ in range(6):
            with suppress(ds_usp.MeshError):
                losses.append(float(model(**batch).loss) - want)
                break  # on all ranks
    return losses


def test_ranks_of_other_turns_come_together(pool):
    losses = pool.run(passes_ahead, 2, timeout=TIMEOUT_S)
    assert losses[0] and losses[0] == losses[1]
    assert abs(losses[0][0]) < BOUND


def generated_by_one(ctx: RankContext) -> list[str | float]:
    """Rank 0 prints a sample, as programs do, and then goes on; then a backward pass comes late."""
    model, batch = tiny_models.build("llama"), plain_batch()
    want, results = float(model(**batch).loss), list[str | float]()
    with transformers.enable(model, mesh_of(2), recompute="full") as enabled:
        model(**batch)
        if ctx.rank == 0:
            with pytest.raises(ds_usp.MeshError) as error, torch.no_grad():
                model.generate(batch["input_ids"], max_new_tokens=2)
            results.append(str(error.value))
        for _ in range(2):
            out = model(**batch)
            results.append(float(out.loss) - want)
        with enabled.paused(), pytest.raises(ds_usp.UnsupportedAttentionError) as late:
            out.loss.backward()
        return [*results, str(late.value)]


def test_a_model_that_one_rank_has_paused_is_enabled_on_it(pool):
    """It would compute its next pass alone, and the other rank wait for it."""
    (said, *first), second = pool.run(generated_by_one, 2, timeout=TIMEOUT_S)
    assert "rank 0: the end of paused() or generate, which all ranks call" in said
    for *errors, late in (first, second):
        assert max(map(abs, errors)) < BOUND
        assert "paused before a backward pass" in late


def wan_left(ctx: RankContext, name: str, cfg_degree: int) -> list[tuple[str, float]]:
    model, given = tiny_diffusers.build(name).eval(), tiny_diffusers.arguments(name)
    with torch.no_grad():
        want = tiny_diffusers.output_of(model, given)
        blocks = model.blocks if name == WAN else model.transformer_blocks
        results = []
        with diffusers.enable(model, mesh_of(2), cfg_degree=cfg_degree):
            for layer in (blocks[0], blocks[1], model.proj_out):
                text, have = said_and_next(
                    lambda: tiny_diffusers.output_of(model, given), layer, ctx.rank == 1
                )
                results.append((text, relative(have, want)))
    return results


@pytest.mark.parametrize(("name", "cfg_degree"), [(WAN, 1), (SD3, 2)])
def test_a_diffusion_transformer_goes_on_after_a_pass_that_one_rank_left(pool, name, cfg_degree):
    results = pool.run(wan_left, WORLD, timeout=TIMEOUT_S, name=name, cfg_degree=cfg_degree)
    for rank, each in enumerate(results):
        for place, (text, error) in enumerate(each):
            assert error < BOUND, (place, error)
            # When the output has been joined the others have their results, and keep them.
            if rank == 1:
                assert MESSAGE in text
            elif text or place < 2:
                assert "rank 1: it has left forward pass" in text


def enabled_wrongly(ctx: RankContext) -> None:
    layout = "nonsense" if ctx.rank == 1 else "auto"
    transformers.enable(tiny_models.build("llama"), mesh_of(2), layout=layout)


def test_what_enable_refuses_on_one_rank_it_refuses_on_all(pool):
    for rank, error in enumerate(pool.errors(enabled_wrongly, WORLD, timeout=TIMEOUT_S)):
        assert isinstance(error, ds_usp.USPError)
        assert isinstance(error, ds_usp.MeshError) == (rank != 1)
