"""``enable(cuda_graphs=True)`` with stand-ins of CUDA graphs, on one rank.

tests/gpu/test_diffusers_gpu.py has the graphs themselves, on two GPUs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from model_runs import relative
from peft import LoraConfig
from tiny_diffusers import arguments, build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_usp
from ds_usp.integrations.diffusers import enable, graphs, model

FLUX, WAN, QWEN = "FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel"
CLASSES = (FLUX, WAN, "SD3Transformer2DModel", "CogVideoXTransformer3DModel")
MESH = ds_usp.SequenceMesh.single()
BOUND = 1e-6


class Tape(TorchDispatchMode):
    """Records operators with their tensors, and runs them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators.append((func, args, kwargs or {}, out))
        return out

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.operators:
            inputs = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            again = tree_leaves(func(*args, **kwargs))
            for old, new in zip(tree_leaves(out), again, strict=True):
                if isinstance(old, Tensor) and storage(old) not in inputs:
                    old.copy_(new)


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Tapes:
    """In place of :class:`graphs.CudaGraphs`."""

    made: ClassVar[list[Tape]] = []

    @contextmanager
    def stream(self) -> Iterator[None]:
        yield

    def begin(self) -> Tape:
        tape = Tape()
        tape.__enter__()
        self.made.append(tape)
        return tape


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tape]]:
    """All graphs that a test has made."""
    monkeypatch.setattr(graphs, "CudaGraphs", Tapes)
    monkeypatch.setattr(model, "check_graphs", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(Tapes, "made", [])
    with torch.no_grad():
        yield Tapes.made


def passes(transformer: Any, given: dict[str, Any], count: int = 3) -> list[Tensor]:
    return [transformer(**given, return_dict=False)[0] for _ in range(count)]


def errors(outputs: list[Tensor], want: Tensor) -> float:
    return max(relative(out, want) for out in outputs)


@pytest.mark.parametrize(
    "name", [FLUX, WAN, "SD3Transformer2DModel", "CogVideoXTransformer3DModel"]
)
def test_a_replayed_pass_computes_with_the_arguments_that_it_is_given(
    tapes: list[Tape], name: str
) -> None:
    transformer = build(name).eval()
    kinds = [arguments(name, odd=odd) for odd in (True, False)]
    others = [arguments(name, odd=odd, seed=2) for odd in (True, False)]
    wants = [transformer(**given).sample for given in (*kinds, *others)]
    with enable(transformer, MESH, cuda_graphs=True):
        for _ in range(2):
            for given, want in zip((*kinds, *others), wants, strict=True):
                assert errors(passes(transformer, given, 2), want) < BOUND
        assert len(tapes) == 4  # of each kind one before and one after the join
        assert [tape.replays for tape in tapes] == [7] * 4
        held = transformer(**kinds[0]).sample
        transformer(**others[0])
        assert relative(held, wants[0]) < BOUND  # an output is not overwritten by a later pass
    assert "forward" not in vars(transformer)
    assert relative(transformer(**kinds[0]).sample, wants[0]) < BOUND


def test_weights_are_followed_in_place_and_where_they_are_replaced(tapes: list[Tape]) -> None:
    transformer, given = build(WAN).eval(), arguments(WAN)
    with enable(transformer, MESH, cuda_graphs=True):
        passes(transformer, given)
        transformer.proj_out.weight.mul_(2)  # the memory of the graph
        transformer.proj_out.bias.mul_(2)
        doubled = passes(transformer, given, 1)
        captured = len(tapes)
        for parameter in (transformer.proj_out.weight, transformer.proj_out.bias):
            parameter.data = parameter.data * 2
        quadrupled = passes(transformer, given)
        assert len(tapes) > captured
    want = transformer(**given).sample
    assert errors([x * 2 for x in doubled], want) < BOUND
    assert errors(quadrupled, want) < BOUND


def test_passes_with_gradients_are_not_captured(tapes: list[Tape]) -> None:
    transformer, given = build(WAN).eval(), arguments(WAN)
    with enable(transformer, MESH, cuda_graphs=True), torch.enable_grad():
        for _ in range(3):
            transformer(**given).sample.square().mean().backward()
    assert not tapes


def test_inference_mode_and_no_grad_have_graphs_of_their_own(tapes: list[Tape]) -> None:
    transformer, given = build(FLUX).eval(), arguments(FLUX)
    want = transformer(**given).sample
    with enable(transformer, MESH, cuda_graphs=True):
        with torch.inference_mode():
            assert errors(passes(transformer, given), want) < BOUND
        assert errors(passes(transformer, given), want) < BOUND
    assert len(tapes) == 4


def test_autocast_is_another_kind(tapes: list[Tape]) -> None:
    transformer, given = build(WAN).eval(), arguments(WAN)
    want = transformer(**given).sample
    with enable(transformer, MESH, cuda_graphs=True):
        passes(transformer, given)
        with torch.autocast("cpu"):
            assert errors(passes(transformer, given), want) > 1e-4
        assert errors(passes(transformer, given), want) < BOUND


def test_a_copy_captures_by_itself(tapes: list[Tape]) -> None:
    transformer, given = build(WAN).eval(), arguments(WAN)
    with enable(transformer, MESH, cuda_graphs=True):
        want = passes(transformer, given)[0]
        twin = copy.deepcopy(transformer)
        twin.proj_out.weight.mul_(2)
        twin.proj_out.bias.mul_(2)
        assert errors(passes(twin, given), 2 * want) < BOUND
        assert errors(passes(transformer, given, 1), want) < BOUND
    assert len(tapes) == 4


def test_an_error_drops_the_graphs(tapes: list[Tape]) -> None:
    transformer, given = build(FLUX).eval(), arguments(FLUX)
    want = transformer(**given).sample
    with enable(transformer, MESH, cuda_graphs=True):
        passes(transformer, given)
        with pytest.raises(ds_usp.UnsupportedAttentionError, match="ControlNet"):
            transformer(**given, controlnet_block_samples=[torch.zeros(1)])
        assert errors(passes(transformer, given), want) < BOUND
        assert len(tapes) == 4
        handle = transformer.register_forward_pre_hook(raises)
        with pytest.raises(RuntimeError, match="between"):
            transformer(**given)
        handle.remove()
        assert errors(passes(transformer, given), want) < BOUND
    assert len(tapes) == 6


def raises(*_: Any) -> None:
    raise RuntimeError("between")


def test_too_many_kinds_are_said_once(
    tapes: list[Tape], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_MAX_KINDS", 2)
    transformer, given = build(WAN).eval(), arguments(WAN)
    want = transformer(**given).sample
    with enable(transformer, MESH, cuda_graphs=True), caplog.at_level(logging.WARNING, "ds_usp"):
        for scale in range(5):
            numbers = {"attention_kwargs": {"scale": float(scale)}}  # without adapters: no effect
            assert errors([transformer(**given, **numbers).sample], want) < BOUND
    assert len([x for x in caplog.messages if "2 kinds of forward passes" in x]) == 1


def hooked(transformer: Any) -> None:
    transformer.blocks[0].register_forward_hook(lambda *_: None)


def adapted(transformer: Any) -> None:
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))


