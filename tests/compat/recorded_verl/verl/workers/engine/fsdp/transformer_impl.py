"""An engine: its ranks that share a sequence, and its model."""

import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.ulysses import set_ulysses_sequence_parallel_group


class FSDPEngine:
    """Made with the attributes that are read, in the order of verl's."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.model_config, self.engine_config = model_config, engine_config
        self._init_device_mesh()

    def _init_device_mesh(self):
        size = self.ulysses_sequence_parallel_size = (
            self.engine_config.ulysses_sequence_parallel_size
        )
        self.ulysses_parallel_group = None
        if size > 1:
            shape = (dist.get_world_size() // size, size)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=["dp", "sp"])
            self.ulysses_parallel_group = mesh["sp"].get_group()

    def _build_module(self):
        model = transformers.AutoModelForCausalLM.from_config(self.model_config.hf_config)
        apply_monkey_patch(model=model, ulysses_sp_size=self.ulysses_sequence_parallel_size)
        return model


class BaseEngineCtx:
    """The engine whose ranks share a sequence meanwhile."""

    def __init__(self, engine, **kwargs):
        self.engine = engine

    def __enter__(self):
        set_ulysses_sequence_parallel_group(self.engine.ulysses_parallel_group)

    def __exit__(self, exc_type, exc_value, traceback):
        set_ulysses_sequence_parallel_group(None)


class EngineEvalModeCtx(BaseEngineCtx):
    """Without gradients."""


class EngineTrainModeCtx(BaseEngineCtx):
    """With them."""
