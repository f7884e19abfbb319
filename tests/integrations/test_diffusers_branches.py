"""The batch of classifier-free guidance split over ranks, beside their tokens; CUDA graphs."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from cases import mesh_of
from graph_tapes import tapes_for_graphs
from harness import RankContext
from model_runs import BOUND, relative
from tiny_diffusers import (
    CLASSES,
    GUIDED,
    arguments,
    build,
    guided_pipeline,
    output_of,
    sd3_pipeline,
    wan_pipeline,
)

import ds_usp
from ds_usp.integrations.diffusers import PLANS, enable, pass_state

WORLD = 4
SPLIT = (
    *("Flux2Transformer2DModel", "QwenImageTransformer2DModel", "LTXVideoTransformer3DModel"),
    *("HunyuanVideoTransformer3DModel", "CogVideoXTransformer3DModel", "SD3Transformer2DModel"),
    *("PixArtTransformer2DModel", "WanVACETransformer3DModel", "ZImageTransformer2DModel"),
)


def errors_of_classes(ctx: RankContext, names: tuple[str, ...]) -> dict[str, float]:
    """Branches of 2 x 1, of 1 x 2 and, of four samples on as many ranks, of one rank."""
    errors = {}
    for name in names:
        transformer, given = build(name).eval(), arguments(name, padded=True)
        with torch.no_grad():
            want = output_of(transformer, given)
            for ulysses in (2, 1):
                with enable(transformer, mesh_of(ulysses), cfg_degree=2) as enabled:
                    have = output_of(transformer, given)
                errors[f"{name}, ulysses {ulysses}"] = relative(have, want)
                assert enabled.mesh.sp_degree == WORLD
    return errors


def test_every_class_may_split_its_batch(pool):
    for errors in pool.run(errors_of_classes, WORLD, names=SPLIT):
        assert len(errors) == 2 * len(SPLIT)
        assert all(error <= BOUND for error in errors.values()), errors


def end_guidance(pipeline: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """After the first step, as diffusers' documentation of dynamic guidance has it."""
    if step:
        return {}
    pipeline._guidance_scale = 0.0
    return {name: x.chunk(2)[-1] for name, x in tensors.items()}


TEXTS = ["prompt_embeds", "pooled_prompt_embeds"]
REQUESTS: dict[str, dict[str, Any]] = {
    "both branches": {},
    "guidance ends": {
        "callback_on_step_end": end_guidance,
        "callback_on_step_end_tensor_inputs": TEXTS,
    },
    "no guidance": {"guidance_scale": 1.0},
    "a branch without a layer": {"skip_guidance_layers": [1], "skip_layer_guidance_stop": 1.0},
}


def sampled(ctx: RankContext) -> dict[str, tuple[float, torch.Tensor]]:
    pipeline, sample = sd3_pipeline()
    wants = {what: sample(pipeline, **options) for what, options in REQUESTS.items()}
    with enable(pipeline, mesh_of(4), cfg_degree=2):
        haves = {what: sample(pipeline, **options) for what, options in REQUESTS.items()}
    return {what: (relative(haves[what], want), haves[what]) for what, want in wants.items()}


def test_a_pipeline_s_guidance_is_one_rank_s(pool):
    """Also where a pass has one branch, which all ranks compute then."""
    by_rank = pool.run(sampled, WORLD)
    for what in REQUESTS:
        assert max(results[what][0] for results in by_rank) <= BOUND, what
        have = by_rank[0][what][1]
        assert all(torch.equal(results[what][1], have) for results in by_rank), what


