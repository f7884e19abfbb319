"""What ``enable(cuda_graphs=True)`` refuses, with stand-ins of CUDA graphs on one rank."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from test_diffusers_graphs import BOUND, MESH, QWEN, WAN, errors, passes
from tiny_diffusers import arguments, build
from torch.testing._internal.two_tensor import TwoTensor

from ds_usp import ConfigError, Tuning
from ds_usp import UnsupportedAttentionError as Unsupported
from ds_usp.integrations.diffusers import enable
from ds_usp.integrations.diffusers.graphs import check_device, check_graphs, identities


def hooked(transformer: Any) -> None:
    transformer.blocks[0].register_forward_hook(lambda *_: None)


def adapted(transformer: Any) -> None:
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))


def offloaded(transformer: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(transformer.blocks[1], ModelHook())


def patched(transformer: Any) -> None:
    transformer.blocks[1].forward = transformer.blocks[1].forward


def compiled(transformer: Any) -> None:
    transformer.compile(backend="eager")


class Quantized(torch.nn.Parameter):
    """Whose scales would be other tensors."""


def quantized(transformer: Any) -> None:
    transformer.proj_out.weight = Quantized(transformer.proj_out.weight.detach())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (hooked, "WanTransformer3DModel with cuda_graphs=True: blocks.0 has a hook"),
        (adapted, "fuse_lora"),
        (offloaded, "blocks.1 has a forward function of its own"),
        (patched, "blocks.1 has a forward function of its own"),
        (compiled, "the transformer is compiled as a whole.*compile_repeated_blocks"),
        (quantized, "proj_out has a weight of the type Quantized"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_what_a_graph_would_not_repeat_is_refused(tapes, change, text, late):
    transformer, given = build(WAN).eval(), arguments(WAN)
    if not late:
        change(transformer)
        with pytest.raises(Unsupported, match=text):
            enable(transformer, MESH, cuda_graphs=True)
        return
    with enable(transformer, MESH, cuda_graphs=True):
        passes(transformer, given)
        change(transformer)
        with pytest.raises(Unsupported, match=text):
            transformer(**given)


def test_a_lora_of_a_module_of_the_plan_may_be_unloaded(tapes):
    transformer, given = build(WAN).eval(), arguments(WAN)
    with enable(transformer, MESH, cuda_graphs=True):
        want = passes(transformer, given)[0]
        transformer.add_adapter(LoraConfig(r=2, target_modules=["proj_out"]))
        with pytest.raises(Unsupported, match="fuse_lora"):
            transformer(**given)
        transformer.unload_lora()
        captured = len(tapes)
        assert errors(passes(transformer, given), want) < BOUND
        assert len(tapes) == captured + 2


def test_hooks_and_compilers_around_the_transformer_are_refused(tapes):
    transformer, given = build(WAN).eval(), arguments(WAN)
    with enable(transformer, MESH, cuda_graphs=True):
        with pytest.raises(Unsupported, match="has no effect"):
            torch.compile(transformer, backend="eager")(**given)
        transformer.register_forward_pre_hook(lambda *_: None)
        with pytest.raises(Unsupported, match="register it before enable"):
            transformer(**given)


def test_another_forward_function_is_neither_replaced_nor_lost(tapes):
    transformer = build(WAN).eval()
    own = transformer.forward = partial(type(transformer).forward, transformer)
    with pytest.raises(Unsupported, match="forward function of its own"):
        enable(transformer, MESH, cuda_graphs=True)
    assert transformer.forward is own
    del transformer.forward
    with enable(transformer, MESH, cuda_graphs=True):
        transformer.forward = own
    assert transformer.forward is own


def test_arguments_that_a_graph_cannot_take_are_refused(tapes):
    qwen = build(QWEN).eval()
    with enable(qwen, MESH, cuda_graphs=True), pytest.raises(Unsupported, match="mask of text"):
        qwen(**arguments(QWEN, padded=True))
    wan, given = build(WAN).eval(), arguments(WAN)
    with enable(wan, MESH, cuda_graphs=True):
        meta = {"encoder_hidden_states": given["encoder_hidden_states"].to("meta")}
        with pytest.raises(Unsupported, match="is on meta"):
            wan(**given | meta)
        with pytest.raises(Unsupported, match="type object"):
            wan(**given | {"timestep": object()})


@pytest.mark.skipif(torch.cuda.is_available(), reason="has GPUs")
def test_without_a_gpu_they_are_refused():
    with pytest.raises(ConfigError, match="cuda_graphs=True needs a GPU"):
        enable(build(WAN), MESH, cuda_graphs=True)


@pytest.mark.parametrize(
    ("options", "environment", "text"),
    [
        ({"copies": False}, {}, "copies=False"),
        ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "wait for itself"),
        ({}, {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE"),
        ({}, {}, "no peer access"),
    ],
)
def test_exchanges_that_cannot_be_captured_are_refused(options, environment, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    unavailable = "no peer access" if text == "no peer access" else None
    mesh: Any = SimpleNamespace(sp_degree=4, copy_engine_unavailable=unavailable)
    with pytest.raises(ConfigError, match=text):
        check_graphs(mesh, Tuning(**options))


def test_weights_on_another_device_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_device(WAN, torch.device("cuda", 0))
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        with pytest.raises(ConfigError, match=f"is on {device}"):
            check_device(WAN, device)


def test_addresses_of_wrapped_weights_are_those_within():
    module = torch.nn.Linear(2, 2)
    module.weight = torch.nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    before = list(identities(module))
    assert list(identities(module)) == before
    module.weight.a = torch.ones(2, 2)
    assert list(identities(module)) != before
