r"""Hosts on one Linux machine: network namespaces, joined by a link of a chosen rate and delay.

    python scripts/hosts/hosts.py up --hosts 2 --ranks 2 --gbit 1 --delay-ms 0.5
    python scripts/hosts/hosts.py run -- torchrun script.py    (on each, 2 ranks, which meet)
    python scripts/hosts/hosts.py cut 1                        (host 1 loses its link; `mend 1`)
    python scripts/hosts/hosts.py down

A host has a network, a name, shared memory and a boot id of its own, so ranks of two hosts share
what those of two machines do: the file system and the link. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Why the kernel's own shaping is not used: netem, which delays, is a module that many kernels lack,
# and tbf alone has no delay. A process between two tun devices has rate, delay and loss everywhere.
#
#   host 0: ranks -- eth0 (tun) ---.                    .--- eth0 (tun) -- ranks :host 1
#                                  '-- the switch: _relay
#
# Why nothing has to be cleaned up: the namespaces have no names in the file system. They live as
# long as a process in them, and a tun device as long as its file is open. Every process here is
# killed by the kernel when the one that started it ends, however it ends (PR_SET_PDEATHSIG), and
# the ranks of a run are a PID namespace, which the kernel ends with its first process.
NETWORK = "10.231.77."  # in the hosts' own namespaces: it is no address of this machine's
INTERFACE = "eth0"
# Of a segment as TCP hands it to a NIC, which cuts it into packets; a tun device cannot.
MTU = 65000
QUEUE_S = 0.002  # of packets that wait for a host's link; TCP holds back what does not fit
_NEW = {"mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "net": 0x40000000, "pid": 0x20000000}
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Do what the command line says; the exit code."""
    args = _parser().parse_args()
    if os.geteuid() != 0:
        raise SystemExit(
            "hosts.py: network namespaces need root: start it with sudo, or in a virtual machine"
        )
    if not Path("/dev/net/tun").exists():
        raise SystemExit(
            "hosts.py: no /dev/net/tun: load the module tun, or allow the container this device"
        )
    state = _State(args.name)
    if args.command == "up":
        return state.up(args)
    if args.command == "down":
        return state.down()
    running = state.read()
    if running is None:
        raise SystemExit(f"hosts.py: there are no hosts {args.name!r}: call `up` first")
    if args.command == "run":
        return _run(running, args)
    if not 0 <= args.host < len(running["hosts"]):
        raise SystemExit(f"hosts.py: host {args.host} is none of the {len(running['hosts'])}")
    return _wait(_fork(lambda: _set_link(running["hosts"][args.host], up=args.command == "mend")))


