"""USPConfig: defaults, degrees that multiply, names that exist, a host's namespace."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from ds_usp import ConfigError, USPConfig
from ds_usp.config import TorchrunEnv, torchrun_env
from ds_usp.errors import warn_once


def test_defaults_are_one_rank_with_zigzag() -> None:
    assert USPConfig() == USPConfig(
        sp_degree=1, ulysses_degree=None, layout="zigzag", order="ulysses-ring", kernel="auto"
    )
    with pytest.raises(FrozenInstanceError):
        USPConfig().sp_degree = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("sp", "ulysses", "degrees"),
    [(1, None, (1, 1)), (8, None, (8, 1)), (8, 1, (1, 8)), (8, 2, (2, 4)), (6, 3, (3, 2))],
)
def test_the_ring_takes_what_ulysses_leaves(
    sp: int, ulysses: int | None, degrees: tuple[int, int]
) -> None:
    config = USPConfig(sp_degree=sp, ulysses_degree=ulysses)
    assert (config.ulysses, config.ring) == degrees


HOSTS: list[tuple[dict[str, Any], USPConfig]] = [
    ({}, USPConfig()),
    ({"hidden_size": 4}, USPConfig()),
    ({"ds_sequence_parallel_size": 8}, USPConfig(sp_degree=8)),
    (
        {"ds_sequence_parallel_size": 8, "ulysses_degree": 4, "usp_layout": "striped"},
        USPConfig(sp_degree=8, ulysses_degree=4, layout="striped"),
    ),
    (
        {"usp_order": "ring-ulysses", "usp_kernel": "eager", "ulysses_degree": None},
        USPConfig(order="ring-ulysses", kernel="eager"),
    ),
]


@pytest.mark.parametrize(("given", "expected"), HOSTS)
def test_a_hosts_arguments(given: dict[str, Any], expected: USPConfig) -> None:
    assert USPConfig.from_args(Namespace(**given)) == expected


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"sp_degree": 8, "ulysses_degree": 3}, ["3 does not divide", "8", "4 (ring 2), 2"]),
        ({"sp_degree": 2, "ulysses_degree": 4}, ["4 does not divide", "2", "of 2 (ring 1)"]),
        ({"sp_degree": 0}, ["--ds-sequence-parallel-size 0 must be"]),
        ({"sp_degree": None}, ["--ds-sequence-parallel-size None must be"]),
        ({"sp_degree": 4.0}, ["--ds-sequence-parallel-size 4.0"]),
        ({"sp_degree": "4"}, ["--ds-sequence-parallel-size '4' must"]),
        ({"sp_degree": 4, "ulysses_degree": 0}, ["--ulysses-degree 0 must be"]),
        ({"sp_degree": 4, "ulysses_degree": True}, ["--ulysses-degree True must be"]),
        ({"layout": "zig"}, ["'zig'", "contiguous, zigzag, striped, context_parallel"]),
        ({"order": "ring"}, ["'ring'", "ulysses-ring, ring-ulysses"]),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(settings: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        USPConfig(**settings)
    for message in messages:
        assert message in str(caught.value)


def test_from_args_refuses_too() -> None:
    with pytest.raises(ConfigError, match="--ulysses-degree 3 does not divide"):
        USPConfig.from_args(Namespace(ds_sequence_parallel_size=4, ulysses_degree=3))


def test_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert torchrun_env() == TorchrunEnv(0, 1, 0, 1)
    for name, value in zip(names, ("5", "8", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert torchrun_env() == TorchrunEnv(5, 8, 1, 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(ConfigError, match="no LOCAL_WORLD_SIZE in its environment"):
        torchrun_env()


def test_a_line_is_said_once_and_on_rank_0_only(caplog: pytest.LogCaptureFixture) -> None:
    for text in ("no Triton, 100% torch", "no Triton, 100% torch", "no NVLink"):
        for rank in (1, 0, 0):
            warn_once(text, rank=rank)
    assert caplog.record_tuples == [
        ("ds_usp", 30, "no Triton, 100% torch"),
        ("ds_usp", 30, "no NVLink"),
    ]
