"""What several trainings by examples_deepspeed's trainer in one process need: weights drawn on the
device, since a CPU draws those of 8B parameters for minutes, and memory that is given back.
"""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples_deepspeed" / "sequence_parallel")]


@contextmanager
def built_on(device: torch.device) -> Iterator[None]:
    """Inside, the trainer's ``build_model`` allocates on the device and draws nothing."""
    from usp_trainer import model as trainer_model

    plain = partial(_without_init, trainer_model.transformer_config)
    with mock.patch.object(trainer_model, "transformer_config", plain), device:
        yield


def _without_init(config: Any, args: Namespace) -> Any:
    return replace(config(args), perform_initialization=False)


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """Normal matrices, norms of 1, biases of 0, drawn on the parameters' device.

    Every parameter has a seed of its own, its place in the model, so that ranks and runs of other
    degrees and settings on devices of one kind start from the same weights.
    """
    for number, (name, p) in enumerate(model.named_parameters()):
        if p.ndim > 1:
            generator = torch.Generator(p.device).manual_seed(seed * 100_003 + number)
            p.normal_(0.0, std, generator=generator)
        else:
            p.fill_(name.endswith("weight"))


def free_engine(engine: Any) -> None:
    """End an engine and empty its model: functions that DeepSpeed's ZeRO-3 makes for each module
    keep the modules, and its bf16 optimizer keeps a parameter, with it all flat buffers."""
    from deepspeed.runtime.zero import parameter_offload

    modules, parameters = list(engine.module.modules()), list(engine.module.parameters())
    optimizer = engine.optimizer
    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    for p in parameters:
        p.grad = None
        vars(p).clear()
        p.data = p.data.new_empty(0)
    vars(optimizer).clear()
    for module in modules:
        vars(module).clear()


def collect_memory() -> int:
    """Free what earlier runs left; the bytes of the GPU that stay, 0 without one."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
