"""The scripts of examples_deepspeed/transformers_sft: golden commands, refusals, a run.

``python tests/examples/test_transformers_sft.py`` writes the golden files anew.
"""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import ROOT, run_script

FOLDER = ROOT / "examples_deepspeed" / "transformers_sft"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("sft_*.sh"))


def bash(name: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return run_script(FOLDER / f"{name}.sh", *arguments, timeout=300, **settings)


def golden(name: str) -> Path:
    return Path(__file__).resolve().parent / "golden" / f"{name}.txt"


def printed(name: str, *arguments: str, **settings: str) -> str:
    done = bash(name, *arguments, DRY_RUN="1", **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(str(ROOT), "$ROOT").replace(" --", " \\\n    --")


def test_sft_has_at_most_120_lines():
    assert len((FOLDER / "sft.py").read_text().splitlines()) <= 120


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_dry_run_prints_the_golden_command(name):
    assert printed(name) == golden(name).read_text()


def test_there_are_scripts_for_2_4_and_8_gpus_and_for_the_cpu():
    ranks = {re.findall(r"--nproc-per-node (\d)", golden(name).read_text())[-1] for name in SCRIPTS}
    assert len(SCRIPTS) == 4 and ranks == {"2", "4", "8"}


def test_settings_are_overridden_by_their_names_in_capitals():
    text = printed("sft_llama3_8B_usp_64k_4gpu", "--learning_rate", "1", SP_SIZE="2", FSDP="true")
    assert "--sequence_parallel_size 2" in text and "--gradient_accumulation_steps 2" in text
    assert '--fsdp_config \\{\\"version\\":\\ 2\\}' in text
    assert "--deepspeed" not in text and text.rstrip().endswith("--learning_rate 1")
    assert "--deepspeed" not in printed("sft_llama3_8B_usp_64k_4gpu", ZERO_STAGE="")


REFUSED = [
    ({"SP_SIZE": "3"}, "SP_SIZE=3 must divide NUM_GPUS=4"),
    ({"ULYSSES_DEGREE": "3"}, "ULYSSES_DEGREE=3 must divide SP_SIZE=4"),
    ({"SEQ_LENGTH": "64K"}, "SEQ_LENGTH='64K' must be a whole number"),
    ({"GLOBAL_BATCH_SIZE": "3", "BATCH_SIZE": "2"}, "GLOBAL_BATCH_SIZE=3 must be a multiple of"),
    ({"ZERO_STAGE": "4"}, "ZERO_STAGE='4' must be 0, 1, 2, 3 or empty"),
    ({"MODEL": ""}, "MODEL is not set"),
    ({"SEQ_LENGHT": "65536"}, "SEQ_LENGHT is no setting; did you mean SEQ_LENGTH?"),
    ({"MICRO_BATCH_SIZE": "2"}, "MICRO_BATCH_SIZE is no setting; did you mean BATCH_SIZE?"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_bad_settings_are_refused(settings, message):
    done = bash("sft_llama3_8B_usp_64k_4gpu", **settings)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr


@pytest.mark.transformers
@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_the_tiny_script_trains_as_transformers_does_on_one_rank(tmp_path):
    # Two ranks as a ring: each process imports for 7 s. tests/integrations train on other meshes.
    mesh = {"NUM_GPUS": "2", "SP_SIZE": "2", "ULYSSES_DEGREE": "1"}
    settings = {"OUTPUT_HOME": str(tmp_path), "TRAIN_ITERS": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = bash("sft_tiny_usp_cpu", **mesh, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "6 losses and gradient norms agree" in done.stdout
    assert (tmp_path / "tiny_s512_g2_sp2_u1" / "model.safetensors").exists()


if __name__ == "__main__":
    for script in SCRIPTS:
        golden(script).write_text(printed(script))
