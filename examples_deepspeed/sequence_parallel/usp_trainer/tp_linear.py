"""megatron-core's linear layers over tokens that are sharded between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from ds_usp.training import TensorParallelComm, all_gather_linear, linear_reduce_scatter


class GatheringColumnParallelLinear(ColumnParallelLinear):
    """``ColumnParallelLinear`` that gathers its tokens: ``[n/t, b, h]`` to ``[n, b, o/t]``."""

    def __init__(self, *args: Any, comm: TensorParallelComm, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.comm = comm

    def _forward_impl(
        self, input: Tensor, weight: Tensor, *, bias: Tensor | None, **unused: Any
    ) -> Tensor:
        return all_gather_linear(input, weight, bias, self.comm)


class ScatteringRowParallelLinear(RowParallelLinear):
    """``RowParallelLinear`` that scatters its tokens: ``[n, b, i/t]`` to ``[n/t, b, h]``."""

    def __init__(self, *args: Any, comm: TensorParallelComm, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.comm = comm

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output = linear_reduce_scatter(input_, self.weight, self.comm)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None


def parameters_of_shards(layer: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that each rank has whole and applies to its shard of the tokens, so that its
    gradient is a part: norms, and biases of row-parallel layers. By module: megatron-core marks the
    others only if it initializes them."""
    for module in layer.modules():
        if isinstance(module, ScatteringRowParallelLinear):
            yield from () if module.bias is None else (module.bias,)
        elif not isinstance(module, GatheringColumnParallelLinear):
            yield from module.parameters(recurse=False)


def shard_tokens(layer: ModuleSpec, comm: TensorParallelComm) -> None:
    """Put these linear layers into a spec of megatron-core's local layer."""
    gathering, scattering = (
        ModuleSpec(module, params={"comm": comm})
        for module in (GatheringColumnParallelLinear, ScatteringRowParallelLinear)
    )
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.linear_qkv, attention.linear_proj = gathering, scattering
    mlp.linear_fc1, mlp.linear_fc2 = gathering, scattering
