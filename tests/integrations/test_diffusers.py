"""Diffusion transformers on 4 ranks: every class with a plan, at every split of ulysses x ring,
lengths that ranks share unevenly, padded text; checkpointing.

Pipelines: test_diffusion_sampling.py."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import further_diffusers
import pytest
import torch
from cases import mesh_of
from harness import RankContext
from model_runs import BOUND, Result, counted_attention, mean_gradients, relative, take_gradients
from tiny_diffusers import CLASSES, MASKS, VARIANTS, arguments, build, output_of
from torch import Tensor

import ds_usp
from ds_usp.integrations.diffusers import enable, pass_state
from ds_usp.training import prepare_deepspeed

PIXART = "PixArtTransformer2DModel"
WORLD = 4
ULYSSES = (4, 2, 1)
# Fewer tokens than ranks: text before the image, with padding too, and after it.
SHORT_TEXT = ("QwenImageTransformer2DModel", "HunyuanVideoTransformer3DModel")
PERTURBED = torch.tensor([0.0, 0.7])  # of a sample all self-attention is skipped
Errors = dict[str, float]


def cases_of(name: str) -> dict[str, dict[str, Any]]:
    """Arguments of forward passes by what they try."""
    further = name in further_diffusers.CONFIGS
    cases = {"odd": arguments(name, padded=further)}
    if name not in VARIANTS:
        cases["even"] = arguments(name, odd=False)
    if name in MASKS and not further:
        cases["padded"] = arguments(name, padded=True)
    if name in SHORT_TEXT:
        cases["short"] = arguments(name, padded=name in MASKS, text=3)
    if name == "ChromaTransformer2DModel":  # attention adds it to its scores
        cases["even"]["attention_mask"] = torch.rand(2, 8 + 32)
    if name == "LTX2VideoTransformer3DModel":
        cases["even"] |= {"spatio_temporal_guidance_blocks": [0], "perturbation_mask": PERTURBED}
        cases["skipped"] = cases["even"] | {"perturbation_mask": torch.zeros(2)}  # of no sample
    if name == "SkyReelsV2Transformer3DModel":  # diffusion forcing: a timestep for each frame
        cases["even"] |= {"enable_diffusion_forcing": True, "timestep": torch.rand(2, 2) * 20}
    return cases


def meshes_of(case: str, cases: Collection[str]) -> tuple[int, ...]:
    """Ulysses degrees: of lengths that divide the one with a ring, of others either alone, where
    there are both."""
    return (
        (2,)
        if case in ("even", "short", "skipped")
        else (4, 1)
        if case == "padded" or "even" in cases
        else ULYSSES
    )


def forward_and_backward(transformer: Any, *passes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss of some forward passes before one backward pass, and the last output."""
    loss = torch.zeros(())
    for given in passes:
        output = output_of(transformer, given)
        target = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
        loss = loss + ((output - target) ** 2).mean()
    loss.backward()
    return loss.detach(), output.detach()


def alone(transformer: Any, *passes: dict[str, Any]) -> Result:
    return Result(*forward_and_backward(transformer, *passes), take_gradients(transformer))


def on_the_mesh(transformer: Any, *passes: dict[str, Any], divisor: int = WORLD) -> Result:
    """On all ranks; the gradients are their sum by the divisor, the mean."""
    return Result(*forward_and_backward(transformer, *passes), mean_gradients(transformer, divisor))


def computed_again(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A checkpoint that takes keywords, as HunyuanImage gives; diffusers' own takes none."""
    return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False, **kwargs)