def of_other_batches(ctx: RankContext) -> dict[str, tuple[float, int]]:
    """By class and samples: the error, and the ranks that compute a sample."""
    results, attention = {}, mock.Mock(wraps=pass_state.usp_attention)
    for name in ("WanTransformer3DModel", "ZImageTransformer2DModel"):
        transformer, given = build(name).eval(), arguments(name)
        with (
            torch.no_grad(),
            enable(transformer, mesh_of(2), cfg_degree=2),
            mock.patch.object(pass_state, "usp_attention", attention),
        ):
            for batch in (2, 3, 1):
                batched = {key: repeated(value, batch) for key, value in given.items()}
                have = output_of(transformer, batched) + 0  # which is read
                want = output_of(build(name).eval(), batched)
                ranks = attention.call_args.kwargs["mesh"].sp_degree
                results[f"{name}, {batch}"] = relative(have, want), ranks
    return results


def repeated(value: Any, batch: int) -> Any:
    """So many samples, the two that are given in turns."""
    if isinstance(value, list):
        return [value[i % 2] for i in range(batch)]
    return value[[i % 2 for i in range(batch)]] if isinstance(value, torch.Tensor) else value


def test_all_ranks_compute_a_batch_that_the_parts_cannot_share(pool):
    for results in pool.run(of_other_batches, WORLD):
        assert max(error for error, _ in results.values()) <= BOUND, results
        assert [ranks for _, ranks in results.values()] == 2 * [2, WORLD, WORLD], results


# ------------------------------------------------------------------ one call a branch


def guided(ctx: RankContext, names: tuple[str, ...]) -> dict[str, tuple[torch.Tensor, float, int]]:
    """By pipeline: latents; on one of the ranks how far they are off those of it alone; and how
    many passes this rank has computed."""
    results = {}
    for index, name in enumerate(names):
        pipeline, sample = wan_pipeline() if name == "WanPipeline" else guided_pipeline(name)
        passes: list[Any] = []
        with enable(pipeline, mesh_of(2), cfg_degree=2) as enabled:
            handles = [
                next(x.children()).register_forward_hook(lambda *_, p=passes: p.append(1))
                for x in enabled.transformers
            ]
            have = sample(pipeline)
        for handle in handles:
            handle.remove()
        error = relative(have, sample(pipeline)) if index % ctx.world == ctx.rank else 0.0
        results[name] = have, error, len(passes)
    return results


def test_branches_of_a_step_are_computed_at_once(pool):
    """As many passes on a rank as steps, also where guidance ends before the last one."""
    names = ("WanPipeline", *GUIDED)
    by_rank = pool.run(guided, WORLD, names=names)
    for name in names:
        have = by_rank[0][name][0]
        assert all(torch.equal(results[name][0], have) for results in by_rank), name
        assert max(results[name][1] for results in by_rank) <= BOUND, name
        steps = 4 if name == "WanPipeline" else 3
        assert [results[name][2] for results in by_rank] == [steps] * WORLD, name


def steps_of_classes(ctx: RankContext) -> dict[str, float]:
    """Both branches of a step by their own calls, of texts with other padding."""
    errors = {}
    for name in CLASSES:
        plan = PLANS[name]
        if plan.shared_by_branches is None:
            continue
        transformer, given = build(name).eval(), arguments(name, padded=True)
        branches = [
            {k: x if k in plan.unbatched else part_of(x, i) for k, x in given.items()}
            for i in range(2)
        ]
        for key in ("hidden_states", "control_hidden_states", "timestep"):
            branches[1] |= {key: branches[0][key]} if key in given else {}

        def step(transformer: Any = transformer, branches: Any = branches) -> torch.Tensor:
            first, second = (transformer(**x, return_dict=False)[0] for x in branches)
            return torch.cat([first, second])

        with torch.no_grad():
            want = step()
            with enable(transformer, mesh_of(2), cfg_degree=2):
                errors[name] = relative(step(), want)
    return errors


def part_of(value: Any, index: int) -> Any:
    """A sample of two of an argument that has both."""
    batched = isinstance(value, (list, torch.Tensor)) and len(value) == 2
    return value[index : index + 1] if batched else value


def test_every_class_computes_both_branches_of_a_step(pool):
    for errors in pool.run(steps_of_classes, WORLD):
        assert len(errors) == 17 and max(errors.values()) <= BOUND, errors


