"""Blocks of diffusion transformers under torch.compile, on 2 ranks: what is in their graphs."""

from typing import Any

import pytest
import torch
from cases import mesh_of
from harness import RankContext
from model_runs import relative
from test_diffusers import alone, on_the_mesh
from tiny_diffusers import arguments, build, output_of
from torch._dynamo.testing import CompileCounterWithBackend

from ds_usp.integrations.diffusers import enable

WORLD = 2
BOUND = 1e-5
LINEAR = torch._C._nn.linear
# By class: options, and how many linear layers a block has.
BLOCKS = {
    "FluxTransformer2DModel": ({"num_single_layers": 0}, 14),
    "WanTransformer3DModel": ({"num_layers": 2}, 10),
}


def of_compiled_blocks(ctx: RankContext) -> dict[str, tuple[float, list[tuple[int, int]], int]]:
    """By class: the error, the linear layers and attentions in each graph, and graphs of a second
    step."""
    results = {}
    for name, (options, _) in BLOCKS.items():
        torch._dynamo.reset()
        transformer, given = build(name, **options), arguments(name)
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, _: Any, graphs: Any = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        want = alone(transformer, given)
        with enable(transformer, mesh_of(2)):
            transformer.compile_repeated_blocks(backend=backend, fullgraph=True)
            error = on_the_mesh(transformer, given, divisor=ctx.world).error(want)
            first = [[node.target for node in graph.graph.nodes] for graph in graphs]
            on_the_mesh(transformer, given, divisor=ctx.world)
        attention = torch.ops.ds_usp.attention.default
        counts = [(targets.count(LINEAR), targets.count(attention)) for targets in first]
        results[name] = error, counts, len(graphs) - len(first)
    torch._dynamo.reset()
    return results


def test_a_compiled_block_is_one_graph_with_attention_in_it(pool):
    for results in pool.run(of_compiled_blocks, WORLD):
        for name, (error, counts, recompiled) in results.items():
            assert error <= BOUND, name
            assert counts == [(BLOCKS[name][1], 1)], name  # and blocks share it
            assert recompiled == 0, name


WAN, FLUX, QWEN = "WanTransformer3DModel", "FluxTransformer2DModel", "QwenImageTransformer2DModel"


def of_size(name: str, index: int) -> dict[str, Any]:
    """Arguments of a pass with more tokens at each index, odd ones, of image and of text; padded
    text where a class knows of padding."""
    text, rows, columns = 7 + 3 * index, 4 + index, 5 + index
    if name == WAN:
        latents = {"hidden_states": torch.randn(1, 4, 3 + index, 6, 10)}
        return latents | {
            "timestep": torch.tensor([3.0]),
            "encoder_hidden_states": torch.randn(1, text, 16),
        }
    given = arguments(name)
    channels, text_dim = given["hidden_states"].shape[-1], given["encoder_hidden_states"].shape[-1]
    given["hidden_states"] = torch.randn(2, rows * columns, channels)
    given["encoder_hidden_states"] = torch.randn(2, text, text_dim)
    if name == QWEN:
        given["img_shapes"] = [[(1, rows, columns)]] * 2
        real = torch.tensor([[text - 3], [text]])
        return given | {"encoder_hidden_states_mask": torch.arange(text) < real}
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
    ids = {"img_ids": torch.nn.functional.pad(grid, (1, 0)), "txt_ids": torch.zeros(text, 3)}
    return given | ids


def of_many_sizes(
    ctx: RankContext, name: str, ulysses: int, dynamic: bool | None, gradients: bool
) -> list[tuple[float, int]]:
    """After each size the error and the number of graphs."""
    torch._dynamo.reset()
    options = BLOCKS[FLUX][0] if name == FLUX else {"num_layers": 1}
    transformer = build(name, **options).eval()
    counter = CompileCounterWithBackend("aot_eager" if gradients else "eager")
    sizes, results = [of_size(name, index) for index in range(3 if name == QWEN else 4)], []
    with torch.no_grad():
        wants = [output_of(transformer, given) for given in sizes]
    with enable(transformer, mesh_of(ulysses)), torch.set_grad_enabled(gradients):
        transformer.compile_repeated_blocks(backend=counter, dynamic=dynamic)
        for given, want in zip(sizes, wants, strict=True):
            have = output_of(transformer, given)
            if gradients:
                have.square().mean().backward()
            results.append((relative(have.detach(), want), counter.frame_count))
    torch._dynamo.reset()
    return results


@pytest.mark.parametrize(
    ("name", "ulysses", "dynamic", "gradients"),
    [
        (WAN, 2, True, False),
        (FLUX, 2, None, False),
        pytest.param(WAN, 1, True, True, marks=pytest.mark.slow),
        pytest.param(QWEN, 2, None, False, marks=pytest.mark.slow),
    ],
)
def test_a_graph_serves_any_number_of_tokens(pool, name, ulysses, dynamic, gradients):
    """As of one rank's blocks: the second size makes the graphs of all others, the first if they
    are dynamic. It was one more graph for each size."""
    options = {"ulysses": ulysses, "dynamic": dynamic, "gradients": gradients}
    for results in pool.run(of_many_sizes, WORLD, name=name, **options):
        errors, graphs = zip(*results, strict=True)
        assert max(errors) <= BOUND
        assert graphs[0] == graphs[-1] if dynamic else graphs[1] == graphs[-1], graphs
        assert graphs[-1] <= (4 if name == QWEN else 3)
