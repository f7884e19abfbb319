"""Patches go in together or not at all, and only where the host is what they were written for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import megatron_patches
from ds_usp.errors import ConfigError, PatchError
from megatron_patches import Guard, Patch, PatchSet, fingerprint
from megatron_patches.patch import applied_sets

HOST = '''
LIMIT = 3

def double(x):
    """Twice x."""
    return 2 * x  # as ever

class Layer:
    factor = 10

    def __init__(self, width):
        self.width = width

    def size(self):
        return self.width * self.factor

    @staticmethod
    def name(suffix):
        return "layer" + suffix

    @classmethod
    def make(cls, width):
        return cls(width)

class Wide(Layer):
    pass
'''
USER = """
from doctored_host import Layer, double
from doctored_host import double as kept

def use(x):
    return double(x)
"""


@pytest.fixture
def write_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write and import the doctored host, with or without changes to its text."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str = HOST) -> None:
        for name, source in (("doctored_host", text), ("doctored_user", USER)):
            sys.modules.pop(name, None)
            (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        for name in ("doctored_host", "doctored_user"):
            importlib.import_module(name)

    write()
    yield write
    megatron_patches.restore()
    for name in ("doctored_host", "doctored_user"):
        sys.modules.pop(name, None)


@pytest.fixture
def host(write_host: Callable[..., None]) -> ModuleType:
    return sys.modules["doctored_host"]


def patch(name: str, replacement: object, kind: str = "wrap", **kwargs: object) -> Patch:
    return Patch(f"doctored_host:{name}", replacement, kind, **kwargs)  # type: ignore[arg-type]


def times_three(original: Callable[..., int], *args: object, **kwargs: object) -> int:
    return 3 * original(*args, **kwargs)


def louder(original: Callable[..., str], *args: object) -> str:
    return original(*args).upper()


def test_all_kinds_apply_and_restore(host: ModuleType) -> None:
    before = dict(vars(host)), dict(vars(host.Layer)), dict(vars(host.Wide))
    user = sys.modules["doctored_user"]
    patches = PatchSet(
        "doctored",
        (
            patch("double", times_three, also_in=("doctored_user:double",)),
            patch("LIMIT", 5, "replace"),
            patch("triple", lambda x: 3 * x, "add"),
            patch("Layer.size", times_three),
            patch("Layer.name", louder),
            patch("Layer.make", lambda original, cls, width: original(cls, width + 1)),
            patch("Wide.size", times_three),
        ),
    )
    patches.apply()
    assert (host.double(1), user.use(1), host.LIMIT, host.triple(1)) == (6, 6, 5, 3)
    assert (host.Layer(1).size(), host.Wide(1).size()) == (30, 90)  # the one inherited
    assert (host.Layer.name("s"), host.Layer.make(1).width) == ("LAYERS", 2)
    assert applied_sets() == (patches,)
    patches.restore()
    assert (dict(vars(host)), dict(vars(host.Layer)), dict(vars(host.Wide))) == before
    assert user.use(1) == 2
    assert applied_sets() == ()
    patches.apply()  # a set that was taken back can go in again
    assert host.double(1) == 6


def test_names_that_hold_the_old_object_are_reported(host: ModuleType) -> None:
    patches = PatchSet("doctored", (patch("double", times_three),))
    assert patches.stale() == ()
    patches.apply()
    assert set(patches.stale()) == {"doctored_user:double", "doctored_user:kept"}


def test_a_second_apply_is_refused_and_changes_nothing(host: ModuleType) -> None:
    first = PatchSet("doctored", (patch("double", times_three),))
    again = PatchSet("other", (patch("LIMIT", 9, "replace"), patch("double", times_three)))
    first.apply()
    for patches in (first, again):
        with pytest.raises(PatchError, match="patched already"):
            patches.apply()
    assert (host.double(1), host.LIMIT) == (6, 3)
    PatchSet("disjoint", (patch("LIMIT", 9, "replace"),)).apply()
    assert len(applied_sets()) == 2
    megatron_patches.restore()
    assert (host.double(1), host.LIMIT, applied_sets()) == (2, 3, ())


def test_an_error_half_way_leaves_nothing_changed(host: ModuleType) -> None:
    patches = PatchSet(
        "doctored", (patch("double", times_three), Patch("builtins:int.real", 1, "replace"))
    )
    with pytest.raises(PatchError, match="Nothing was changed"):
        patches.apply(unchecked=True)
    assert host.double(1) == 2
    assert applied_sets() == ()
    with pytest.raises(PatchError, match="gone"):
        PatchSet("d", (patch("double", times_three), patch("gone", times_three))).apply(
            unchecked=True
        )
    assert host.double(1) == 2


def test_the_fingerprint_ignores_comments_and_formatting(
    write_host: Callable[..., None], host: ModuleType
) -> None:
    known = fingerprint(host.double), fingerprint(host.Layer)
    write_host(
        HOST.replace('    """Twice x."""\n', "")
        .replace("# as ever", "# as always")
        .replace("2 * x", "(2 *\n        x)")
    )
    now = sys.modules["doctored_host"]
    assert (fingerprint(now.double), fingerprint(now.Layer)) == known
    write_host(HOST.replace("2 * x", "x * 2"))
    assert fingerprint(sys.modules["doctored_host"].double) != known[0]


def test_all_mismatches_are_reported_together(
    write_host: Callable[..., None], host: ModuleType
) -> None:
    known = fingerprint(host.double)
    same = Guard(source_sha256=known)
    one_of = Guard(source_sha256=("0" * 16, fingerprint(host.Layer.size)))
    patches = PatchSet(
        "doctored",
        (
            patch("double", times_three, also_in=("doctored_user:use",), guard=same),
            patch("Layer.size", times_three, guard=one_of),
            patch("Layer", times_three),
            patch("gone", times_three),
            patch("LIMIT", 1, "add"),
            patch("Layer.factor", 1, "replace", guard=Guard(source_sha256="0" * 16)),
            Patch("no_such_module:name", 1, "replace"),
            patch("Layer.name", louder, guard=Guard("pytest", ">=1000")),
            patch("Layer.make", louder, guard=Guard("no-such-distribution", ">=1")),
        ),
    )
    write_host(HOST.replace("2 * x", "x * 2"))
    with pytest.raises(PatchError) as caught:
        patches.apply()
    text = str(caught.value)
    for expected in (
        f"doctored_host:double: its source is another: expected fingerprint {known}, found",
        "doctored_user:use: is not the same object as doctored_host:double",
        "doctored_host:Layer: is a class",
        "doctored_host:gone: does not exist",
        "doctored_host:LIMIT: exists already",
        "doctored_host:Layer.factor: its source cannot be read",
        "no_such_module:name: ModuleNotFoundError",
        "doctored_host:Layer.name: needs pytest >=1000, found",
        "doctored_host:Layer.make: needs no-such-distribution >=1, which is not installed",
        "--usp-unchecked-host",
    ):
        assert expected in text, text
    assert "Layer.size" not in text
    assert sys.modules["doctored_host"].double(1) == 2


def test_at_the_users_own_risk_guards_are_not_compared(host: ModuleType) -> None:
    guarded = patch("double", times_three, guard=Guard("pytest", ">=1000", "0" * 16))
    PatchSet("doctored", (guarded,)).apply(unchecked=True)
    assert host.double(1) == 6


def test_what_is_no_patch_is_refused() -> None:
    with pytest.raises(ConfigError, match="no place to patch"):
        Patch("doctored_host.double", 1)
    with pytest.raises(ConfigError, match="not replace, wrap or add"):
        Patch("doctored_host:double", 1, "remove")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unknown framework 'nemo'; there are .*deepspeed"):
        megatron_patches.apply("nemo")


def test_a_patch_without_its_package_is_left_out(host: ModuleType) -> None:
    absent = Patch("no_such_package.module:name", 1, needs="no_such_package")
    present = patch("double", times_three, needs="pytest")
    PatchSet("doctored", (absent, present)).apply()
    assert host.double(1) == 6


def test_patches_of_a_script_wait_for_it(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    exec("def batch(x):\n    return x\n", vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    patches = PatchSet(
        "doctored",
        (patch("double", times_three),),
        later=(Patch("__main__:batch", times_three, "wrap"),),
    )
    patches.apply()
    assert vars(script)["batch"](1) == 1
    patches.apply_later()
    patches.apply_later()
    assert vars(script)["batch"](1) == 3
    megatron_patches.restore()
    assert (vars(script)["batch"](1), host.double(1)) == (1, 2)

    wrong = PatchSet(
        "doctored",
        (patch("double", times_three),),
        later=(Patch("__main__:other", times_three, "wrap"),),
    )
    wrong.apply()
    with pytest.raises(PatchError, match="__main__:other: does not exist"):
        wrong.apply_later()
    assert host.double(1) == 6  # what was applied before stays
