"""The stress test of scripts/stress: it makes calls, and tells hangs from one another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "stress"

# Ranks that wait for each other's message.
NOTHING_SENT = """
def run(rank, world, *args):
    dist.recv(torch.zeros(1), 1 - rank)
"""
# A rank that a signal frees, as one that has missed a wake-up. It writes its stack at that signal.
MISSED_WAKE_UP = """
def run(rank, world, seed, indices, pause_s, torch_only, on_call):
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    (stacks,) = [link for link in links if os.path.realpath(link).endswith(f"/stack{rank}")]
    while not os.path.getsize(stacks):
        time.sleep(0.01)
    on_call()
    time.sleep(100)
"""
# One rank raises, the other waits for it.
RAISES = """
def run(rank, world, *args):
    if rank:
        raise ValueError("of rank 1")
    dist.barrier()
"""
PATCHED = """
import os, sys, time
sys.path.insert(0, sys.argv.pop(1))
import torch
import torch.distributed as dist
import calls, hang, run as stress
{code}
calls.run, hang.GRACE_S, hang._gdb = run, 1.0, lambda pid: ""
sys.exit(stress.main())
"""


def stress(*args: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, which forks: nothing is forked from the tests'."""
    start = ["-c", PATCHED.format(code=code), str(FOLDER)] if code else [str(FOLDER / "run.py")]
    command = [sys.executable, *start, "--seconds", "120", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize("flags", [(), ("--torch-only", "--pause-ms", "2", "--beside", "2")])
def test_calls_are_made_and_none_hangs(flags: tuple[str, ...]) -> None:
    result = stress("--calls", "10", "--calls-per-world", "5", "--worlds", "2,3", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    assert "0 hangs, 0 errors" in last
    assert int(last.split(": ")[1].split(" calls")[0]) >= 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (NOTHING_SENT, "no message is in flight"),
        (MISSED_WAKE_UP, "freed by a signal to the main threads"),
        (RAISES, "ValueError: of rank 1"),
    ],
    ids=["nothing_sent", "missed_wake_up", "raises"],
)
def test_a_hang_is_found_and_its_cause_named(code: str, message: str) -> None:
    flags = ("--calls", "1", "--calls-per-world", "1", "--worlds", "2", "--stall-s", "3", "--first")
    result = stress(*flags, code=code)
    assert result.returncode == 1, result.stdout + result.stderr
    assert message in result.stdout
    hung = "1 hangs" if code is not RAISES else "0 hangs"
    assert hung in result.stdout
