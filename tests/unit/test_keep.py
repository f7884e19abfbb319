"""What checkpoints under keep_attention save, free and refuse; one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_usp import (
    MaskSpec,
    RecomputeError,
    Scores,
    SequenceMesh,
    UnsupportedAttentionError,
    USPAttention,
    usp_attention,
)
from ds_usp.memory import keep_attention
from ds_usp.memory.saved_attention import is_saving

MESH = SequenceMesh.single()
S, H, D = 16, 2, 8


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    layout = MESH.layout("contiguous", q.shape[1])
    return usp_attention(q, k, v, mesh=MESH, layout=layout, mask=MaskSpec.causal())


def layer(x: torch.Tensor) -> torch.Tensor:
    return attend(x.sin(), x.cos(), x.tanh()) * 2


def some(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, S, H, D, generator=generator).requires_grad_()


class Spy:
    """:func:`layer`, which notes the storage of every attention output without keeping it alive."""

    def __init__(self) -> None:
        self.storages: list[weakref.ref[Any]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = attend(x.sin(), x.cos(), x.tanh())
        self.storages.append(weakref.ref(out.untyped_storage()))
        return out * 2

    @property
    def alive(self) -> list[bool]:
        return [ref() is not None for ref in self.storages]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_graph_that_is_dropped_frees_what_was_saved(reentrant: bool) -> None:
    spy = Spy()
    gc.disable()
    try:
        y = checkpoint(keep_attention(spy), some(), use_reentrant=reentrant)
        assert spy.alive == [True]
        del y
        if not reentrant:  # torch's checkpoint and a Function that saves its input: a cycle
            gc.collect()
        assert spy.alive == [False]
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_frees_the_tensors_even_where_the_loss_lives_on(reentrant: bool) -> None:
    spy = Spy()
    loss = checkpoint(keep_attention(spy), some(), use_reentrant=reentrant).sum()
    assert spy.alive == [True]
    loss.backward()
    assert not any(spy.alive) and loss.grad_fn is not None


def test_without_gradients_nothing_is_saved() -> None:
    with torch.no_grad():
        assert keep_attention(layer) is layer
    assert keep_attention(layer) is not layer


def test_recomputed_inputs_serve_where_nothing_is_exchanged() -> None:
    """q, k and v are not kept: the only large tensors that live on are the input and the output."""
    made: list[weakref.ref[torch.Tensor]] = []

    def spying(x: torch.Tensor) -> torch.Tensor:
        qkv = [x.sin(), x.cos(), x.tanh()]
        made.extend(map(weakref.ref, (each.untyped_storage() for each in qkv)))
        return attend(*qkv)

    y = checkpoint(keep_attention(spying), some(), use_reentrant=True)
    assert [ref() for ref in made] == [None] * 3
    y.sum().backward()


def test_an_error_in_the_first_run_leaves_nothing_behind() -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        layer(x)
        raise KeyError("mine")

    run = keep_attention(failing)
    with pytest.raises(KeyError):
        checkpoint(run, some(), use_reentrant=False)
    assert not is_saving()
    x = some()
    with pytest.raises(KeyError):  # the same one again is a first run again
        run(x)
    assert torch.equal(layer(x), layer(some()))


def backward_twice(run: Callable[..., torch.Tensor], reentrant: bool) -> None:
    y = checkpoint(run, some(), use_reentrant=reentrant).sum()
    y.backward(retain_graph=True)
    y.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_runs_once(reentrant: bool) -> None:
    backward_twice(layer, reentrant)
    with pytest.raises(RecomputeError, match="retain_graph"):
        backward_twice(keep_attention(layer), reentrant)


def test_a_recomputation_that_does_something_else_is_refused() -> None:
    calls: list[int] = []

    def more(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return layer(layer(x)) if len(calls) > 1 else layer(x)

    def shorter(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return layer(x[:, : S // len(calls)]).sum() + 0 * x.sum()

    for run, words in ((more, "more often"), (shorter, "otherwise")):
        calls.clear()
        y = checkpoint(keep_attention(run), some(), use_reentrant=True)
        with pytest.raises(RecomputeError, match=words):
            y.sum().backward()


def test_an_output_that_is_changed_in_place_is_noticed() -> None:
    def careless(x: torch.Tensor) -> torch.Tensor:
        out = attend(x.sin(), x.cos(), x.tanh())
        out.detach().mul_(2)
        return out * 2

    y = checkpoint(keep_attention(careless), some(), use_reentrant=True)
    with pytest.raises(RecomputeError, match="changed in place"):
        y.sum().backward()


def test_second_derivatives_are_refused() -> None:
    x = some()
    y = checkpoint(keep_attention(layer), x, use_reentrant=False)
    with pytest.raises(RecomputeError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class Learning(torch.nn.Module):
    """A local attention with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q * self.scale


def test_a_local_attention_with_parameters_is_refused() -> None:
    drop_in = USPAttention(Learning(), mesh=MESH)

    def run(x: torch.Tensor) -> torch.Tensor:
        return drop_in(x, x, x, 0)

    checkpoint(run, some(), use_reentrant=False).sum().backward()
    with pytest.raises(UnsupportedAttentionError, match="Learning has parameters"):
        checkpoint(keep_attention(run), some(), use_reentrant=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_attention_that_draws_random_numbers_leaves_them_as_the_first_run_did(
    reentrant: bool,
) -> None:
    class Dropping(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(q * k, 0.5) + v

    drop_in = USPAttention(Dropping(), mesh=MESH)

    def run(x: torch.Tensor) -> torch.Tensor:
        mixed = drop_in(x.sin(), x.cos(), x, 0)
        return torch.nn.functional.dropout(mixed.tanh() * 3, 0.5)

    def gradient(attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(11)
        x = some()
        attention(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    want = gradient(run)
    actual = gradient(lambda x: checkpoint(keep_attention(run), x, use_reentrant=reentrant))
    assert torch.equal(actual, want)


def test_an_output_that_reaches_no_loss_is_as_it_is_without() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(x), x * 3

    for run in (two, keep_attention(two)):
        x = some()
        checkpoint(run, x, use_reentrant=True)[1].sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 3.0))


@pytest.mark.parametrize("reentrant", [True, False])
def test_sinks_that_are_computed_in_the_checkpoint_get_gradients(reentrant: bool) -> None:
    """A reentrant checkpoint's first run has no gradients, so they require none there."""
    mesh, x = SequenceMesh.single(), torch.randn(1, S, 2, 4)
    grads = []
    for wrap in (lambda run: run, keep_attention):
        sinks = torch.nn.Parameter(torch.tensor([0.5, -0.5], dtype=torch.bfloat16))

        def run(q: torch.Tensor, sinks: torch.nn.Parameter = sinks) -> torch.Tensor:
            return usp_attention(
                q,
                q * 2,
                q * 3,
                mesh=mesh,
                layout=mesh.layout("zigzag", S),
                mask=MaskSpec.causal(),
                scores=Scores(sinks=sinks.float()),
            )

        q = x.clone().requires_grad_()
        checkpoint(wrap(run), q, use_reentrant=reentrant).square().sum().backward()
        grads.append([q.grad, sinks.grad])
    for plain, kept in zip(*grads, strict=True):
        assert kept is not None and torch.equal(plain, kept)
