"""Two hosts on one Linux machine: network namespaces that a pair of virtual interfaces joins.

    with TwoHosts(ranks=(2, 2)) as hosts:
        hosts.run("torchrun", "program.py")        both hosts; torchrun gets ranks and addresses
        job = hosts.start("torchrun", "program.py")
        hosts.cut()                                the link between them; ``mend`` joins them again

A host has a network, a name, a boot id and shared memory of its own: two hosts share what two
machines do, the link and the file system. Needs root, ``ip`` of iproute2 and ``unshare`` of
util-linux.

Nothing has to be cleaned up after a crash: a network ends with the last process in it, and
processes of a run are a PID namespace, which the kernel ends with the process that started it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from programs import ROOT

# In the hosts' own namespaces: they are no addresses of this machine.
ADDRESSES = ("10.231.77.1", "10.231.77.2")
INTERFACE, PORT = "eth0", "29400"
LIFETIME_S = 600  # after which forgotten hosts end by themselves

# Runs in new mount, name and PID namespaces, whose mounts this machine does not see. Bash stays,
# since the first process of a PID namespace inherits its orphans and has to wait for them.
_BECOME_A_HOST = r"""
mount -t tmpfs none /dev/shm
echo "$HOSTS_FILE" > /dev/shm/hosts
echo nameserver 127.0.0.1 > /dev/shm/resolv.conf
echo "$BOOT_ID" > /dev/shm/boot_id
mount --bind /dev/shm/hosts /etc/hosts
mount --bind /dev/shm/resolv.conf /etc/resolv.conf
mount --bind /dev/shm/boot_id /proc/sys/kernel/random/boot_id
rm /dev/shm/hosts /dev/shm/resolv.conf /dev/shm/boot_id
hostname "host-$NODE_RANK"
"$@"
exit $?
"""


_OWN = (
    *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("bash", "-c", _BECOME_A_HOST, "host"),
)


class NoHostsError(Exception):
    """This machine does not permit network namespaces, or lacks a program for them."""


class Job:
    """A command that runs on both hosts."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], output: Path) -> None:
        self._processes, self._output = processes, output

    @property
    def running(self) -> bool:
        """Whether it runs on a host yet."""
        return any(process.poll() is None for process in self._processes)

    @property
    def output(self) -> str:
        """Standard output and error of both hosts until now."""
        return self._output.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """Wait until it has ended; the first exit code that is not 0.

        Raises:
            subprocess.TimeoutExpired: it has not; it is killed.
        """
        end = time.monotonic() + timeout
        try:
            codes = [p.wait(max(end - time.monotonic(), 0)) for p in self._processes]
        finally:
            self.kill()
        return next((code for code in codes if code), 0)

    def kill(self) -> None:
        """Kill what is left of it on both hosts."""
        for process in self._processes:
            process.kill()  # of unshare, which takes its PID namespace with it
            process.wait()


class TwoHosts:
    """Two hosts, while the ``with`` block runs.

    Args:
        ranks: processes that torchrun starts on each.

    Raises:
        NoHostsError: on entering, with the reason.
    """

    def __init__(self, ranks: tuple[int, int] = (2, 2)) -> None:
        self._ranks = ranks
        self._holders: list[subprocess.Popen[bytes]] = []
        self._jobs: list[Job] = []
        self._folder = tempfile.TemporaryDirectory()
        self._boot_ids = [str(uuid.uuid4()) for _ in ranks]  # by which programs know a machine

    def __enter__(self) -> TwoHosts:
        try:
            for _ in ADDRESSES:
                holder = ["unshare", "--net", "sh", "-c", f"echo up; exec sleep {LIFETIME_S}"]
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                self._holders.append(subprocess.Popen(holder, **pipes))
                if self._holders[-1].stdout.readline() != b"up\n":
                    raise NoHostsError(self._holders[-1].stderr.read().decode())
            peer = ("peer", "name", INTERFACE, "netns", str(self._holders[1].pid))
            self._ip(0, "link", "add", INTERFACE, "type", "veth", *peer)
            for host, address in enumerate(ADDRESSES):
                self._ip(host, "link", "set", "lo", "up")
                self._ip(host, "address", "add", f"{address}/24", "dev", INTERFACE)
                self._ip(host, "link", "set", INTERFACE, "up")
        except BaseException as error:
            self.__exit__()
            if isinstance(error, FileNotFoundError):
                raise NoHostsError(str(error)) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            job.kill()
        for holder in self._holders:
            with holder:
                holder.kill()
        self._folder.cleanup()

    def start(self, *command: str | Path) -> Job:
        """Start a command on both hosts at once."""
        output = Path(self._folder.name) / f"output{len(self._jobs)}"
        # Appended to, so that hosts do not overwrite each other's lines.
        with output.open("ab") as file:
            processes = [
                subprocess.Popen(
                    [*self._inside(host), *_OWN, *self._command(host, command)],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self._environment(host),
                    cwd=ROOT,
                )
                for host in range(len(ADDRESSES))
            ]
        self._jobs.append(Job(processes, output))
        return self._jobs[-1]

    def run(self, *command: str | Path, timeout: float = 90) -> tuple[int, str]:
        """Run a command on both hosts: the exit code as of :meth:`Job.wait`, and the output."""
        job = self.start(*command)
        return job.wait(timeout), job.output

    def cut(self) -> None:
        """Take the link away."""
        self._ip(1, "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """Join the hosts again."""
        self._ip(1, "link", "set", INTERFACE, "up")

    def _inside(self, host: int) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net"]

    def _ip(self, host: int, *arguments: str) -> None:
        command = [*self._inside(host), "ip", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NoHostsError(f"ip {' '.join(arguments)}: {done.stderr}")

    def _command(self, host: int, command: tuple[str | Path, ...]) -> list[str | Path]:
        if command[0] != "torchrun":
            return list(command)
        options = {"nnodes": 2, "node-rank": host, "nproc-per-node": self._ranks[host]}
        options |= {"master-addr": ADDRESSES[0], "master-port": PORT}
        launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
        return [*launcher, *(f"--{name}={value}" for name, value in options.items()), *command[1:]]

    def _environment(self, host: int) -> dict[str, str]:
        # Also as torch asks for them, by IPv6; no other name is asked for outside.
        lines = [f"{prefix}{address} host-{number}" for number, address in enumerate(ADDRESSES)
                 for prefix in ("", "::ffff:")]  # fmt: skip
        where = {"NODE_RANK": str(host), "NPROC_PER_NODE": str(self._ranks[host])}
        where |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
        where |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        where |= {"BOOT_ID": self._boot_ids[host]}
        where |= {"HOSTS_FILE": "\n".join([*lines, "127.0.0.1 localhost"])}
        where |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        return os.environ | where
