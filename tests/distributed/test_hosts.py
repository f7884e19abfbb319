"""Two hosts, made of network namespaces: what crosses the link between them, and what is left when
it breaks. Skipped where namespaces are not permitted; CI's machines permit them."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, torchrun
from two_hosts import INTERFACE, NoHostsError, TwoHosts

PROGRAM = ROOT / "tests" / "bytes_between_hosts.py"
TRAINER = ROOT / "examples_deepspeed" / "sequence_parallel" / "pretrain_gpt_usp.py"
MODEL = shlex.split(
    "--seq-length 128 --num-layers 2 --hidden-size 64 --num-attention-heads 8 "
    "--num-key-value-heads 4 --micro-batch-size 2 --device cpu --optimizer sgd --lr 0.1 "
    "--lr-decay-style constant --clip-grad 0"
)
Up = Callable[..., TwoHosts]


@pytest.fixture
def up() -> Any:
    """Two hosts with so many ranks each; the test is skipped where they cannot be."""
    started: list[TwoHosts] = []

    def start(*ranks: int) -> TwoHosts:
        started.append(TwoHosts(ranks))
        try:
            return started[-1].__enter__()
        except NoHostsError as reason:
            started.pop()
            pytest.skip(f"NO TWO HOSTS HERE, what crosses a network is not tested: {reason}")

    yield start
    for hosts in started:
        hosts.__exit__()


def interfaces_and_processes() -> tuple[list[str], str]:
    names = [line.split(":")[0] for line in Path("/proc/net/dev").read_text().splitlines()]
    listed = subprocess.run(["pgrep", "-f", "sleep 59.9"], capture_output=True)
    return names, listed.stdout.decode()


REACH = """if True:
    import os, socket
    # One write even where Python buffers nothing: the hosts share a file.
    print(socket.gethostname() + " " + open("/proc/sys/kernel/random/boot_id").read())
    try:
        os.environ["NODE_RANK"] == "1" or socket.create_connection(("host-1", 9), timeout=1)
    except ConnectionRefusedError:  # by the other host
        pass
"""


def test_hosts_are_apart_and_leave_nothing(up):
    before = interfaces_and_processes()
    hosts = up(1, 1)
    reach = (sys.executable, "-c", REACH)
    code, text = hosts.run(*reach)
    assert code == 0, text
    names = dict(re.findall(r"host-(\d) (\S+)", text))
    assert names.keys() == {"0", "1"} and names["0"] != names["1"]
    hosts.cut()
    assert hosts.run(*reach)[0] == 1, "the link is not cut"
    hosts.mend()
    assert hosts.run(*reach)[0] == 0
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.run("sleep", "59.9", timeout=0.5)
    hosts.start("bash", "-c", "sleep 59.9 & wait")
    hosts.__exit__()
    assert interfaces_and_processes() == before


@pytest.mark.parametrize("ranks", [(1, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_the_ledger_counts_what_crosses(up, ranks, tmp_path):
    path = tmp_path / "bytes.json"
    code, text = up(*ranks).run("torchrun", PROGRAM, path, INTERFACE)
    assert code == 0, text[-3000:]
    rows = json.loads(path.read_text())
    assert len(rows) == {2: 2, 4: 4}[sum(ranks)] * 3 * 2 * 2  # meshes, cases, passes, hosts
    for *row, ledger, counted, resent in rows:
        # What TCP, barriers and the comparison of the calls send besides: a share, and a floor.
        assert ledger <= counted < 1.05 * ledger + 20_000 + resent, (row, ledger, counted, resent)
    if sum(ranks) == 2:
        sent = {tuple(row): ledger for *row, ledger, _, _ in rows}
        # 512 tokens, 4 heads of 128 numbers of 4 bytes: q, k, v and the output, each way.
        assert sent["2 x 1", "8 KV heads", "forward", 0] == 4 * 512 * 4 * 128 * 4
        # Zigzag: rank 0 has the first and the last quarter, of which rank 1 sees one.
        assert sent["1 x 2", "8 KV heads", "forward", 0] == 2 * 256 * 8 * 128 * 4
        assert sent["1 x 2", "8 KV heads", "forward", 1] == 2 * 512 * 8 * 128 * 4


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow
def test_a_run_across_hosts_is_that_of_one_rank_and_goes_on_after_a_lost_host(up, tmp_path):
    hosts = up(2, 2)
    folder, saved = tmp_path / "two", tmp_path / "saved"
    across = (*MODEL, "--ds-sequence-parallel-size", "4", "--output-dir", folder)
    across += ("--save", saved, "--save-interval", "4", "--ulysses-degree", "auto")
    across += ("--distributed-timeout-minutes", "0.2")
    job = hosts.start("torchrun", TRAINER, *across, "--train-iters", "4000")
    metrics = folder / "metrics.jsonl"
    while job.running and not (metrics.exists() and len(losses(folder)) >= 6):
        time.sleep(0.1)
    hosts.cut()
    code = job.wait(12 + 20 + 20)
    assert code != 0, job.output[-3000:]
    assert "ulysses 4 across nodes" in job.output  # auto has read the hosts
    step = int((saved / "latest").read_text().removeprefix("step_"))
    assert step >= 4
    hosts.mend()
    steps = ("--train-iters", str(step + 4))
    code, text = hosts.run("torchrun", TRAINER, *across, *steps, "--load", saved)
    assert code == 0 and f"resumed from step {step}" in text, text[-3000:]
    done = torchrun(1, TRAINER, *MODEL, *steps, "--output-dir", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_odd_hosts_of_one_name_give_the_right_result(up):
    """Of 3 ranks and 1."""
    rename = f"{sys.executable} -c \"import socket; socket.sethostname('same')\""
    options = "--nnodes 2 --node-rank $NODE_RANK --nproc-per-node $NPROC_PER_NODE"
    meet = "--master-addr $MASTER_ADDR --master-port $MASTER_PORT"
    verify = "-m ds_usp verify --ulysses 2 --seq-len 512 --heads 4"
    command = f"{sys.executable} -m torch.distributed.run {options} {meet} {verify}"
    code, text = up(3, 1).run("bash", "-c", f"{rename}; exec {command}")
    assert code == 0 and "EXACT" in text, text[-3000:]
