"""Patches are applied together or not at all, and only to the source that they were written for."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

import megatron_patches
from ds_usp.errors import ConfigError, PatchError
from megatron_patches import Bypass, Guard, Patch, PatchSet, fingerprint
from megatron_patches.__main__ import main
from megatron_patches.guards import fingerprint_at
from megatron_patches.patch_set import applied_sets

NAME, USER = "doctored_framework", "doctored_user"
SOURCE = '''
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

    @property
    def half(self):
        return self.width // 2

    @staticmethod
    def name(suffix):
        return "layer" + suffix

    @classmethod
    def make(cls, width):
        return cls(width)

class Wide(Layer):
    pass
'''
USER_SOURCE = f"""
from {NAME} import Layer, double
from {NAME} import double as renamed

def use(x):
    return double(x)
"""


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Import the doctored framework and its user again, after replacements in its text."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(*replacements: tuple[str, str]) -> ModuleType:
        text = SOURCE
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        for name, source in ((NAME, text), (USER, USER_SOURCE)):
            sys.modules.pop(name, None)
            (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        framework = importlib.import_module(NAME)
        if hasattr(framework, "double"):
            importlib.import_module(USER)
        return framework

    yield write
    megatron_patches.restore()
    for name in (NAME, USER):
        sys.modules.pop(name, None)


@pytest.fixture
def framework(edit: Callable[..., ModuleType]) -> ModuleType:
    return edit()


def patch(name: str, replacement: object, kind: str = "wrap", **kwargs: object) -> Patch:
    return Patch(f"{NAME}:{name}", replacement, kind, **kwargs)  # type: ignore[arg-type]


def bypass(path: str, flag: str = "") -> Bypass:
    guard = Guard(source_sha256=fingerprint_at(f"{NAME}:{path}"))
    return Bypass(f"{NAME}:{path}", "ds_usp computes it", guard, flag)


def times_three(original: Callable[..., int], *args: object, **kwargs: object) -> int:
    return 3 * original(*args, **kwargs)


def louder(original: Callable[..., str], *args: object) -> str:
    return original(*args).upper()


TRIPLED = partial(patch, "double", times_three)


def test_all_kinds_apply_and_restore(framework):
    layer, wide, user = framework.Layer, framework.Wide, sys.modules[USER]
    before = dict(vars(framework)), dict(vars(layer)), dict(vars(wide))
    patches = PatchSet(
        "doctored",
        (
            TRIPLED(also_in=(f"{USER}:double",)),
            patch("LIMIT", 5, "replace"),
            patch("triple", lambda x: 3 * x, "add"),
            patch("Layer.size", times_three),
            patch("Layer.name", louder),
            patch("Layer.make", lambda original, cls, width: original(cls, width + 1)),
            patch("Wide.size", times_three),
        ),
    )
    patches.apply()
    assert (framework.double(1), user.use(1), framework.LIMIT, framework.triple(1)) == (6, 6, 5, 3)
    assert (layer(1).size(), wide(1).size()) == (30, 90)  # the inherited one is wrapped twice
    assert (layer.name("s"), layer.make(1).width) == ("LAYERS", 2)
    assert applied_sets() == (patches,)
    patches.restore()
    assert (dict(vars(framework)), dict(vars(layer)), dict(vars(wide))) == before
    assert (user.use(1), applied_sets()) == (2, ())
    patches.apply()
    assert framework.double(1) == 6
    patches.restore()
    twice = PatchSet("twice", (TRIPLED(), TRIPLED()))  # each is undone, the last one first
    twice.apply()
    assert framework.double(1) == 18
    twice.restore()
    assert framework.double is before[0]["double"]


def test_names_that_hold_a_replaced_object_are_reported(framework):
    patches = PatchSet("doctored", (TRIPLED(also_in=(f"{USER}:double",)),))
    assert patches.stale() == ()
    patches.apply()
    assert patches.stale() == (f"{USER}:renamed",)


def test_a_second_apply_is_refused_and_changes_nothing(framework):
    first = PatchSet("doctored", (TRIPLED(),))
    first.apply()
    for patches in (first, PatchSet("other", (patch("LIMIT", 9, "replace"), TRIPLED()))):
        with pytest.raises(PatchError, match="patched already"):
            patches.apply()
    assert (framework.double(1), framework.LIMIT) == (6, 3)
    PatchSet("disjoint", (patch("LIMIT", 9, "replace"),)).apply()
    assert len(applied_sets()) == 2
    megatron_patches.restore()
    assert (framework.double(1), framework.LIMIT, applied_sets()) == (2, 3, ())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Patch("builtins:int.real", 1, "replace"), "Nothing was changed"),
        (patch("gone", times_three), "gone does not exist"),
    ],
)
def test_an_error_half_way_leaves_nothing_changed(framework, bad, message):
    with pytest.raises(PatchError, match=message):
        PatchSet("doctored", (TRIPLED(), bad)).apply(unchecked=True)
    assert (framework.double(1), applied_sets()) == (2, ())


def test_the_fingerprint_ignores_comments_and_formatting(edit):
    def fingerprints(*replacements: tuple[str, str]) -> list[str]:
        framework = edit(*replacements)
        layer = framework.Layer
        objects = {"double": framework.double, "Layer": layer, "Layer.half": layer.half}
        digests = [fingerprint(value) for value in objects.values()]
        assert digests == [fingerprint_at(f"{NAME}:{path}") for path in objects]
        return digests

    known = fingerprints()
    docstring = ('    """Twice x."""\n', "")
    assert fingerprints(docstring, ("# as ever", "#"), ("2 * x", "(2 *\n        x)")) == known
    assert fingerprints(("2 * x", "x * 2"))[0] != known[0]


def test_all_mismatches_are_reported_together(edit, framework):
    known = fingerprint(framework.double)
    one_of = Guard(source_sha256=("0" * 16, fingerprint(framework.Layer.size)))
    patches = PatchSet(
        "doctored",
        (
            TRIPLED(also_in=(f"{USER}:use",), guard=Guard(source_sha256=known)),
            patch("Layer.size", times_three, guard=one_of),
            patch("Layer", times_three),
            patch("gone", times_three),
            patch("LIMIT", 1, "add"),
            patch("Layer.factor", 1, "replace", guard=Guard(source_sha256="0" * 16)),
            Patch("no_such_module:name", 1, "replace"),
            patch("Layer.name", louder, guard=Guard("pytest", ">=1000")),
        ),
    )
    framework = edit(("2 * x", "x * 2"))
    with pytest.raises(PatchError) as caught:
        patches.apply()
    text = str(caught.value)
    for expected in (
        f"{NAME}:double: its source is another: expected fingerprint {known}, found",
        f"{USER}:use: is not the same object as {NAME}:double",
        f"{NAME}:Layer: is a class",
        f"{NAME}:gone: does not exist",
        f"{NAME}:LIMIT: exists already",
        f"{NAME}:Layer.factor: its source cannot be read",
        "no_such_module:name: ModuleNotFoundError",
        "  needs pytest >=1000, found",
        "--usp-unchecked-host",
    ):
        assert expected in text, text
    assert "Layer.size" not in text
    assert framework.double(1) == 2
    PatchSet("doctored", (patches.patches[0],)).apply(unchecked=True)
    assert framework.double(1) == 6


def test_a_missing_package_is_one_line_with_the_command_that_installs_it():
    absent = Patch("no_such_module:name", 1, guard=Guard("no-such-distribution", ">=1,<2"))
    with pytest.raises(PatchError) as caught:
        PatchSet("doctored", (absent, absent)).apply()
    requirement = "no-such-distribution>=1,<2"
    text = f"doctored needs {requirement}, not installed: pip install '{requirement}'"
    assert str(caught.value) == text


def test_invalid_patches_are_refused():
    with pytest.raises(ConfigError, match="no patch target"):
        Patch(f"{NAME}.double", 1)
    with pytest.raises(ConfigError, match="not replace, wrap or add"):
        Patch(f"{NAME}:double", 1, "remove")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unknown framework 'nemo'; there are .*deepspeed"):
        megatron_patches.apply("nemo")
    with pytest.raises(ConfigError, match=r"unknown setting 'ring_degree'.*ulysses_degree"):
        megatron_patches.patch_set("megatron_deepspeed", ring_degree=2)
    for name in ("megatron_deepspeed", "megatron_lm"):
        with pytest.raises(PatchError, match=rf"^no checkout .*: call .*prepare\('{name}', .*\)"):
            megatron_patches.apply(name)


def test_a_patch_without_its_package_is_left_out(framework):
    absent = Patch("no_such_package.module:name", 1, needs="no_such_package")
    PatchSet("doctored", (absent, TRIPLED(needs="pytest"))).apply()
    assert framework.double(1) == 6


def test_patches_of_a_script_are_applied_when_it_runs(framework, monkeypatch):
    script = ModuleType("__main__")
    exec("def batch(x):\n    return x\n", vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    patches = PatchSet("doctored", (TRIPLED(),), (Patch("__main__:batch", times_three, "wrap"),))
    patches.apply()
    assert vars(script)["batch"](1) == 1
    patches.apply_later()
    patches.apply_later()
    assert vars(script)["batch"](1) == 3
    megatron_patches.restore()
    assert (vars(script)["batch"](1), framework.double(1)) == (1, 2)

    wrong = PatchSet("doctored", (TRIPLED(),), (Patch("__main__:other", times_three, "wrap"),))
    wrong.apply()
    with pytest.raises(PatchError, match="__main__:other: does not exist"):
        wrong.apply_later()
    assert framework.double(1) == 6  # earlier patches stay


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("double", "2 * x", "3 * x"),
        ("Layer.__init__", "self.width = width", "self.width = -width"),
        ("Layer", '"layer"', '"level"'),
        ("double", "def double", "def twice"),
    ],
)
def test_an_edit_of_a_bypassed_function_is_refused(edit, framework, path, old, new):
    patches = PatchSet("doctored", (), bypassed=(bypass(path),))
    others = PatchSet("doctored", (), bypassed=(bypass("Layer.half"), bypass("Wide")))
    edit(("# as ever", "#"))
    patches.verify()
    edit((old, new))
    with pytest.raises(PatchError, match=rf"(?s){NAME}:{path}: its source .*Undo the edits") as got:
        patches.apply()
    assert "def" in old or "An edit has no effect: ds_usp computes it" in str(got.value)
    others.verify()
    patches.apply(unchecked=True)


def test_bypasses_of_a_flag_and_of_the_script_are_compared_later(edit, framework, monkeypatch):
    flagged, scripted = bypass("double", flag="--chunks"), bypass("double")
    scripted = scripted.retarget(NAME, "__main__")
    patches = PatchSet("doctored", (), bypassed=(flagged, scripted))
    monkeypatch.setitem(sys.modules, "__main__", framework)
    patches.apply_later()
    monkeypatch.setitem(sys.modules, "__main__", edit(("2 * x", "3 * x")))
    patches.apply()
    patches.verify_flag("--other")
    with pytest.raises(PatchError, match=f"{NAME}:double: its source is another"):
        patches.verify_flag("--chunks")
    with pytest.raises(PatchError, match="__main__:double: its source is another"):
        patches.apply_later()


def test_the_checkout_comes_from_the_environment(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MEGATRON_DEEPSPEED_PATH", str(tmp_path))
    assert main(["--check"]) == 1
    assert f"{tmp_path} is in no checkout of Megatron-DeepSpeed" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert main(["--framework", "megatron_deepspeed", "--check", str(tmp_path / "other")]) == 1
    assert f"{tmp_path / 'other'} is in no checkout" in capsys.readouterr().err  # a path goes first
    monkeypatch.setenv("MEGATRON_DEEPSPEED_PATH", str(tmp_path / "gone"))
    assert main(["--check"]) == 1
    assert "MEGATRON_DEEPSPEED_PATH=" in capsys.readouterr().err
    monkeypatch.delenv("MEGATRON_DEEPSPEED_PATH")
    with pytest.raises(ConfigError, match="or set MEGATRON_DEEPSPEED_PATH"):
        megatron_patches.check("megatron_deepspeed")


README = Path(megatron_patches.__file__).with_name("README.md")
BLOCK = r"(<!-- table {host} -->\n)(.*?)(<!-- end -->)"


@pytest.mark.parametrize("host", megatron_patches.frameworks())
def test_the_table_is_what_is_applied(host, request):
    text = README.read_text(encoding="utf-8")
    block = re.compile(BLOCK.format(host=host), re.DOTALL)
    match = block.search(text)
    assert match, f"{README.name} has no place for the table of {host}"
    table = f"{megatron_patches.table(host)}\n"
    if request.config.getoption("--write-support-table"):
        README.write_text(block.sub(lambda m: m[1] + table + m[3], text), encoding="utf-8")
        return
    assert match[2] == table, "run: pytest tests/unit/test_patch.py --write-support-table"