def every_case(ctx: RankContext, name: str) -> Errors:
    """Errors by case and mesh, on one of which further classes compute their blocks again in
    backward. Each rank has the truth of its share of the cases, the first one that of the first
    case: layers that are given fewer tokens on the mesh are those that the plan says."""
    transformer, cases = build(name), cases_of(name)
    rank_cases = [case for index, case in enumerate(cases) if index % ctx.world == ctx.rank]
    sharded, inputs = list[Any](), dict[str, list[Any]]()

    def note(layer: torch.nn.Module, given: tuple[Tensor, ...], name: str) -> None:
        of_shard = [x.is_shard(layer, given[0]) for x in sharded]
        inputs.setdefault(name, []).append((given[0].shape, *of_shard))

    for path, layer in transformer.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(partial(note, name=path))
    wants = {case: alone(transformer, cases[case]) for case in rank_cases}
    whole, errors = {path: shapes[0][0] for path, shapes in inputs.items()}, {}
    inputs.clear()
    for ulysses in ULYSSES:
        if name in further_diffusers.CONFIGS and ulysses == 2:
            transformer.enable_gradient_checkpointing(computed_again)
        else:
            transformer.disable_gradient_checkpointing()
        with enable(transformer, mesh_of(ulysses)) as enabled:
            sharded[:] = enabled._sharded
            sharded[0]._given_tokens = sharded[0]._plan.given_tokens(transformer)
            for case, given in cases.items():
                if ulysses not in meshes_of(case, cases):
                    continue
                have = on_the_mesh(transformer, given)
                if case == "skipped":  # counted as attention, or a cache seems to skip blocks
                    with torch.no_grad():
                        output_of(transformer, cases["even"])
                        output_of(transformer, given)
                if case in wants:
                    errors[f"{case}, ulysses {ulysses}"] = have.error(wants[case])
    first = {path: seen[0] for path, seen in inputs.items()}
    if ctx.rank == 0:
        wrong = [path for path, (shape, of) in first.items() if of != (shape != whole[path])]
        assert not wrong, wrong
    return errors


def check(errors: list[Errors], count: int) -> None:
    joined = {name: error for each in errors for name, error in each.items()}
    assert len(joined) == count
    wrong = {name: error for name, error in joined.items() if not error <= BOUND}
    assert not wrong, wrong


@pytest.mark.parametrize("name", [*CLASSES, *VARIANTS])
def test_outputs_and_gradients_are_exact_at_every_split(pool, name):
    errors = pool.run(every_case, WORLD, name=name)
    cases = cases_of(name)
    check(errors, sum(len(meshes_of(case, cases)) for case in cases))


# ------------------------------------------------------------------ gradients


def checkpointed(ctx: RankContext, name: str, reentrant: bool) -> tuple[Errors, int]:
    """Two passes of other lengths before one backward pass, and how often attention ran."""
    transformer = build(name)
    passes = arguments(name, padded=True), arguments(name, odd=False, seed=2)
    if reentrant:  # which computes no gradients unless an input has one
        for given in passes:
            given["hidden_states"].requires_grad_()
    want = alone(transformer, *passes)

    def reentrant_checkpoint(block: Callable[..., Any], *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=True)

    with counted_attention(pass_state) as calls, enable(transformer, mesh_of(2)):
        transformer.enable_gradient_checkpointing(reentrant_checkpoint if reentrant else None)
        have = on_the_mesh(transformer, *passes)
    return {f"rank {ctx.rank}": have.error(want)}, sum(calls)


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        ("QwenImageTransformer2DModel", False),
        ("HunyuanVideoTransformer3DModel", False),
        ("WanTransformer3DModel", True),
    ],
)
def test_checkpointed_blocks_recompute_their_own_pass(pool, name, reentrant):
    errors, calls = zip(*pool.run(checkpointed, WORLD, name=name, reentrant=reentrant), strict=True)
    check(list(errors), WORLD)
    assert set(calls) == {2 * 2 * 2}  # layers, passes, and again


def summed(ctx: RankContext, name: str) -> Errors:
    """Of tokens that are joined, and sharded again, within the transformer too."""
    transformer, given = build(name), arguments(name)
    want = alone(transformer, given)
    with enable(transformer, mesh_of(2), gradients="sum"):
        have = on_the_mesh(transformer, given, divisor=1)
    return {f"rank {ctx.rank}": have.error(want)}


