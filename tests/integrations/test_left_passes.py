"""Forward passes that ranks leave by an error: all of them go on, or a new mesh does."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny_diffusers
import tiny_models
import torch
import torch.distributed as dist
import transformers as hf
from cases import mesh_of
from harness import RankContext
from hf_trainer_runs import STEPS, Documents, Split, arguments, restored_environment, tiny_model
from model_runs import BOUND, plain_batch, relative

import ds_usp
from ds_usp.integrations import diffusers, transformers

WORLD, TIMEOUT_S = 4, 90.0
MESSAGE = "CUDA out of memory."  # as accelerate knows it
WAN, SD3 = "WanTransformer3DModel", "SD3Transformer2DModel"


def no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def said_without_memory(run: Callable[[], Any], layer: Any, fails: bool) -> str:
    """What a pass says whose ``layer`` has no memory on some ranks."""
    handle = layer.register_forward_hook(lambda *_: no_memory() if fails else None)
    try:
        run()
    except (RuntimeError, ds_usp.MeshError) as error:
        return str(error)
    finally:
        handle.remove()
    return ""


def llama_steps(ctx: RankContext, failing: list[int]) -> tuple[list[str], list[float], bool]:
    """What the passes say in whose layer or head ranks have no memory, one before each step;
    how far the losses of the steps are from those of one rank; and whether it is
    all over one mesh."""
    model, alone, batch = *(tiny_models.build("llama") for _ in range(2)), plain_batch()
    optimizers = [torch.optim.SGD(x.parameters(), 0.1, momentum=0.9) for x in (model, alone)]
    group = dist.new_group()
    first = mesh = ds_usp.SequenceMesh.from_group(group, 2)
    transformers.enable(model, mesh, recompute="full")
    texts, errors = list[str](), list[float]()
    for layer in (None, model.model.layers[0].mlp, model.lm_head):
        if layer is not None:
            fails = ctx.rank in failing
            texts.append(said_without_memory(lambda: model(**batch), layer, fails))
            if (again := ds_usp.SequenceMesh.from_group(group, 2)) is not mesh:
                mesh = again
                transformers.enable(model, mesh, recompute="full")
        losses = [x(**batch).loss for x in (model, alone)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for x in model.parameters():
            dist.all_reduce(x.grad, group=group)
            x.grad /= ctx.world
        errors.append(abs(float(losses[0].detach() - losses[1].detach())))
        for optimizer in optimizers:
            optimizer.step()
    return texts, errors, mesh is first


def test_a_llama_goes_on_over_a_new_mesh_after_a_pass_that_one_rank_left(pool):
    """With its weights and its optimizer."""
    results = pool.run(llama_steps, WORLD, timeout=TIMEOUT_S, failing=[1])
    for rank, (texts, errors, same) in enumerate(results):
        assert max(errors) < BOUND and not same
        for text in texts:
            assert MESSAGE in text and (rank == 1 or "rank 1: it has left a forward" in text), text
            assert rank == 1 or "enable(model, mesh) again" in text


def test_a_llama_goes_on_over_its_mesh_after_a_pass_that_every_rank_left(pool):
    for texts, errors, same in pool.run(llama_steps, WORLD, failing=[0, 1, 2, 3]):
        assert max(errors) < BOUND and same and texts == [MESSAGE] * 2


def refused_move(ctx: RankContext) -> tuple[str, float]:
    """What ``enable`` on a new mesh says where one rank gives another option; and how far the loss
    over the old mesh is from that of one rank then."""
    model, alone, batch = *(tiny_models.build("llama") for _ in range(2)), plain_batch()
    group = dist.new_group()
    transformers.enable(model, ds_usp.SequenceMesh.from_group(group, 2))
    again = ds_usp.SequenceMesh.from_group(group, 4)
    with pytest.raises(ds_usp.USPError) as refused:
        transformers.enable(model, again, loss_chunks=-1 if ctx.rank == 1 else 0)
    return str(refused.value), abs(float(model(**batch).loss - alone(**batch).loss))


def test_a_refused_move_leaves_every_rank_on_the_mesh_it_had(pool):
    for text, error in pool.run(refused_move, WORLD, timeout=TIMEOUT_S):
        assert "loss_chunks" in text and error < BOUND, text


def refused_dit_move(ctx: RankContext) -> tuple[str, float, int]:
    """What ``enable`` on a new mesh says where one rank has another epsilon, put right then; how
    far a pass over the old mesh is from that of one rank, and how often it was compared there."""
    model, given = tiny_diffusers.build(WAN).eval(), tiny_diffusers.arguments(WAN)
    group, norm = dist.new_group(), model.blocks[0].norm1
    with torch.no_grad():
        want = tiny_diffusers.output_of(model, given)
        mesh = ds_usp.SequenceMesh.from_group(group, 2)
        enabled = diffusers.enable(model, mesh)
        stock, norm.eps = norm.eps, 1.0 if ctx.rank == 1 else norm.eps
        with pytest.raises(ds_usp.MeshError) as refused:
            diffusers.enable(model, ds_usp.SequenceMesh.from_group(group, 4))
        norm.eps, before = stock, mesh.consistency.number
        error = relative(tiny_diffusers.output_of(model, given), want)
        mesh.check()
        compared = mesh.consistency.number - before
        enabled.disable()
        assert torch.equal(tiny_diffusers.output_of(model, given), want)
    return str(refused.value), error, compared


def test_a_refused_move_leaves_a_diffusion_transformer_on_the_mesh_it_had(pool):
    for text, error, compared in pool.run(refused_dit_move, WORLD, timeout=TIMEOUT_S):
        assert "norm1.eps" in text and error < BOUND and compared > 4, (text, error, compared)


def generated_by_one(ctx: RankContext) -> list[str | float]:
    """Rank 0 prints a sample, as programs do, and then goes on; then a backward pass comes late."""
    model, batch = tiny_models.build("llama"), plain_batch()
    want, results = float(model(**batch).loss), list[str | float]()
    with transformers.enable(model, mesh_of(2), recompute="full") as enabled:
        model(**batch)
        with pytest.raises(ds_usp.MeshError) as error, torch.no_grad():
            if ctx.rank == 0:
                model.generate(batch["input_ids"], max_new_tokens=2)
            model(**batch)
        results.append(str(error.value))
        for _ in range(2):
            out = model(**batch)
            results.append(float(out.loss) - want)
        with enabled.paused(), pytest.raises(ds_usp.UnsupportedAttentionError) as late:
            out.loss.backward()
        return [*results, str(late.value)]


def test_a_model_that_one_rank_has_paused_is_enabled_on_it(pool):
    """It would compute its next pass alone, and the other rank wait for it."""
    for said, *errors, late in pool.run(generated_by_one, 2, timeout=TIMEOUT_S):
        assert "rank 0: the end of paused() or generate, which all ranks call" in said
        assert max(map(abs, errors)) < BOUND
        assert "paused before a backward pass" in late


def dit_passes(
    ctx: RankContext, name: str, cfg_degree: int, failing: list[int]
) -> list[tuple[str, float]]:
    """What the passes say in whose blocks ranks have no memory, and the error of one after each."""
    model, given = tiny_diffusers.build(name).eval(), tiny_diffusers.arguments(name)
    group, results = dist.new_group(), []
    with torch.no_grad():
        want = tiny_diffusers.output_of(model, given)
        blocks = model.blocks if name == WAN else model.transformer_blocks
        mesh = ds_usp.SequenceMesh.from_group(group, 2)
        diffusers.enable(model, mesh, cfg_degree=cfg_degree)
        for layer in (blocks[0], blocks[1]):
            run = lambda: tiny_diffusers.output_of(model, given)  # noqa: E731
            text = said_without_memory(run, layer, ctx.rank in failing)
            if (again := ds_usp.SequenceMesh.from_group(group, 2)) is not mesh:
                mesh = again
                diffusers.enable(model, mesh, cfg_degree=cfg_degree)
            results.append((text, relative(run(), want)))
    return results


@pytest.mark.parametrize(("name", "cfg_degree"), [(WAN, 1), (SD3, 2)])
@pytest.mark.parametrize("failing", [[1], [0, 1, 2, 3]], ids=["one", "all"])
def test_a_diffusion_transformer_goes_on_after_a_pass_that_ranks_left(
    pool, name, cfg_degree, failing
):
    case = {"name": name, "cfg_degree": cfg_degree, "failing": failing}
    for rank, each in enumerate(pool.run(dit_passes, WORLD, timeout=TIMEOUT_S, **case)):
        for text, error in each:
            assert error < BOUND and MESSAGE in text
            assert (text == MESSAGE) == (rank in failing)


def enabled_wrongly(ctx: RankContext) -> None:
    layout = "nonsense" if ctx.rank == 1 else "auto"
    transformers.enable(tiny_models.build("llama"), mesh_of(2), layout=layout)


def test_what_enable_refuses_on_one_rank_it_refuses_on_all(pool):
    for rank, error in enumerate(pool.errors(enabled_wrongly, WORLD, timeout=TIMEOUT_S)):
        assert isinstance(error, ds_usp.USPError)
        assert isinstance(error, ds_usp.MeshError) == (rank != 1)


class AtLastStep(hf.TrainerCallback):
    """Changes a weight on this rank alone, which no later pass is there to find."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == state.max_steps:
            with torch.no_grad():
                next(model.parameters()).add_(1.0)