class _State:
    """The file that says which processes hold the hosts."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, Path(f"/run/ds-usp-hosts-{name}.json")

    def read(self) -> dict[str, Any] | None:
        """Its content; None if there are no such hosts (any more)."""
        if not self.path.exists():
            return None
        content: dict[str, Any] = json.loads(self.path.read_text())
        return content if _started(content["switch"]) == content["since"] else None

    def up(self, args: argparse.Namespace) -> int:
        if self.read() is not None:
            raise SystemExit(f"hosts.py: the hosts {self.name!r} are up already: call `down` first")
        ranks = args.ranks * args.hosts if len(args.ranks) == 1 else args.ranks
        if len(ranks) != args.hosts or min(*ranks, args.hosts, 250 - args.hosts) < 1:
            raise SystemExit(
                f"hosts.py: --ranks {args.ranks} for {args.hosts} hosts: give one, or one each"
            )
        if not (args.gbit > 0 and args.delay_ms >= 0 and 0 <= args.loss < 1):
            raise SystemExit(
                "hosts.py: --gbit must be above 0, --delay-ms 0 or more, --loss from 0 to below 1"
            )
        ready, write = os.pipe()

        def hold() -> None:
            os.setsid()
            os.close(ready)
            devnull = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(devnull, stream)
            signal.alarm(args.lifetime)  # forgotten hosts end by themselves
            try:
                tuns, holders = zip(
                    *(_make_host(self.name, i, args.hosts) for i in range(args.hosts)), strict=True
                )
            except OSError as error:
                os.write(write, str(error).encode())
                return
            content = {
                "switch": os.getpid(),
                "since": _started(os.getpid()),
                "hosts": holders,
                "ranks": ranks,
            }
            self.path.write_text(json.dumps(content))
            os.write(write, b"up")
            os.close(write)
            _relay(tuns, args.gbit * 1e9 / 8, args.delay_ms / 1e3, args.loss)

        _fork(hold, dies_with_parent=False)
        os.close(write)
        answer = os.read(ready, 4096).decode()
        if answer != "up":
            raise SystemExit(f"hosts.py: this machine refuses: {answer or 'the switch has ended'}")
        print(
            f"{args.hosts} hosts of {ranks} ranks, {args.gbit:g} Gbit/s, {args.delay_ms:g} ms, "
            f"loss {args.loss:.1%}"
        )
        return 0

    def down(self) -> int:
        running = self.read()
        if running is not None:
            os.kill(running["switch"], signal.SIGKILL)
            _until(lambda: not any(map(_started, (running["switch"], *running["hosts"]))), 5)
        self.path.unlink(missing_ok=True)
        return 0


# ------------------------------------------------------------------ processes and namespaces


def _call(name: str, *arguments: Any) -> None:
    """A function of libc; OSError with its name where it fails."""
    if getattr(_LIBC, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _fork(body: Callable[[], int | None], *, dies_with_parent: bool = True) -> int:
    """Run it in a new process, which the kernel ends with this one; its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code: int | None = 70
    try:
        if dies_with_parent:
            _call("prctl", 1, signal.SIGKILL, 0, 0, 0)
        code = body()
    except BaseException as error:
        with suppress(OSError):
            os.write(2, f"hosts.py: {error}\n".encode())
    os._exit(code or 0)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _started(process: int) -> str:
    """When a process was started, as the kernel counts; empty: it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _bind(text: str, over: str) -> None:
    """Let a file of this mount namespace have this text."""
    path = Path("/dev/shm") / uuid.uuid4().hex
    path.write_text(text)
    _call("mount", bytes(path), over.encode(), None, 0x1000, None)
    path.unlink()


def _make_host(name: str, index: int, hosts: int) -> tuple[int, int]:
    """The file of a host's tun device, and the process that holds its namespaces."""
    ours, of_link = socket.socketpair()
    boot_id = str(uuid.uuid4())

    def hold() -> None:
        ours.close()
        try:
            _call("unshare", sum(_NEW[kind] for kind in ("mnt", "uts", "ipc", "net")))
            _call(
                "mount", b"none", b"/", None, 0x44000, None
            )  # private: this machine sees none of it
            _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
            _bind(boot_id, "/proc/sys/kernel/random/boot_id")  # by which programs know a machine
            names = [(f"{NETWORK}{i + 1}", f"{name}-{i}") for i in range(hosts)]
            # Also as torch asks for them, by IPv6; no other name is to be asked for outside.
            lines = [f"{prefix}{at} {known}\n" for at, known in names for prefix in ("", "::ffff:")]
            _bind("".join([*lines, "127.0.0.1 localhost\n"]), "/etc/hosts")
            _bind("nameserver 127.0.0.1\n", "/etc/resolv.conf")
            host_name = f"{name}-{index}"
            _call("sethostname", host_name.encode(), len(host_name))
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", INTERFACE.encode(), 0x1001))
            _interface("lo", "127.0.0.1", 0)
            _interface(INTERFACE, f"{NETWORK}{index + 1}", MTU)
        except OSError as error:
            of_link.send(str(error).encode())
            return
        socket.send_fds(of_link, [b"up"], [tun])
        os.close(tun)
        signal.pause()

    holder = _fork(hold)
    of_link.close()
    answer, files, *_ = socket.recv_fds(ours, 4096, 1)
    if not files:
        raise OSError(answer.decode())
    os.set_blocking(files[0], False)
    return files[0], holder


