"""Functions that a patched host does without: an edit of them is refused, for it has no effect."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megatron_patches
from ds_usp.errors import ConfigError, PatchError
from megatron_patches import Bypass, Guard, PatchSet, fingerprint
from megatron_patches.__main__ import main
from megatron_patches.guards import fingerprint_at

NAME = "bypassed_host"
HOST = '''
def scale(x):
    """Half of x."""
    return x / 2

class Core:
    def __init__(self):
        self.factor = 2

    @property
    def name(self):
        return "core"
'''


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def host(text: str) -> None:
        (tmp_path / f"{NAME}.py").write_text(text)
        sys.modules.pop(NAME, None)
        importlib.invalidate_caches()
        importlib.import_module(NAME)

    host(HOST)
    yield host
    sys.modules.pop(NAME, None)


def bypass(path: str, flag: str = "") -> Bypass:
    target = f"{NAME}:{path}"
    return Bypass(target, "ours computes it", Guard(source_sha256=fingerprint_at(target)), flag)


def test_a_place_has_the_fingerprint_of_its_object(write: Callable[[str], None]) -> None:
    host = sys.modules[NAME]
    for path, found in (("scale", host.scale), ("Core", host.Core), ("Core.name", host.Core.name)):
        assert fingerprint_at(f"{NAME}:{path}") == fingerprint(found)


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("scale", "x / 2", "x / 3"),
        ("Core.__init__", "factor = 2", "factor = 3"),
        ("Core", '"core"', '"center"'),
        ("scale", "def scale", "def other"),
    ],
)
def test_an_edit_is_refused_with_the_reason(
    write: Callable[[str], None], path: str, before: str, after: str
) -> None:
    patches = PatchSet("host", (), bypassed=(bypass(path),))
    patches.verify()
    write(HOST.replace(before, after))
    with pytest.raises(
        PatchError, match=rf"(?s){NAME}:{path}: its source .*Undo the edits"
    ) as found:
        patches.apply()
    if "def " not in before:
        assert "An edit has no effect: ours computes it" in str(found.value)
    PatchSet("host", (), bypassed=(bypass("Core.name"),)).verify()
    patches.apply(unchecked=True)


def test_comments_and_formatting_do_not_count(write: Callable[[str], None]) -> None:
    patches = PatchSet("host", (), bypassed=(bypass("scale"), bypass("Core")))
    write("# more\n" + HOST.replace("x / 2", "(x  /  2)  # half").replace("Half of x", "x / 2"))
    patches.verify()


def test_what_a_flag_bypasses_is_compared_with_the_flag(write: Callable[[str], None]) -> None:
    patches = PatchSet("host", (), bypassed=(bypass("scale", flag="--chunks"),))
    write(HOST.replace("x / 2", "x / 3"))
    patches.apply()
    patches.verify_flag("--other")
    with pytest.raises(PatchError, match="scale: its source is another"):
        patches.verify_flag("--chunks")


def test_what_a_script_defines_is_compared_when_it_runs(
    write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = bypass("scale").retarget(NAME, "__main__")
    patches = PatchSet("host", (), bypassed=(row,))
    patches.apply()
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[NAME])
    patches.apply_later()
    write(HOST.replace("x / 2", "x / 3"))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[NAME])
    with pytest.raises(PatchError, match="__main__:scale: its source is another"):
        patches.apply_later()


def test_the_checkout_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_DEEPSPEED_PATH", str(tmp_path))
    assert main(["--check"]) == 1
    assert f"{tmp_path} is in no checkout of Megatron-DeepSpeed" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert main(["--check", str(tmp_path / "other")]) == 1  # a path goes first
    assert f"{tmp_path / 'other'} is in no checkout" in capsys.readouterr().err
    monkeypatch.setenv("MEGATRON_DEEPSPEED_PATH", str(tmp_path / "gone"))
    assert main(["--check"]) == 1
    assert "MEGATRON_DEEPSPEED_PATH=" in capsys.readouterr().err
    monkeypatch.delenv("MEGATRON_DEEPSPEED_PATH")
    with pytest.raises(ConfigError, match="or set MEGATRON_DEEPSPEED_PATH"):
        megatron_patches.check("megatron_deepspeed")
