"""Arguments of public functions that are not what they take: ConfigError, with what would fit."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import Linear

import ds_usp
from ds_usp import ConfigError, DataError, memory, training

QKV = torch.ones(96, 16)
MESH = ds_usp.SequenceMesh.single()
OPTIMIZER = torch.optim.SGD(Linear(2, 2).parameters())


def engine(optimizer: object, config: object) -> object:
    return training.initialize_deepspeed(Linear(2, 2), optimizer, config, None)


def usp_attention(value: object) -> object:
    q = torch.ones(1, 4, 2, 8)
    mask = ds_usp.MaskSpec.causal()
    return ds_usp.usp_attention(q, q, value, mesh=MESH, layout="zigzag", mask=mask)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "no values": (lambda: usp_attention(None), "got Tensor, Tensor, NoneType"),
    "an array": (lambda: usp_attention(torch.ones(1, 4, 2, 8).numpy()), "Tensor, ndarray"),
    "no local attention": (lambda: ds_usp.USPAttention(None, mesh=MESH), "must be a module"),
    "chunks": (lambda: memory.in_chunks(Linear(4, 4), torch.ones(2, 4), 2.0), "whole number"),
    "layers": (lambda: memory.LayerMemory("full", checkpoint_layers=2.5), "whole number"),
    "no engine": (lambda: training.keep_states_on_host(Linear(2, 2)), "Linear is no engine"),
    "an odd dim": (lambda: training.rotary_frequencies(torch.arange(4), 7), "dim=7 even"),
    "positions": (lambda: training.rotary_frequencies(torch.ones(1, 4), 8), r"\[1, 4\]"),
    "labels": (
        lambda: training.chunked_token_losses(QKV, QKV, torch.ones(96), chunks=2),
        "expected token ids",
    ),
    "no optimizer": (lambda: engine(None, {}), "optimizer=None must be"),
    "a file": (lambda: engine(OPTIMIZER, "config.json"), "json.load"),
    "a flag": (lambda: engine(OPTIMIZER, {"zero_optimization": True}), "must be a dict"),
    "no groups": (lambda: engine(OPTIMIZER, {}), r"ParallelGroups.from_mesh\(mesh\)"),
    "a stage": (lambda: training.check_zero_stage(5, stages=1, bf16=False), "must be 0, 1, 2 or 3"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    call, message = CASES[name]
    with pytest.raises(ConfigError, match=message):
        call()


def test_input_ids_are_whole_numbers():
    batches = [{"input_ids": torch.ones(1, 8)}]
    with pytest.raises(DataError, match=r"torch.float32, expected whole numbers"):
        next(iter(training.SequenceParallelDataLoader(batches, MESH)))


def test_an_offload_takes_the_name_of_a_device():
    assert memory.Offload(0.5, "cpu").copier.device == torch.device("cpu")
