"""The command line: what the commands print, and how they refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import planner_commands
import pytest

from ds_usp.planner.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
CLOSE = {"rel": 1e-9, "abs": 1e-9}  # another libm may differ in the last digit


def run(capsys: pytest.CaptureFixture[str], line: str, status: int = 0) -> str:
    assert main(line.split()) == status
    return capsys.readouterr().out


def numbers(content: object, path: str = "") -> dict[str, object]:
    """The leaves of a JSON document by their path."""
    if isinstance(content, (dict, list)):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return {k: v for key, x in items for k, v in numbers(x, f"{path}/{key}").items()}
    return {path: content}


@pytest.mark.parametrize("name", planner_commands.FILES)
def test_commands_print_what_their_golden_file_states(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by tests/planner_commands.py."""
    monkeypatch.chdir(ROOT)
    for line, expected in planner_commands.read(name):
        printed = planner_commands.run(line)
        first, second = (text.partition("\n") for text in (printed, expected))
        if expected.startswith(("{", "[{")):
            actual, stated = (numbers(json.loads(text)) for text, *_ in (first, second))
            assert list(actual) == list(stated), line
            texts = [key for key, value in stated.items() if not isinstance(value, (int, float))]
            assert {k: actual.pop(k) for k in texts} == {k: stated.pop(k) for k in texts}, line
            assert actual == pytest.approx(stated, **CLOSE), line
            assert first[2] == second[2], line
        else:
            assert printed == expected, line


def test_json_is_consistent_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --model llama3-8b --seq-len 131072 --gpus 16 --cluster a800 --json"
    report = json.loads(run(capsys, line))
    best = report["plans"][0]
    assert best["tp"] * best["ulysses"] * best["ring"] * best["pp"] * best["dp"] == 16
    assert best["memory"]["total_bytes"] <= report["budget_bytes"]
    assert best["step_s"] == pytest.approx(sum(best["time_s"].values()))
    assert best["tokens_per_s_per_gpu"] == pytest.approx(131072 / 16 / best["step_s"])
    sizes = best["memory"]
    apart = ("total_bytes", "formula_bytes", "offloaded_bytes", "pipeline_stage")
    total = sum(size for name, size in sizes.items() if name not in apart)
    assert total == pytest.approx(sizes["total_bytes"], abs=8)


def test_measured_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama-65B on 256 H800 (Megatron-Kwai, figure 7), which the golden file has predicted."""
    line = next(line for line, _ in planner_commands.read("memory.txt"))
    report = json.loads(run(capsys, f"{line} --json"))
    assert report["total_bytes"] == pytest.approx(52089073152, rel=0.012)


def test_bytes_of_attention_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    line = "comm --model llama3-8b --seq-len 131072 --ulysses 4 --ring 4 --json"
    first = json.loads(run(capsys, line))["ranks"][0]
    # (u - 1) x local tokens x (q and out of 8 heads, k and v of 2) x 128 features x 2 bytes
    assert first["forward_bytes"]["all_to_all"] == 3 * 8192 * (8 + 4 + 8) * 128 * 2
    # Ring rank 0's back chunk is the last of all: only its front one is seen, by 3 ranks.
    assert first["forward_bytes"]["ring_kv"] == 3 * 16384 * 2 * 2 * 128 * 2
    assert first["ledger_bytes"]["ring_dkv"] == 6 * 16384 * 2 * 2 * 128 * 2
    double = json.loads(run(capsys, line + " --inner-ring 2"))["ranks"][0]
    # Of both, one chunk for a node of two crosses the network.
    assert double["forward_bytes"]["ring_kv_outer"] == 16384 * 2 * 2 * 128 * 2


def test_lengths_in_powers_of_1024(capsys: pytest.CaptureFixture[str]) -> None:
    line = "memory --model 7b --ring 4 --seq-len {} --json"
    written = [run(capsys, line.format(length)) for length in ("131072", "128K", "128k")]
    assert written[0] == written[1] == written[2]


COMPONENTS = ("weights", "activations", "logits", "exchange", "transient", "workspace")
LEGEND_OF = {
    "plan": (*COMPONENTS, "ulysses x ring", "mb", "loss", "recompute", "offload", "MFU", "step s"),
    "memory": COMPONENTS,
    "max-length": (*COMPONENTS, "tokens", "GPU, host", "ends with"),
    "longest": (*COMPONENTS, "tokens", "GPU, host", "ends with"),
    "comm": (),
    "explain": (),
    "profile": (),
}


@pytest.mark.parametrize("command", LEGEND_OF)
def test_help_states_one_default_a_flag_and_what_columns_mean(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"], prog="ds-usp")
    text = capsys.readouterr().out
    name = "max-length" if command == "longest" else command
    assert text.startswith(f"usage: ds-usp {name} ")
    options, _, legend = re.split(
        r"\n((?:columns|components) of )", text + "\ncolumns of ", maxsplit=1
    )
    assert all(f"  {word}" in legend or f", {word}" in legend for word in LEGEND_OF[command])
    assert "None" not in options and "False" not in options
    for option in " ".join(options.split()).split(" --")[1:]:
        assert option.count("default") <= 1, option


def test_the_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All components of memory and time are in its legends; the same plans make the same file."""
    pytest.importorskip("matplotlib")
    line = "plan --model llama3-8b --seq-len 131072 --gpus 16 --cluster a800"
    files = [tmp_path / name for name in ("one.svg", "other.svg")]
    for file in files:
        run(capsys, f"{line} --svg {file}")
    one, other = (file.read_text(encoding="utf-8") for file in files)
    best = json.loads(run(capsys, f"{line} --json"))["plans"][0]
    shown = [name for name, seconds in best["time_s"].items() if seconds]
    assert one == other and all(f">{name}<" in one for name in (*shown, "activations", "matrices"))


