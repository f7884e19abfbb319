"""Programs that tests start as processes of their own: Python, torchrun, scripts of examples.

    python("-m", "ds_usp", "verify")          a program of the project
    forked("import torch", {folder: text})    several that share their imports
    torchrun(2, "bench_attention.py")         the same, as ranks
    bash("tiny", DRY_RUN="1")                 a script of the examples

Ranks that call functions of the tests come from ``harness.py``, those of a framework's script from
``checkout_runs.py``.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


def python(
    *arguments: str | Path, cwd: Path = ROOT, timeout: float = 300, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the project on its path and one thread; its exit code is not judged.

    Args:
        settings: of the environment, beside those of the tests.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **settings,
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def torchrun(
    ranks: int, *arguments: str | Path, **options: Any
) -> subprocess.CompletedProcess[str]:
    """:func:`python` by torchrun, on ranks of this machine."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return python(*launcher, *arguments, **options)


_FORK = """
import os, sys
gc.freeze()  # else each program copies, at its end, the pages of what was imported: a second
gc.enable()
folders = {}
for folder in sys.argv[1:]:
    if child := os.fork():
        folders[child] = folder
        continue
    os.chdir(folder)
    os.closerange(3, 256)  # an import keeps one of the tests' pipes open, as long as any rank lives
    for stream in (1, 2):
        os.dup2(os.open(f"printed{stream}", os.O_CREAT | os.O_WRONLY), stream)
    sys.path.insert(0, folder)
    exec(open("program.py").read())
    sys.exit()
while folders:
    child, status = os.wait()
    with open(f"{folders.pop(child)}/code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
"""


def forked(
    imports: str, programs: Mapping[Path, str], **settings: str
) -> dict[Path, subprocess.CompletedProcess[str]]:
    """:func:`python` of programs beside each other, each in its folder, with its modules first.

    They are forked from one process that has done the imports, which take longer than most.
    """
    for folder, program in programs.items():
        (folder / "program.py").write_text(program)
    done = python("-c", f"import gc; gc.disable()\n{imports}{_FORK}", *programs, **settings)
    assert done.returncode == 0, done.stderr
    ended = {}
    for folder, program in programs.items():
        code, *printed = ((folder / x).read_text() for x in ("code", "printed1", "printed2"))
        ended[folder] = subprocess.CompletedProcess(program, int(code), *printed)
    return ended


# ------------------------------------------------------------------ scripts of the examples

FOLDER = ROOT / "examples_deepspeed" / "sequence_parallel"
CHECKOUT = ROOT / "tests/examples/checkout"  # has a pretrain_gpt.py
SCRIPTS = {
    "1.3B": "ds_pretrain_gpt_1.3B_usp_32k.sh",
    "30B": "ds_pretrain_gpt_30B_usp_32k.sh",
    "6.7B": "ds_pretrain_gpt_6.7B_usp_128k.sh",
    "tiny": "ds_pretrain_gpt_tiny_usp_cpu.sh",
}
GPUS = {"1.3B": "4", "30B": "16", "6.7B": "8", "tiny": "4"}
MEGATRON_LM_FOLDER = ROOT / "examples_deepspeed" / "megatron_lm"
MEGATRON_LM_SCRIPTS = {
    "lm-1.3B": "pretrain_gpt_1.3B_usp_32k.sh",
    "lm-llama3": "llama3_8B_usp_128k.sh",
    "lm-tiny": "pretrain_gpt_tiny_usp_cpu.sh",
}
PATHS = {size: FOLDER / name for size, name in SCRIPTS.items()}
PATHS |= {size: MEGATRON_LM_FOLDER / name for size, name in MEGATRON_LM_SCRIPTS.items()}
# The program that is started -> the environment that selects it.
PROGRAMS = {"trainer": {}, "megatron_deepspeed": {"MEGATRON_DEEPSPEED_PATH": str(CHECKOUT)}}


def environment(**settings: str) -> dict[str, str]:
    """What a script needs of the environment, and settings."""
    kept = ("HOME", "LANG", "TMPDIR", "USP_NO_INSTALL")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**env, **settings}


def bash(
    size: str, *arguments: str, cwd: Path | None = None, timeout: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    return run_script(PATHS[size], *arguments, cwd=cwd, timeout=timeout, **settings)


def run_script(
    path: Path, *arguments: str, cwd: Path | None = None, timeout: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(path), *arguments],
        cwd=cwd or ROOT,
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def losses_of_first_program(_: object, page: Path) -> list[float]:
    """Run a page's first program on a rank of ``harness.py``; returns its ``losses``."""
    programs = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(programs[0], names)
    losses: list[float] = names["losses"]
    return losses
