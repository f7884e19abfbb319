"""Blocks of diffusion transformers under torch.compile, on 2 ranks: what is in their graphs."""

from typing import Any

import torch
from cases import mesh_of
from harness import RankContext
from test_diffusers import alone, on_the_mesh
from tiny_diffusers import arguments, build

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