def test_the_printed_example_of_a_schedule() -> None:
    page = (ROOT / "docs" / "design" / "schedule.md").read_text(encoding="utf-8")
    block = page.split("\n$ ds-usp ")[1].partition("\n```")[0]
    line, _, printed = block.partition("\n")
    assert planner_commands.run(line) == printed


def test_timelines_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Lanes of the exchanges that a pass has, waits hatched; the same call makes the same file."""
    pytest.importorskip("matplotlib")
    line = "explain --seq-len 32K --heads 16 --ulysses-degree 2 --ring-degree 2 --plot"
    files = [tmp_path / name for name in ("one.svg", "other.svg", "forward.svg", "one.png")]
    for file, options in zip(files, ("", "", " --forward", ""), strict=True):
        assert f"wrote {file}" in run(capsys, f"{line} {file}{options}")
    one, other, forward = (file.read_text(encoding="utf-8") for file in files[:3])
    assert one == other and "<pattern" in one
    for lane, count in (("compute", 2), ("all_to_all", 2), ("ring_kv", 2), ("ring_dkv", 1)):
        assert one.count(f">{lane}<") == count and forward.count(f">{lane}<") == count - 1
    assert files[3].read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = f"plan --model 7b --seq-len 8K --gpus 8 --svg {tmp_path / 'plans.svg'}"
    assert main(line.split()) == 2
    assert 'pip install "ds-usp[plots]"' in capsys.readouterr().err


STARTED = """
import sys, time
begin = time.process_time()
from ds_usp.errors import ConfigError
from ds_usp.planner import ParallelConfig, Workload, load_model
from ds_usp.planner.__main__ import main
from ds_usp.planner.emit import KINDS, emit
main("memory --model 7b --seq-len 8K".split())
loaded = [name for name in ("torch", "numpy", "matplotlib") if name in sys.modules]
print(time.process_time() - begin, *loaded)
"""


def test_it_starts_at_once() -> None:
    """No torch, and half a second of a core at most; the whole process, as a shell sees it."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seconds, *loaded = done.stdout.splitlines()[-1].split()
    assert float(seconds) < 0.5 and loaded == []


def test_a_closed_pipe_is_no_error() -> None:
    """As `| head -1` does: the reader goes before the text is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ds_usp.planner", "memory", "--model", "7b", "--seq-len", "8K"]
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_old_names_of_the_package_warn() -> None:
    import ds_usp.planner

    with pytest.warns(DeprecationWarning, match="Split is now ParallelConfig"):
        assert ds_usp.planner.Split is ds_usp.planner.ParallelConfig
    with pytest.raises(AttributeError, match="no attribute 'Cut'"):
        _ = ds_usp.planner.Cut


def test_old_keywords_and_attributes_warn() -> None:
    from ds_usp.planner import Workload, framework_caps, load_cluster, load_model, search

    cluster, work = load_cluster("a800"), Workload(load_model("llama3-8b"), 8192, 1)
    caps = framework_caps("megatron-deepspeed")
    with pytest.warns(DeprecationWarning, match=r"search\(how=\) is now framework="):
        result = search(cluster, work, 8, how=caps)  # type: ignore[call-arg]
    assert result.plans[0] == search(cluster, work, 8, framework=caps).plans[0]
    with pytest.warns(DeprecationWarning, match="Plan.split is now config"):
        assert result.plans[0].split is result.plans[0].config


def test_profile_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One process without links; the file serves the other commands at once, also where it is of
    two models with the same layers."""
    out, models = tmp_path / "here.json", tmp_path / "models.json"
    shape = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "vocab": 100}
    models.write_text(json.dumps({"base": shape, "chat": {**shape, "vocab": 120}}))
    both = f"{models}:base {models}:chat"
    text = run(capsys, f"profile --out {out} --seconds 0.01 --device cpu --model {both}")
    assert "attention ulysses 1 x ring 1" in text and f"plan with --cluster {out}" in text
    for name in ("base", "chat"):
        line = f"plan --model {models}:{name} --seq-len 256 --gpus 1 --cluster {out}"
        assert json.loads(run(capsys, line + " --json"))["plans"]


def test_on_a_cpu_no_models_layers_are_measured_unless_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One layer of a large model would take longer than all else."""
    line = f"profile --out {tmp_path / 'here.json'} --seconds 0.01 --device cpu --json"
    report = json.loads(run(capsys, line))
    assert report["version"] == 1 and report["levels"]["origin"] == "assumed"
    assert "calls" in report and "layers" not in report and "ends" not in report
