"""``enable(cuda_graphs=True)`` with stand-ins of CUDA graphs, on one rank.

tests/gpu/test_diffusers_gpu.py has the graphs themselves, on two GPUs.
"""

import contextlib
import copy
import dataclasses
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from graph_tapes import Tape, Tapes
from model_runs import relative
from tiny_diffusers import arguments, build
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._dynamo.testing import CompileCounterWithBackend

import ds_usp
from ds_usp import UnsupportedAttentionError as Unsupported
from ds_usp import USPError
from ds_usp.integrations.diffusers import enable, graphs

FLUX, WAN, QWEN = "FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel"
CLASSES = (FLUX, WAN, "SD3Transformer2DModel", "CogVideoXTransformer3DModel")
MESH = ds_usp.SequenceMesh.single()
BOUND = 1e-6


@contextlib.contextmanager
def graphed(name: str) -> Iterator[tuple[Any, dict[str, Any], Tensor]]:
    """A transformer that captures its passes, arguments, and its output without graphs."""
    transformer, given = build(name).eval(), arguments(name)
    want = transformer(**given).sample
    with enable(transformer, MESH, cuda_graphs=True):
        yield transformer, given, want


def passes(transformer: Any, given: dict[str, Any], count: int = 3) -> list[Tensor]:
    return [transformer(**given, return_dict=False)[0] for _ in range(count)]


def errors(outputs: list[Tensor], want: Tensor) -> float:
    return max(relative(out, want) for out in outputs)


@pytest.mark.parametrize("name", CLASSES)
def test_a_replayed_pass_computes_with_the_arguments_that_it_is_given(tapes, name):
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


def test_weights_are_followed_in_place_and_where_they_are_replaced(tapes):
    with graphed(WAN) as (transformer, given, _):
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


def test_passes_with_gradients_are_not_captured(tapes):
    transformer, given = build(WAN).eval(), arguments(WAN)
    with enable(transformer, MESH, cuda_graphs=True), torch.enable_grad():
        for _ in range(3):
            transformer(**given).sample.square().mean().backward()
    assert not tapes


def test_inference_mode_and_no_grad_have_graphs_of_their_own(tapes):
    with graphed(FLUX) as (transformer, given, want):
        with torch.inference_mode():
            assert errors(passes(transformer, given), want) < BOUND
        assert errors(passes(transformer, given), want) < BOUND
    assert len(tapes) == 4


def test_autocast_is_another_kind(tapes):
    with graphed(WAN) as (transformer, given, want):
        passes(transformer, given)
        with torch.autocast("cpu"):
            assert errors(passes(transformer, given), want) > 1e-4
        assert errors(passes(transformer, given), want) < BOUND


def test_a_copy_captures_by_itself(tapes):
    with graphed(WAN) as (transformer, given, _):
        want = passes(transformer, given)[0]
        twin = copy.deepcopy(transformer)
        twin.proj_out.weight.mul_(2)
        twin.proj_out.bias.mul_(2)
        assert errors(passes(twin, given), 2 * want) < BOUND
        assert errors(passes(transformer, given, 1), want) < BOUND
    assert len(tapes) == 4


def test_an_error_drops_the_graphs(tapes):
    """Another rank may have none any more."""
    with graphed(FLUX) as (transformer, given, want):
        passes(transformer, given)
        with pytest.raises(Unsupported, match="no such argument"):
            transformer(**given, txt_seq_lens=[7])
        assert errors(passes(transformer, given), want) < BOUND
    assert len(tapes) == 4


def test_of_too_many_kinds_the_oldest_is_dropped(tapes, caplog, monkeypatch):
    monkeypatch.setattr(graphs, "_MAX_KINDS", 2)
    transformer, given = build(WAN).eval(), arguments(WAN)
    want = transformer(**given).sample

    def run(scale: float) -> float:  # without adapters it has no effect
        numbers = {"attention_kwargs": {"scale": scale}}
        return errors([transformer(**given, **numbers).sample for _ in range(3)], want)

    with enable(transformer, MESH, cuda_graphs=True), caplog.at_level(logging.WARNING, "ds_usp"):
        assert all(run(scale) < BOUND for scale in (1.0, 2.0, 3.0, 4.0, 3.0))
        assert len(tapes) == 8  # 3.0 was captured once
        assert run(1.0) < BOUND
        assert len(tapes) == 10
    assert len([x for x in caplog.messages if "more than 2 kinds" in x]) == 1


def test_a_pool_whose_last_graph_was_dropped_is_not_taken_again(tapes, monkeypatch):
    monkeypatch.setattr(graphs, "_MAX_KINDS", 2)
    renewed: list[bool] = []
    monkeypatch.setattr(Tapes, "renew", lambda _: renewed.append(True))
    with graphed(WAN) as (transformer, given, _):
        for scale, count, renewals in ((1.0, 3, 0), (2.0, 1, 0), (3.0, 1, 1)):
            for _ in range(count):
                transformer(**given, attention_kwargs={"scale": scale})
            assert len(renewed) == renewals


