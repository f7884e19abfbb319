"""The command line: what the commands print, and how they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_usp.planner.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PLAN = "plan --model llama3-8b --seq-len 131072 --gpus 16 --gpus-per-node 8 --cluster a800"
MEMORY = (
    "memory --model models.json:65B --seq-len 8192 --micro-batch 1 --gpus 256 --tp 2 --ulysses 1 "
    "--ring 2 --pp 8 --layers-per-virtual-stage 2 --zero 1 --recompute gemm-last "
    "--offload-ratio 0.4 --grad-dtype fp32"
)


def run(capsys: pytest.CaptureFixture[str], line: str, status: int = 0) -> str:
    assert main(line.split()) == status
    return capsys.readouterr().out


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, MEMORY + " --json"))
    assert found["total_bytes"] == pytest.approx(52089073152, rel=0.012)  # what was measured
    parts = [found[f"{name}_bytes"] for name in ("weights", "gradients", "optimizer")]
    parts += [found[f"{name}_bytes"] for name in ("activations", "logits", "exchange")]
    parts += [found["transient_bytes"], found["workspace_bytes"]]
    assert sum(parts) == pytest.approx(found["total_bytes"], abs=8)
    bare = json.loads(run(capsys, MEMORY + " --json --workspace-gib 0"))
    assert bare["total_bytes"] == bare["formula_bytes"] == found["formula_bytes"]
    assert "total" in run(capsys, MEMORY)
    last = json.loads(run(capsys, MEMORY + " --json --stage 7"))
    assert last["pipeline_stage"] == 7 and last["logits_bytes"] > 0


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, PLAN + " --global-batch 1 --top 5 --json"))
    assert len(found["plans"]) == 5
    best = found["plans"][0]
    degrees = [best[axis] for axis in ("tp", "ulysses", "ring", "pp", "dp")]
    product = 1
    for degree in degrees:
        product *= degree
    assert product == 16
    assert best["memory"]["total_bytes"] <= found["budget_bytes"]
    assert best["step_s"] == pytest.approx(sum(best["time_s"].values()))
    assert best["tokens_per_s_per_gpu"] == pytest.approx(131072 / 16 / best["step_s"])
    fused = json.loads(run(capsys, PLAN + " --fused-loss --fused-activation --json"))
    assert all(plan["memory"]["logits_bytes"] == 0 for plan in fused["plans"])
    text = run(capsys, PLAN + " --top 3 --explain")
    assert "ulysses x ring" in text and "refused:" in text and "because" in text


def test_comm(capsys: pytest.CaptureFixture[str]) -> None:
    line = "comm --model llama3-8b --seq-len 131072 --ulysses 4 --ring 4"
    found = json.loads(run(capsys, line + " --json"))
    assert [rank["rank"] for rank in found["ranks"]] == list(range(16))
    first = found["ranks"][0]
    # (u - 1) x local tokens x (q and out of 8 heads, k and v of 2) x 128 features x 2 bytes
    assert first["forward_bytes"]["all_to_all"] == 3 * 8192 * (8 + 4 + 8) * 128 * 2
    # Ring rank 0's back chunk is the last of all: only its front one is seen, by 3 ranks.
    assert first["forward_bytes"]["ring_kv"] == 3 * 16384 * 2 * 2 * 128 * 2
    assert first["ledger_bytes"]["ring_dkv"] == 6 * 16384 * 2 * 2 * 128 * 2
    assert "bwd ring dkv" in run(capsys, line + " --tp 2")
    assert "outer" not in run(capsys, line)
    assert "bwd outer dkv" in run(capsys, line + " --inner-ring 2")
    double = json.loads(run(capsys, line + " --inner-ring 2 --json"))["ranks"][0]
    # Of both, one chunk for a node of two goes across, one stays and one is passed on.
    assert double["forward_bytes"]["ring_kv_outer"] == 16384 * 2 * 2 * 128 * 2


def test_lengths_in_powers_of_1024(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "memory --model 7b --ring 4 --seq-len {} --json",
        "comm --model 7b --ring 4 --seq-len {} --json",
        "plan --model 7b --gpus 8 --seq-len {} --json",
    ):
        written = [run(capsys, line.format(length)) for length in ("131072", "128K", "128k")]
        assert written[0] == written[1] == written[2]
    packed = run(capsys, "plan --model 7b --gpus 8 --seq-len 1M --documents 512K,524288 --json")
    assert json.loads(packed)["seq_len"] == 2**20


def test_every_command_has_the_same_cluster_and_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "plan --model 7b --gpus 8 --seq-len 8K",
        "memory --model 7b --seq-len 8K",
        "longest --model 7b --gpus 8",
    ):
        assert run(capsys, line).startswith("cluster h800 (default)\n")
        assert run(capsys, f"{line} --cluster a100").startswith("cluster a100\n")


@pytest.mark.parametrize("command", ["plan", "memory", "longest", "comm", "table", "profile"])
def test_help_states_one_default_a_flag_and_what_columns_mean(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"], prog="ds-usp")
    text = capsys.readouterr().out
    assert text.startswith(f"usage: ds-usp {command} ")
    options, _, legend = text.partition("columns")
    assert "None" not in options and "False" not in options
    for option in " ".join(options.split()).split(" --")[1:]:
        assert option.count("default") <= 1, option
    wanted = {
        "plan": ("exchange", "transient", "workspace", "mb", "MFU"),
        "memory": (),
        "longest": ("ends with", "exchange", "transient", "workspace"),
        "table": ("params d^2", "act b s d", "relayed", "P+G"),
    }
    assert all(word in legend for word in wanted.get(command, ()))
    assert command != "memory" or all(word in text for word in ("exchange", "transient"))


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert "SP-Ulysses" in run(capsys, "table")
    assert len(json.loads(run(capsys, "table --json"))) == 9


def test_the_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from xml.etree import ElementTree

    run(capsys, f"{PLAN} --svg {tmp_path / 'plans.svg'}")
    root = ElementTree.parse(tmp_path / "plans.svg").getroot()
    assert root.tag.endswith("svg")
    boxes = [element.attrib for element in root if element.tag.endswith("rect")]
    assert len(boxes) > 50
    for box in boxes:
        right = float(box.get("x", 0)) + float(box["width"])
        bottom = float(box.get("y", 0)) + float(box["height"])
        assert right <= float(root.attrib["width"]) and bottom <= float(root.attrib["height"])


def test_no_picture_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plans.svg"
    assert main([*NOTHING.split(), "--svg", str(file)]) == 1
    assert f"--svg {file}: not written" in capsys.readouterr().err and not file.exists()


NOTHING = "plan --model 175b --seq-len 1048576 --gpus 8 --cluster h100"


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, NOTHING, 1)
    assert "nothing fits" in text and "lacks" in text and "GiB" in text and "would help" in text
    found = json.loads(run(capsys, NOTHING + " --json", 1))
    assert found["plans"] == [] and found["lacks_gib"] > 0 and found["would_help"]
    assert found["nearest"]["lacks_bytes"] > 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("plan --model none --seq-len 8 --gpus 8", "no model 'none'"),
        ("plan --model 7b --seq-len 8192 --gpus 8 --cluster none", "no cluster 'none'"),
        ("plan --model 7b --seq-len 8192 --gpus 12", "do not fill nodes of 8"),
        ("plan --model 7b --seq-len 8192 --gpus 0", "--gpus 0 must be 1 or more"),
        ("plan --model 7b --seq-len 8192 --gpus 8 --memory-gib 0", "holds nothing"),
        ("plan --model 7b --seq-len 8192 --gpus 8 --memory-gib nan", "holds nothing"),
        ("plan --model 7b --seq-len 8192 --gpus 8 --svg no/where.svg", "cannot write --svg no/wh"),
        ("memory --model 7b --seq-len 8192 --workspace-gib nan", "--workspace-gib nan must be 0"),
        ("memory --model 7b --seq-len 8192 --dp 0", "--dp 0 must be 1 or more"),
        ("memory --model 7b --seq-len 8192 --gpus 0", "--gpus 0 must be 1 or more"),
        ("memory --model 7b --seq-len 8192 --global-batch 0", "--global-batch 0 must be 1 or"),
        ("plan --model 7b --seq-len 0 --gpus 8", "'0' must be a whole number of 1 or more"),
        (
            "plan --model 7b --seq-len 8192 --gpus 8 --documents 1,x",
            "argument --documents: 'x' must be",
        ),
        ("plan --model 7b --seq-len 8192 --gpus 8 --top 0", "--top 0"),
        ("memory --model 7b --seq-len 8192 --gpus 6 --tp 4", "--gpus 6 is not a multiple of"),
        ("memory --model 7b --seq-len 8192 --tp 3", "tp=3 must divide the 32 query heads"),
        ("memory --model 7b --seq-len 8192 --ring 0", "every degree must be 1 or more"),
        ("memory --model 7b --seq-len 8192 --zero 7", "zero=7 must be"),
        ("memory --model 7b --seq-len 8192 --stage 1", "outside the 1 stages"),
        ("comm --model llama3-8b --seq-len 8192 --ulysses 64", "ulysses=64 needs at least 64"),
        ("comm --model llama3-8b --seq-len 64 --ring 4 --inner-ring 3", "Use one of 1, 2, 4"),
        ("comm --model llama3-8b --seq-len 32 --ring 64", "32 tokens are too few"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], line: str, says: str) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and says in captured.err
    assert captured.err.count("\n") == 1


STARTED = """
import sys, time
begin = time.process_time()
from ds_usp.errors import ConfigError
from ds_usp.planner import Split, Workload, load_model
from ds_usp.planner.__main__ import main
from ds_usp.planner.emit import KINDS, emit
main(["table"])
print(time.process_time() - begin, *(name for name in ("torch", "numpy") if name in sys.modules))
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
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "ds_usp.planner", "table"],
            cwd=ROOT,
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


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
    found = json.loads(run(capsys, line))
    assert found["version"] == 1 and found["levels"]["origin"] == "assumed"
    assert "calls" in found and "layers" not in found and "ends" not in found


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--out profile.txt", "must end in .json"),
        ("--out nowhere/profile.json", "there is no folder nowhere"),
        ("--out profile.json --seconds 0", "must be more than 0"),
        ("--out profile.json --seconds nan", "--seconds nan must be more than 0, and finite"),
        ("--out profile.json --model b9000", "no model 'b9000'"),
    ],
)
def test_profiles_that_cannot_be(
    capsys: pytest.CaptureFixture[str], line: str, says: str, tmp_path: Path
) -> None:
    words = line.replace("profile.json", str(tmp_path / "profile.json")).split()
    words = ["nowhere/profile.json" if "nowhere" in word else word for word in words]
    assert main(["profile", "--device", "cpu", *words]) == 2
    assert says in capsys.readouterr().err