def two_calls(transformer: Any, given: dict[str, Any], cut: int) -> torch.Tensor:
    """A step of a pipeline that edits images: it cuts their tokens off before the second call."""
    shared = {"hidden_states", "timestep", "img_ids", "txt_ids"}
    branches = [
        {
            k: x if k.endswith("ids") else x[:1] if k in shared else x[i : i + 1]
            for k, x in given.items()
        }
        for i in range(2)
    ]
    branches[1]["hidden_states"] = branches[0]["hidden_states"]
    calls = []
    for name, branch in zip(("cond", "uncond"), branches, strict=True):
        with transformer.cache_context(name):
            calls.append(transformer(**branch, return_dict=False)[0][:, :cut])
        branch["timestep"].add_(1)  # which the call must not see
    with transformer.cache_context("cond"):
        last = transformer(**branches[0], return_dict=False)[0][:, :cut].to(torch.float64)
    last.mul_(2)  # which runs the call, by itself, and must be seen below
    return calls[1] + 2 * (calls[0] - calls[1]) + last


def of_a_step(enter: Callable[[], Any], prepare: Callable[[Any], Any]) -> tuple[float, int]:
    """How far a step of two calls is off, and how many passes this rank has computed."""
    name, passes = "FluxTransformer2DModel", list[int]()
    transformer = build(name).eval()
    with enter():
        want = two_calls(transformer, arguments(name), 30)
        with enable(transformer, mesh_of(2), cfg_degree=2):
            transformer.x_embedder.register_forward_hook(lambda *_: passes.append(1))
            prepare(transformer)
            have = two_calls(transformer, arguments(name), 30)
            copied = copy.deepcopy(transformer)
            again = two_calls(copied, arguments(name), 30)
    assert relative(again, want) <= BOUND
    return relative(have, want), len(passes) // 2  # the copy's hook counts here too


def ways_of_a_step(ctx: RankContext) -> list[tuple[float, int]]:
    return [of_a_step(enter, lambda _: None) for enter in (torch.no_grad, torch.inference_mode)]


def test_a_call_that_waits_computes_what_it_was_given(pool):
    for results in pool.run(ways_of_a_step, WORLD):
        assert all(error <= BOUND and passes == 2 for error, passes in results), results


def compiled_step(ctx: RankContext) -> tuple[float, int]:
    return of_a_step(torch.no_grad, lambda x: x.compile_repeated_blocks(backend="eager"))


def test_compiled_blocks_compute_a_branch_each(pool):
    for error, passes in pool.run(compiled_step, WORLD):
        assert error <= BOUND and passes == 2


def graphed_step(ctx: RankContext) -> tuple[float, int, int]:
    """Texts of other lengths: passes of the two ranks are of other kinds. A pass is two graphs,
    with the join between them."""
    name = "WanTransformer3DModel"
    transformer, given = build(name).eval(), arguments(name)
    given = {key: x[:1] for key, x in given.items()}
    longer = given | {"encoder_hidden_states": torch.randn(1, 9, 16).fill_(0.3)}

    def step() -> torch.Tensor:
        first = transformer(**given, return_dict=False)[0]
        return first - transformer(**longer, return_dict=False)[0]

    with torch.no_grad(), tapes_for_graphs() as made:
        want = step()
        with enable(transformer, mesh_of(2), cfg_degree=2, cuda_graphs=True):
            errors = [relative(step(), want) for _ in range(4)]
        return max(errors), len(made), sum(tape.replays for tape in made)


def test_each_branch_is_replayed_from_a_graph(pool):
    for error, made, replays in pool.run(graphed_step, 2):
        assert error <= BOUND and (made, replays) == (2, 2 * 3)


def test_a_cuda_graph_is_refused(monkeypatch):
    name = "FluxTransformer2DModel"
    transformer, given = build(name), arguments(name)
    enable(transformer, ds_usp.SequenceMesh.single())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ds_usp.UnsupportedAttentionError, match="CUDA graph captures"):
        transformer(**given)