def test_ctrl_c_in_a_capture_leaves_no_mode_behind(tapes):
    transformer, given = build(QWEN).eval(), arguments(QWEN)
    before = _len_torch_dispatch_stack()
    with enable(transformer, MESH, cuda_graphs=True):
        want = passes(transformer, given, 1)[0]
        interrupt = mock.Mock(side_effect=KeyboardInterrupt)
        with (
            mock.patch.object(type(transformer.pos_embed), "forward", interrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            passes(transformer, given, 1)
        assert _len_torch_dispatch_stack() == before
        assert errors(passes(transformer, given), want) < BOUND


def test_an_argument_that_is_none_makes_no_other_kind(tapes):
    with graphed(WAN) as (transformer, given, want):
        both = given, given | {"encoder_hidden_states_image": None}
        assert max(errors(passes(transformer, each), want) for each in both) < BOUND
    assert len(tapes) == 2


def test_passes_of_part_of_the_mesh_and_of_all_of_it_are_two_kinds(tapes):
    """With cfg_degree a part's sample, and one sample of all ranks, have the same shapes."""
    transformer, given = build(WAN).eval(), arguments(WAN)
    chosen: Any = graphs.ForwardGraphs(transformer)
    texts = {chosen.choose(given, mock.Mock(sp_degree=ranks))[1] for ranks in (1, 2, 4, 2)}
    assert len(texts) == 3


def test_casts_of_autocast_belong_to_the_graph(tapes):
    """Its cache is dropped when the context ends, and has no other values within."""
    with graphed(WAN) as (transformer, given, _):
        with torch.autocast("cpu"):
            before = passes(transformer, given)[-1]
        for parameter in transformer.parameters():
            parameter.mul_(1.5)
        with torch.autocast("cpu"):
            have = passes(transformer, given, 1)[0]
    assert len(tapes) == 2
    with torch.autocast("cpu"):
        want = transformer(**given).sample
    assert relative(have, want) < 1e-2 < relative(before, want)


def test_blocks_are_not_compiled_again_in_a_capture(tapes):
    """Where kernels are tuned, which waits for the GPU: captures were refused for it."""
    transformer, given = build(WAN).eval(), arguments(WAN)
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    with enable(transformer, MESH, cuda_graphs=True), mock.patch.object(Tapes, "begin", mock.Mock):
        transformer.compile_repeated_blocks(backend=counter, dynamic=False)
        passes(transformer, given, 1)
        compiled = counter.frame_count
        assert compiled
        passes(transformer, given, 1)
        assert counter.frame_count == compiled
    torch._dynamo.reset()


class Twice:
    """An attention processor that cross-attention may have, which is local to each rank."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self._original(*args, **kwargs)


def other_processor(transformer: Any) -> None:
    attention = transformer.blocks[0].attn2
    attention.processor = Twice(attention.processor)


def other_module(transformer: Any) -> None:
    """That the plan names, as LoRA and quantization replace it; the weights stay where they are."""
    transformer.proj_out = torch.nn.Sequential(transformer.proj_out, torch.nn.Tanh())


def other_weight(transformer: Any) -> None:
    weight = transformer.proj_out.weight
    transformer.proj_out.weight.data = 2 * weight.data


def test_a_replay_is_compared_and_its_stream_is_known(tapes):
    """As attention calls are: a rank that does not come must not leave the others waiting."""
    engine, consistency = mock.Mock(), mock.Mock(wraps=MESH.consistency)
    mesh = dataclasses.replace(MESH, copy_engines={"all_to_all": engine}, consistency=consistency)
    transformer, given = build(WAN).eval(), arguments(WAN)
    with enable(transformer, mesh, cuda_graphs=True):
        passes(transformer, given, 2)
        before = consistency.check_call.call_count
        passes(transformer, given, 3)
    calls = [call for call in consistency.check_call.call_args_list[before:] if call.kwargs]
    assert calls == 3 * [mock.call("a replayed pass of WanTransformer3DModel", wait=False)]
    assert engine.note_replay.call_count == 4  # that of the captured pass too


@pytest.mark.parametrize("change", [other_processor, other_module, other_weight])
def test_what_was_replaced_is_captured_again(tapes, change):
    with graphed(WAN) as (transformer, given, _):
        before = passes(transformer, given)[-1]
        change(transformer)
        have = passes(transformer, given)
    want = transformer(**given).sample
    assert errors(have, want) < BOUND < relative(before, want)


def runs(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """In a tape that holds no tensors."""
    return func(*args, **(kwargs or {}))


def test_tensors_of_a_module_s_cache_outlive_it(tapes):
    """QwenImage keeps 128 rotary embeddings; a CUDA graph holds none of what it reads."""
    transformer, given = build(QWEN).eval(), arguments(QWEN)
    cached: list[weakref.ref[Tensor]] = []
    rope = type(transformer.pos_embed)
    original = rope._compute_video_freqs

    def compute(self: Any, *args: Any) -> Tensor:
        frequencies: Tensor = original(self, *args)
        cached.append(weakref.ref(frequencies))
        return frequencies

    with (
        mock.patch.object(rope, "_compute_video_freqs", compute),
        mock.patch.object(Tape, "__torch_dispatch__", runs),
        enable(transformer, MESH, cuda_graphs=True),
    ):
        passes(transformer, given, 2)
        for width in range(130):
            original(transformer.pos_embed, 1, 2, 2 + width, 0, torch.device("cpu"))
        gc.collect()
        assert cached[-1]() is not None
    gc.collect()
    assert cached[-1]() is None


def test_a_capture_that_fails_is_not_tried_again(tapes, monkeypatch):
    transformer, given = build(WAN).eval(), arguments(WAN)
    problems: list[Exception] = [torch.OutOfMemoryError("no memory"), RuntimeError("not allowed")]

    def fails(*_: Any) -> None:
        raise problems[0]

    text = "WanTransformer3DModel cannot be captured in a CUDA graph: not allowed"
    rope = type(transformer.rope)
    with enable(transformer, MESH, cuda_graphs=True):
        for expected, message in ((torch.OutOfMemoryError, "no memory"), (USPError, text)):
            passes(transformer, given, 1)
            with monkeypatch.context() as patch, pytest.raises(expected, match=message):
                patch.setattr(rope, "forward", fails)
                passes(transformer, given, 1)
            problems.pop(0)
        captures = len(tapes)
        with pytest.raises(Unsupported, match=text):
            passes(transformer, given, 1)
        assert len(tapes) == captures
