"""An engine: its ranks that share a sequence, and its model."""

import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.workers.engine.base import BaseEngineCtx


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


class FSDPEngineWithLMHead(FSDPEngine):
    """Packs samples, and makes outputs of them again; here neither."""

    def prepare_model_inputs(self, micro_batch):
        raise NotImplementedError

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        raise NotImplementedError


class FSDPEngineWithValueHead(FSDPEngineWithLMHead):
    """Makes other outputs."""

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        raise NotImplementedError


class EngineEvalModeCtx(BaseEngineCtx):
    """Without gradients."""

    def __init__(self, engine, **kwargs):
        super().__init__(engine, "eval", **kwargs)


class EngineTrainModeCtx(BaseEngineCtx):
    """With them."""

    def __init__(self, engine, **kwargs):
        super().__init__(engine, "train", **kwargs)
