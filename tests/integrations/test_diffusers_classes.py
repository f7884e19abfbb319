"""The classes of :mod:`newest_diffusers` on 6 ranks, forward and backward, beside one process."""

from functools import partial
from typing import Any

import newest_diffusers
import pytest
import tiny_diffusers
import torch
from cases import mesh_of
from further_diffusers import Sizes
from harness import RankContext
from model_runs import BOUND
from test_diffusers import alone, computed_again, on_the_mesh

import ds_usp
from ds_usp.integrations.diffusers import enable
from ds_usp.integrations.diffusers.derived_plans import plan_of_diffusers

WORLD = 6
# Ulysses, ring, and how many meshes compute the same batch.
SPLITS = {"3 x 1": (3, 1, 2), "1 x 3": (1, 3, 2), "2 x 3": (2, 3, 1)}
SIZES = {"odd": Sizes(3, 3, 7, 7, 3), "even": Sizes(2, 4, 6, 6, 0)}


def errors_of(ctx: RankContext, name: str) -> dict[str, float]:
    """Errors by case and split: on one of them blocks are computed again in backward, and on
    another the ranks' gradients are summed. Layers that are given fewer tokens on a mesh are those
    that the plan says."""
    transformer, errors = newest_diffusers.build(name), dict[str, float]()
    sharded, inputs = list[Any](), dict[str, list[Any]]()

    def note(layer: torch.nn.Module, given: tuple[torch.Tensor, ...], name: str) -> None:
        of_shard = [x.is_shard(layer, given[0]) for x in sharded]
        inputs.setdefault(name, []).append((given[0].shape, *of_shard))

    for path, layer in transformer.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(partial(note, name=path))
    for case, sizes in SIZES.items():
        want = alone(transformer, newest_diffusers.arguments(name, sizes))
        whole = {path: seen[0][0] for path, seen in inputs.items()}
        for split, (ulysses, ring, dp) in SPLITS.items():
            grid = ds_usp.RankGrid({"ulysses": ulysses, "ring": ring, "dp": dp})
            again = split == "1 x 3" and transformer._supports_gradient_checkpointing
            if again:
                transformer.enable_gradient_checkpointing(computed_again)
            options = {"gradients": "sum"} if split == "2 x 3" else {}
            mesh = ds_usp.SequenceMesh.build(grid)
            given = newest_diffusers.arguments(name, sizes)  # anew: diffusers takes lists apart
            inputs.clear()
            with enable(transformer, mesh, **options) as enabled:
                sharded[:] = enabled._sharded
                sharded[0]._given_tokens = sharded[0]._plan.given_tokens(transformer)
                have = on_the_mesh(transformer, given, divisor=1 if options else WORLD)
            sharded.clear()
            if again:
                transformer.disable_gradient_checkpointing()
            errors[f"{case}, {split}"] = have.error(want)
            seen = {path: first[0] for path, first in inputs.items()}
            wrong = [path for path, (shape, of) in seen.items() if of != (shape != whole[path])]
            assert not wrong, wrong
        inputs.clear()
    return errors


@pytest.mark.parametrize("name", newest_diffusers.CONFIGS)
def test_outputs_and_gradients_are_exact_at_every_split(pool, name):
    for errors in pool.run(errors_of, WORLD, name=name):
        assert len(errors) == len(SIZES) * len(SPLITS)
        wrong = {case: error for case, error in errors.items() if not error <= BOUND}
        assert not wrong, wrong


# Those for which diffusers' own plan says enough; of the others the first pass is refused.
DERIVED = (
    *("FluxTransformer2DModel", "Flux2Transformer2DModel", "WanTransformer3DModel"),
    *("LTXVideoTransformer3DModel", "ChronoEditTransformer3DModel"),
)
REFUSED = ("QwenImageTransformer2DModel", "LTX2VideoTransformer3DModel")


def derived(ctx: RankContext) -> dict[str, Any]:
    """Return the errors of two passes of other lengths by plans of diffusers, or their refusals."""
    found: dict[str, Any] = {}
    for name in (*DERIVED, *REFUSED):
        transformer = tiny_diffusers.build(name).eval()
        passes = tiny_diffusers.arguments(name), tiny_diffusers.arguments(name, odd=False)
        want = alone(transformer, *passes)
        plan = plan_of_diffusers(transformer)
        assert plan is not None
        try:
            with enable(transformer, mesh_of(2), plan=plan):
                found[name] = on_the_mesh(transformer, *passes, divisor=ctx.world).error(want)
        except Exception as error:
            found[name] = f"{error} {getattr(error, '__notes__', '')}"
        transformer.zero_grad()
    return found


def test_a_class_without_a_plan_is_served_by_that_of_diffusers_or_refused(pool):
    for found in pool.run(derived, 4):
        assert all(found[name] <= BOUND for name in DERIVED), found
        assert all(f"no plan for {name}" in found[name] for name in REFUSED), found