def train(ctx: RankContext, changes: bool, auto: bool) -> tuple[str, int, int]:
    """What training says at its end, its steps, and the batch size with which it took them: with
    ``auto`` the first one is too large for every rank."""
    with restored_environment():
        trainer = hf.Trainer(
            model=tiny_model(),
            args=hf.TrainingArguments(**arguments(Split(2), 1, micro=4, auto_find_batch_size=auto)),
            train_dataset=Documents(),
            data_collator=hf.DataCollatorWithFlattening(),
            callbacks=[AtLastStep()] if changes and ctx.rank == 1 else [],
        )
        mesh = ds_usp.SequenceMesh.from_group(dist.new_group(), 2)
        transformers.attach(trainer, mesh)
        trainer.model.model.layers[1].register_forward_pre_hook(
            lambda *_: no_memory() if auto and trainer._train_batch_size > 2 else None
        )
        text = ""
        try:
            trainer.train()
        except ds_usp.MeshError as error:
            text = str(error)
        return text, trainer.state.global_step, trainer._train_batch_size


def test_a_difference_after_the_last_pass_of_training_is_found(pool):
    for text, *_ in pool.run(train, 2, timeout=TIMEOUT_S, changes=True, auto=False):
        assert "on rank 0" in text and "on rank 1" in text and "weights of the model differ" in text
    for text, steps, _ in pool.run(train, 2, timeout=TIMEOUT_S, changes=False, auto=False):
        assert (text, steps) == ("", STEPS)


def test_a_trainer_finds_a_batch_size_that_fits(pool):
    """``auto_find_batch_size`` starts again when no rank has enough memory."""
    for text, steps, rows in pool.run(train, 2, timeout=TIMEOUT_S, changes=False, auto=True):
        assert (text, steps, rows) == ("", STEPS, 2)