def offloaded(transformer: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(transformer.blocks[1], ModelHook())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (hooked, "WanTransformer3DModel with cuda_graphs=True: blocks.0 has a hook"),
        (adapted, "fuse_lora"),
        (offloaded, "blocks.1 has a forward function of offloading"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_what_a_graph_would_not_repeat_is_refused(
    tapes: list[Tape], change: Callable[[Any], None], text: str, late: bool
) -> None:
    transformer, given = build(WAN).eval(), arguments(WAN)
    if not late:
        change(transformer)
    with enable(transformer, MESH, cuda_graphs=True):
        if late:
            passes(transformer, given)
            change(transformer)
        with pytest.raises(ds_usp.UnsupportedAttentionError, match=text):
            transformer(**given)


def test_arguments_that_a_graph_cannot_take_are_refused(tapes: list[Tape]) -> None:
    qwen = build(QWEN).eval()
    with (
        enable(qwen, MESH, cuda_graphs=True),
        pytest.raises(ds_usp.UnsupportedAttentionError, match="mask of text"),
    ):
        qwen(**arguments(QWEN, padded=True))
    wan, given = build(WAN).eval(), arguments(WAN)
    with enable(wan, MESH, cuda_graphs=True):
        meta = {"encoder_hidden_states": given["encoder_hidden_states"].to("meta")}
        with pytest.raises(ds_usp.UnsupportedAttentionError, match="is on meta"):
            wan(**given | meta)
        with pytest.raises(ds_usp.UnsupportedAttentionError, match="type object"):
            wan(**given | {"timestep": object()})


def test_a_capture_that_fails_names_the_class(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformer, given = build(WAN).eval(), arguments(WAN)
    with enable(transformer, MESH, cuda_graphs=True):
        passes(transformer, given, 1)
        monkeypatch.setattr(type(transformer.rope), "forward", raises)
        with pytest.raises(
            ds_usp.UnsupportedAttentionError,
            match=r"WanTransformer3DModel cannot be captured.*betw",
        ):
            passes(transformer, given, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has GPUs")
def test_without_a_gpu_they_are_refused() -> None:
    with pytest.raises(ds_usp.ConfigError, match="cuda_graphs=True needs a GPU"):
        enable(build(WAN), MESH, cuda_graphs=True)