def of_two_meshes(ctx: RankContext) -> Errors:
    """Two meshes with other batches: the mean over all ranks is that of both batches."""
    transformer = build(PIXART)
    batches = [arguments(PIXART, odd=bool(seed), seed=seed) for seed in range(2)]
    batch = batches[ctx.rank // 2]
    both = alone(transformer, *batches)
    loss, output = forward_and_backward(transformer, batch)
    take_gradients(transformer)
    want = Result(loss, output, {name: g / 2 for name, g in both.gradients.items()})
    grid = ds_usp.RankGrid({"ulysses": 1, "ring": 2, "dp": 2})
    with enable(transformer, ds_usp.SequenceMesh.build(grid)):
        have = on_the_mesh(transformer, batch)
    return {f"rank {ctx.rank}": have.error(want)}


# ------------------------------------------------------------------ training


def sharded_parameters(ctx: RankContext) -> Errors:
    """FSDP2, checkpointed, which averages the gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    name = "HunyuanVideoTransformer3DModel"
    transformer, given = build(name), arguments(name, padded=True)
    want = alone(transformer, given)
    enable(transformer, mesh_of(2))
    transformer.enable_gradient_checkpointing()
    ranks = init_device_mesh("cpu", (ctx.world,))
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        fully_shard(block, mesh=ranks)
    fully_shard(transformer, mesh=ranks)
    loss, output = forward_and_backward(transformer, given)
    gradients = {
        name: torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor()
        for name, p in transformer.named_parameters()
    }
    return {f"rank {ctx.rank}": Result(loss, output, gradients).error(want)}


def by_accelerate(model: Any) -> Any:
    """Which wraps it in DDP."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from hf_trainer_runs import restored_environment

    AcceleratorState._reset_state(reset_partial_state=True)
    with restored_environment():
        prepared = Accelerator(cpu=True).prepare(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    return prepared


def replicated(ctx: RankContext, prepare: Callable[[Any], Any]) -> Errors:
    """An engine averages the gradients of replicas."""
    transformer, given = build("WanTransformer3DModel"), arguments("WanTransformer3DModel")
    want = alone(transformer, given)
    enable(transformer, mesh_of(2))
    engine = prepare(transformer)
    assert isinstance(engine, torch.nn.parallel.DistributedDataParallel)
    have = Result(*forward_and_backward(engine, given), take_gradients(transformer))
    return {f"rank {ctx.rank}": have.error(want)}


def zero_step(ctx: RankContext, stage: int) -> float:
    """The relative error of a step under DeepSpeed, checkpointed."""
    prepare_deepspeed()
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    name, rate = "WanTransformer3DModel", 256.0
    transformer, given = build(name), arguments(name)
    before = {name: p.detach().clone() for name, p in transformer.named_parameters()}
    want = alone(transformer, given).gradients
    enable(transformer, mesh_of(2))
    transformer.enable_gradient_checkpointing()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=transformer,
        optimizer=torch.optim.SGD(transformer.parameters(), lr=rate),
        config=config,
        dist_init_required=False,
    )
    output = engine(**given, return_dict=False)[0]
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    engine.backward(((output - target) ** 2).mean())
    engine.step()
    errors = []
    for name, p in transformer.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
            errors.append(((before[name] - p.detach()) / rate - want[name]).norm())
    scale = torch.stack([gradient.norm() for gradient in want.values()]).norm()
    return float(torch.stack(errors).norm() / scale)


@pytest.mark.parametrize("stage", range(4))
def test_a_step_of_zero_is_that_of_one_rank(pool, stage):
    assert max(pool.run(zero_step, WORLD, stage=stage)) <= BOUND


def with_lora() -> Any:
    from peft import LoraConfig

    transformer = build("FluxTransformer2DModel").requires_grad_(False)
    options = {"r": 4, "init_lora_weights": False, "target_modules": ["to_q", "to_v", "to_out.0"]}
    transformer.add_adapter(LoraConfig(**options))
    return transformer


def adapted(ctx: RankContext) -> Errors:
    given = arguments("FluxTransformer2DModel")
    want = alone(with_lora(), given)
    transformer = with_lora()
    with enable(transformer, mesh_of(2)):
        have = on_the_mesh(transformer, given)
    return {f"rank {ctx.rank}": have.error(want)}


TRAINED: dict[str, Callable[[RankContext], Errors]] = {
    "sums, PixArt": partial(summed, name=PIXART),
    "sums, Lumina 2": partial(summed, name="Lumina2Transformer2DModel"),
    "two meshes": of_two_meshes,
    "FSDP2": sharded_parameters,
    "Accelerate": partial(replicated, prepare=by_accelerate),
    "LoRA": adapted,
}


@pytest.mark.parametrize("how", TRAINED)
def test_gradients_are_those_of_one_rank(pool, how):
    check(pool.run(TRAINED[how], WORLD), WORLD)


def add_lora(transformer: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(1)
    options = {"r": 4, "init_lora_weights": False, "target_modules": "all-linear"}
    transformer.add_adapter(LoraConfig(**options), "style")


def widened(transformer: Any) -> None:
    """As a Control LoRA does, which takes twice the channels."""
    old = transformer.pos_embed.proj
    new = torch.nn.Conv2d(2 * old.in_channels, old.out_channels, old.kernel_size, old.stride)
    weight = torch.cat([old.weight, torch.zeros_like(old.weight)], dim=1)
    new.load_state_dict({"weight": weight.detach(), "bias": old.bias.detach()})
    transformer.pos_embed.proj = new


def wrapped(transformer: Any) -> None:
    transformer.context_embedder = torch.nn.Sequential(transformer.context_embedder)


SWITCHES: dict[str, Callable[[Any], None]] = {
    "unloaded": lambda transformer: transformer.unload_lora(),
    "loaded again": add_lora,
    "wrapped": wrapped,
    "widened": widened,
}


def switched(ctx: RankContext) -> tuple[Errors, str]:
    """Errors after each switch of modules that the plan names, of which LoRA wraps two, and what is
    said of one on one rank."""
    name = "SD3Transformer2DModel"
    transformer, twin, given, errors = build(name), build(name), arguments(name), {}
    for each in (transformer, twin):
        add_lora(each)
    with enable(transformer, mesh_of(2)):
        on_the_mesh(transformer, given)
        for what, switch in SWITCHES.items():
            for each in (transformer, twin):
                switch(each)
                each.requires_grad_(True)  # PEFT has frozen the weights
            if what == "widened":
                latents = given["hidden_states"]
                given["hidden_states"] = torch.cat([latents, torch.ones_like(latents)], dim=1)
            errors[f"{what}, rank {ctx.rank}"] = on_the_mesh(transformer, given).error(
                alone(twin, given)
            )
        if ctx.rank == 1:
            transformer.proj_out = torch.nn.Sequential(transformer.proj_out)
        with pytest.raises(ds_usp.MeshError) as error, torch.no_grad():
            transformer(**given)
    return errors, str(error.value)


def test_modules_of_the_plan_may_be_switched(pool):
    errors, messages = zip(*pool.run(switched, WORLD), strict=True)
    check(list(errors), WORLD * len(SWITCHES))
    assert all("They differ in\n  proj_out" in message for message in messages), messages


def compiled(ctx: RankContext, name: str) -> Errors:
    """Two passes of other lengths, so that nothing of one is compiled into the next; after one that
    was not compiled."""
    torch._dynamo.reset()
    transformer = build(name, num_layers=1)
    passes = arguments(name), arguments(name, odd=False, seed=2)
    want = alone(transformer, *passes)
    with enable(transformer, mesh_of(1)):
        with torch.no_grad():
            transformer(**passes[0])
        transformer.compile(backend="aot_eager")  # in place: parameters keep their names
        have = on_the_mesh(transformer, *passes, divisor=ctx.world)
    transformer = build(name, num_layers=1)
    with enable(transformer, mesh_of(1)), torch.no_grad():
        transformer(**passes[0])
        outer = torch.compile(transformer, backend="aot_eager")
        assert relative(outer(**passes[1]).sample, want.logits) < BOUND
    return {f"rank {ctx.rank}": have.error(want)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanTransformer3DModel"])
def test_a_compiled_transformer_is_exact(pool, name):
    check(pool.run(compiled, 2, name=name), 2)


def bf16_errors(ctx: RankContext, name: str) -> tuple[float, float]:
    """Of outputs under autocast to fp32's, on one rank and on the mesh."""
    transformer, given = build(name), arguments(name, padded=True)
    with torch.no_grad():
        want = transformer(**given, return_dict=False)[0]
        with torch.autocast("cpu", torch.bfloat16):
            one = transformer(**given, return_dict=False)[0]
            with enable(transformer, mesh_of(2)):
                have = transformer(**given, return_dict=False)[0]
    assert have.dtype == one.dtype
    return relative(one, want), relative(have, want)


@pytest.mark.parametrize("name", ["WanTransformer3DModel", "HunyuanVideoTransformer3DModel"])
def test_autocast_is_as_exact_as_on_one_rank(pool, name):
    for one, have in pool.run(bf16_errors, WORLD, name=name):
        assert 1e-4 < have < 1.5 * one
