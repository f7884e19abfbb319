"""Fields take what the names of their types say: of files, of flags and of calls."""

from collections.abc import Iterator
from dataclasses import fields
from math import inf, nan
from typing import Any

import pytest

from ds_usp.planner import ModelShape, ParallelConfig, Workload, load_cluster, load_model
from ds_usp.planner.arguments import _RULES, violations
from ds_usp.planner.commands import COMMANDS
from ds_usp.planner.models import RecurrentMixer

NO_NUMBER = (True, "4", [1])
NO_COUNT = (1.5, -1, 10**400, *NO_NUMBER)
WRONG: dict[str, tuple[object, ...]] = {
    "Positive": (0, -0.1, inf, nan, 1e31, *NO_NUMBER),
    "NonNegative": (-0.1, inf, nan, 1e31, *NO_NUMBER),
    "Finite": (inf, nan, 1e31, *NO_NUMBER),
    "Fraction": (-0.1, 1.1, nan, *NO_NUMBER),
    "Count": (0, *NO_COUNT),
    "CountOrZero": NO_COUNT,
    "Gpus": (0, 2**17 + 1, *NO_COUNT),
    "Sequences": (0, 2**15 + 1, *NO_COUNT),
    "Layers": (0, 2**11 + 1, *NO_COUNT),
    "ZeroStage": (4, *NO_COUNT),
    "bool": (0, "yes", None),
}
RIGHT: dict[str, tuple[object, ...]] = {
    "Positive": (1, 1e-9),
    "NonNegative": (0, 0.5),
    "Finite": (-1, 0),
    "Fraction": (0, 0.5, 1),
    "Count": (1, 2**50),
    "CountOrZero": (0, 1),
    "Gpus": (1, 2**17),
    "Sequences": (1, 2**15),
    "Layers": (1, 2**11),
    "ZeroStage": (0, 3),
    "bool": (True, False),
}
RECORDS = [
    *(load_cluster("h200"), load_cluster("h200").node, load_model("llama3-8b")),
    *(RecurrentMixer(1, 1), Workload(load_model("7b"), 64), ParallelConfig()),
]


def test_every_type_is_tried():
    assert WRONG.keys() == RIGHT.keys() == _RULES.keys()


def changed(record: Any, name: str, value: object) -> Any:
    """The record with a value that its constructor would not take."""
    copy = object.__new__(type(record))
    for field in fields(record):
        value_of = value if field.name == name else getattr(record, field.name)
        object.__setattr__(copy, field.name, value_of)
    return copy


def refused(record: Any, field: Any, flags: bool = False) -> Iterator[object]:
    """The values that a field of a record does not take, with the complaint about each."""
    kind, optional = field.type.removesuffix(" | None"), field.type.endswith(" | None")
    name = f"--{field.name.replace('_', '-')} " if flags else f"{field.name}="
    choices = field.metadata.get("choices")
    for value in ("other", 3) if choices else WRONG.get(kind, ()):
        if optional and value is None:
            continue
        (complaint,) = violations(changed(record, field.name, value), flags=flags)
        assert complaint.startswith(name) and " must be " in complaint
        yield value
    taken = choices or RIGHT.get(kind, ())
    for value in (*taken, None) if optional else taken:
        assert [*violations(changed(record, field.name, value))] == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_field_takes_what_its_type_says(record):
    assert sum(1 for field in fields(record) for _ in refused(record, field)) > 4


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_takes_what_its_type_says(name):
    required = {"model": "7b", "seq_len": 64, "gpus": 8}
    named = {f.name for f in fields(COMMANDS[name])}
    command = COMMANDS[name](**{k: v for k, v in required.items() if k in named})
    assert sum(1 for field in fields(command) for _ in refused(command, field, flags=True)) > 20


def test_constructors_ask_for_it():
    with pytest.raises(Exception, match="model mine: layers=0 must be a whole number of 1 or more"):
        ModelShape("mine", 0, 64, 128, 4, 4, 100)
    with pytest.raises(Exception, match="global_batch=0 must be"):
        Workload(load_model("7b"), 64, 0)