def _interface(name: str, address: str, mtu: int) -> None:
    """Address, size of packets and state of an interface of this namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, text in (
            (0x8916, address),
            (0x891C, "255.0.0.0" if name == "lo" else "255.255.255.0"),
        ):
            fcntl.ioctl(
                control,
                request,
                struct.pack("16sHH4s16x", name.encode(), socket.AF_INET, 0, socket.inet_aton(text)),
            )
        if mtu:
            fcntl.ioctl(control, 0x8922, struct.pack("16si20x", name.encode(), mtu))
        fcntl.ioctl(control, 0x8914, struct.pack("16sH22x", name.encode(), 0x41))


def _enter(holder: int) -> None:
    """Become a process of a host."""
    files = [
        (kind, os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY))
        for kind in ("uts", "ipc", "net", "mnt")
    ]
    folder = os.getcwd()
    for kind, file in files:
        _call("setns", file, _NEW[kind])
        os.close(file)
    os.chdir(folder)


def _set_link(holder: int, *, up: bool) -> int:
    _enter(holder)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(
            control, 0x8914, struct.pack("16sH22x", INTERFACE.encode(), 0x41 if up else 0x40)
        )
    return 0


# ------------------------------------------------------------------ the link


def _relay(tuns: Sequence[int], bytes_per_s: float, delay_s: float, loss: float) -> None:
    """Carry packets between hosts until this process is killed. A host's link sends and receives at
    once, each at the rate; a packet arrives a delay after it was sent."""
    hosts = range(len(tuns))
    sends_until, receives_until = [0.0 for _ in hosts], [0.0 for _ in hosts]
    flying: list[tuple[float, int, int, bytes]] = []
    packets, full = 0, list[int]()
    while True:
        now = time.monotonic()
        while flying and flying[0][0] <= now:
            with suppress(OSError):  # the interface is down
                os.write(tuns[flying[0][2]], flying[0][3])
            heapq.heappop(flying)
            now = time.monotonic()
        # A host whose queue is full is not read: its packets stay in the device, and TCP waits.
        waited, full = full, [host for host in hosts if sends_until[host] - now >= QUEUE_S]
        open_hosts = [host for host in hosts if host not in full]
        times = [sends_until[host] - QUEUE_S for host in full]
        times += [flying[0][0]] if flying else []
        wait_s = max(0.0, min(times) - now) if times else None
        readable = select.select([tuns[host] for host in open_hosts], [], [], wait_s)[0]
        for host in open_hosts:
            if tuns[host] not in readable:
                continue
            with suppress(OSError):  # no packet is left
                while sends_until[host] - now < QUEUE_S:
                    packet = os.read(tuns[host], 65536)
                    to = (
                        packet[19] - 1 if packet[0] >> 4 == 4 else -1
                    )  # IPv4: 16 to 19 is the address
                    if to not in hosts or random.random() < loss:
                        continue
                    # Where this process wakes late, packets that have waited meanwhile were sent
                    # meanwhile: a busy machine does not make the link slower.
                    now = time.monotonic()
                    idle = 0.0 if host in waited else now
                    end = (
                        max(idle, sends_until[host], receives_until[to]) + len(packet) / bytes_per_s
                    )
                    sends_until[host] = receives_until[to] = end
                    packets += 1
                    heapq.heappush(flying, (end + delay_s, packets, to, packet))


# ------------------------------------------------------------------ commands on the hosts


def _run(running: dict[str, Any], args: argparse.Namespace) -> int:
    """Run a command on every host; the first exit code that is not 0, 124 where time is up."""
    hosts = range(len(running["hosts"])) if args.host is None else [args.host]
    command = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not command or not set(hosts) <= set(range(len(running["hosts"]))):
        raise SystemExit("hosts.py: run [--host N] -- COMMAND: no command, or no such host")
    children = {
        host: _fork(lambda host=host: _start(running, host, command, args.port)) for host in hosts
    }
    codes: dict[int, int] = {}

    def ended() -> bool:
        for host, child in children.items():
            if host not in codes:
                process, status = os.waitpid(child, os.WNOHANG)
                if process:
                    codes[host] = os.waitstatus_to_exitcode(status)
        return len(codes) == len(children) or not _started(running["switch"])

    in_time = _until(ended, args.timeout)
    late = {host: child for host, child in children.items() if host not in codes}
    for child in late.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if late:
        why = f"after {args.timeout:g} s" if not in_time else "as the hosts are gone"
        print(f"hosts.py: ended {why}: the command on hosts {sorted(late)}", file=sys.stderr)
        return 124
    return next((code for code in codes.values() if code), 0)


def _start(running: dict[str, Any], host: int, command: Sequence[str], port: int) -> int:
    """The command on one host, in a PID namespace of its own; its exit code."""
    root = Path("/proc", str(running["hosts"][host]), "root")  # of its mount namespace
    boot_id = (root / "proc/sys/kernel/random/boot_id").read_text()
    first, ranks = f"{NETWORK}1", running["ranks"]
    settings = {
        "MASTER_ADDR": first,
        "MASTER_PORT": str(port),
        "NNODES": str(len(ranks)),
        "NODE_RANK": str(host),
    }
    settings |= {
        "NPROC_PER_NODE": str(ranks[host]),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
    }
    settings |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if command[0] == "torchrun":
        where = [
            "--nnodes",
            str(len(ranks)),
            "--node-rank",
            str(host),
            "--nproc-per-node",
            str(ranks[host]),
        ]
        where += ["--master-addr", first, "--master-port", str(port)]
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            *where,
            *command[1:],
        ]
    _enter(running["hosts"][host])
    _call("unshare", _NEW["pid"] | _NEW["mnt"])

    def first_process() -> int:
        _call("mount", b"proc", b"/proc", b"proc", 0, None)
        _bind(boot_id, "/proc/sys/kernel/random/boot_id")
        started = subprocess.Popen(command, env=os.environ | settings)
        while True:  # the first process of a PID namespace inherits its orphans
            process, status = os.wait()
            if process == started.pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code

    return _wait(_fork(first_process))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--name", default="usp", help="of these hosts, if there are others (default: usp)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="make the hosts")
    up.add_argument("--hosts", type=int, default=2)
    up.add_argument(
        "--ranks",
        type=lambda text: [int(x) for x in text.split(",")],
        default=[2],
        metavar="N[,N]",
        help="of each host",
    )
    up.add_argument(
        "--gbit", type=float, default=1.0, help="Gbit/s of a host's link, each direction"
    )
    up.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    up.add_argument("--loss", type=float, default=0.0, help="fraction of the packets that is lost")
    up.add_argument(
        "--lifetime",
        type=int,
        default=3600,
        help="seconds after which the hosts end (default: 3600)",
    )
    run = commands.add_parser(
        "run", help="run a command on every host; torchrun gets the hosts' addresses"
    )
    run.add_argument("--host", type=int, help="on this one only")
    run.add_argument("--timeout", type=float, default=600, help="seconds (default: 600)")
    run.add_argument("--port", type=int, default=29400)
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    for name in ("cut", "mend"):
        commands.add_parser(name, help=f"{name} a host's link").add_argument("host", type=int)
    commands.add_parser("down", help="end the hosts and what runs on them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
