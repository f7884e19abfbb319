r"""Hosts on one Linux machine: network namespaces, joined by a link of a chosen rate and delay.

    python scripts/hosts/hosts.py up --hosts 2 --ranks 2 --gbit 1 --delay-ms 0.5
    python scripts/hosts/hosts.py run -- torchrun script.py    (on each, 2 ranks, which meet)
    python scripts/hosts/hosts.py cut 1                        (host 1 loses its link; `mend 1`)
    python scripts/hosts/hosts.py down

A host has a network and a boot id of its own, what runs there a name and shared memory: two hosts
share what two machines do, the file system and the link. Needs root and /dev/net/tun.
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
from typing import Any, NoReturn

# Why the kernel's own shaping is not used: netem, which delays, is a module that many kernels lack,
# and tbf alone has no delay. A process between two tun devices has rate, delay and loss everywhere.
#
#   host 0: ranks -- eth0 (tun) ---.                    .--- eth0 (tun) -- ranks :host 1
#                                  '-- the switch: _relay
#
# Why nothing has to be cleaned up: the networks have no names in the file system. They and their
# tun devices live as long as the files that the switch has open. What a run starts is a PID
# namespace, which the kernel ends with its first process, and that one when the process that
# started it ends, however it ends (PR_SET_PDEATHSIG).
NETWORK = "10.231.77."  # in the hosts' own namespaces: it is no address of this machine's
INTERFACE, PORT = "eth0", "29400"
# Of a segment as TCP hands it to a NIC, which cuts it into packets; a tun device cannot.
MTU = 65000
QUEUE_S = 0.002  # of packets that wait for a host's link; TCP holds back what does not fit
_NEW_MNT, _NEW_UTS, _NEW_IPC, _NEW_PID, _NEW_NET = 1 << 17, 1 << 26, 1 << 27, 1 << 29, 1 << 30
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # of prctl
_PRIVATE, _BIND = 0x44000, 0x1000  # of mount
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Do what the command line says; the exit code."""
    args = _parser().parse_args()
    if os.geteuid() != 0:
        _refuse("network namespaces need root: start it with sudo, or in a virtual machine")
    if not Path("/dev/net/tun").exists():
        _refuse("no /dev/net/tun: load the module tun, or allow the container this device")
    path = Path(f"/run/ds-usp-hosts-{args.name}.json")
    state = json.loads(path.read_text()) if path.exists() else None
    running = state is not None and _runs(state)
    if args.command == "down":
        if running:
            os.kill(state["switch"], signal.SIGKILL)
            _until(lambda: not _runs(state), 5)
        path.unlink(missing_ok=True)
        return 0
    if args.command == "up":
        if running:
            _refuse(f"the hosts {args.name!r} are up already: call `down` first")
        return _up(args, path)
    if not running:
        _refuse(f"there are no hosts {args.name!r}: call `up` first")
    if args.command == "run":
        return _run(state, args)
    if not 0 <= args.host < len(state["ranks"]):
        _refuse(f"host {args.host} is none of the {len(state['ranks'])}")
    _enter(state, args.host)
    _set_interface(INTERFACE, up=args.command == "mend")
    return 0


def _up(args: argparse.Namespace, path: Path) -> int:
    ranks = args.ranks * args.hosts if len(args.ranks) == 1 else args.ranks
    if len(ranks) != args.hosts or min(*ranks, args.hosts, 250 - args.hosts) < 1:
        _refuse(f"--ranks {args.ranks} for {args.hosts} hosts: give one, or one each")
    if not (args.gbit > 0 and args.delay_ms >= 0 and 0 <= args.loss < 1):
        _refuse("--gbit must be above 0, --delay-ms 0 or more, --loss from 0 to below 1")
    ready, write = os.pipe()

    def switch() -> None:
        os.setsid()
        os.close(ready)
        devnull = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(devnull, stream)
        signal.alarm(args.lifetime)  # forgotten hosts end by themselves
        try:
            tuns, networks = zip(*map(_make_network, range(args.hosts)), strict=True)
        except OSError as error:
            os.write(write, str(error).encode())
            return
        boot_ids = [str(uuid.uuid4()) for _ in ranks]  # by which programs know a machine
        state = {"name": args.name, "ranks": ranks, "networks": networks, "boot_ids": boot_ids}
        state |= {"switch": os.getpid(), "since": _started(os.getpid())}
        path.write_text(json.dumps(state))
        os.write(write, b"up")
        os.close(write)
        _relay(tuns, args.gbit * 1e9 / 8, args.delay_ms / 1e3, args.loss)

    _fork(switch, dies_with_parent=False)
    os.close(write)
    answer = os.read(ready, 4096).decode()
    if answer != "up":
        _refuse(f"this machine refuses: {answer or 'the switch has ended'}")
    link = f"{args.gbit:g} Gbit/s, {args.delay_ms:g} ms, loss {args.loss:.1%}"
    print(f"{args.hosts} hosts of {ranks} ranks, {link}")
    return 0


def _refuse(reason: str) -> NoReturn:
    raise SystemExit(f"hosts.py: {reason}")


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
            _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        code = body()
    except BaseException as error:
        with suppress(OSError):
            os.write(2, f"hosts.py: {error}\n".encode())
    os._exit(code or 0)


def _started(process: int) -> str:
    """When a process was started, as the kernel counts; empty: it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _runs(state: dict[str, Any]) -> bool:
    return _started(state["switch"]) == state["since"]


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _make_network(host: int) -> tuple[int, int]:
    """Move this process to a new network; the files of its tun device and of itself."""
    _call("unshare", _NEW_NET)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", INTERFACE.encode(), 0x1001))
    _set_interface("lo", "127.0.0.1")
    _set_interface(INTERFACE, f"{NETWORK}{host + 1}")
    return tun, os.open("/proc/self/ns/net", os.O_RDONLY)


def _set_interface(name: str, address: str = "", *, up: bool = True) -> None:
    """The state of an interface of this network, and with an address that and its packets."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def change(request: int, value: bytes) -> None:
            fcntl.ioctl(control, request, struct.pack("16s24s", name.encode(), value))

        if address:
            for request, text in ((0x8916, address), (0x891C, "255.0.0.0")):
                change(request, struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(text)))
            change(0x8922, struct.pack("i", MTU))
        change(0x8914, struct.pack("H", 0x40 | up))


def _enter(state: dict[str, Any], host: int) -> None:
    """Move this process to a host's network."""
    network = os.open(f"/proc/{state['switch']}/fd/{state['networks'][host]}", os.O_RDONLY)
    _call("setns", network, _NEW_NET)
    os.close(network)


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
        times = [sends_until[host] - QUEUE_S for host in full] + [x[0] for x in flying[:1]]
        wait_s = max(0.0, min(times) - now) if times else None
        files = [tuns[host] for host in hosts if host not in full]
        readable = select.select(files, [], [], wait_s)[0]
        for host in map(tuns.index, readable):
            with suppress(OSError):  # no packet is left
                while sends_until[host] - now < QUEUE_S:
                    packet = os.read(tuns[host], 65536)
                    # Of IPv4, whose bytes 16 to 19 are the address.
                    to = packet[19] - 1 if packet[0] >> 4 == 4 else -1
                    if to not in hosts or random.random() < loss:
                        continue
                    # Where this process wakes late, packets that have waited meanwhile were sent
                    # meanwhile: a busy machine does not make the link slower.
                    now = time.monotonic()
                    idle = 0.0 if host in waited else now
                    start = max(idle, sends_until[host], receives_until[to])
                    sends_until[host] = receives_until[to] = start + len(packet) / bytes_per_s
                    packets += 1
                    heapq.heappush(flying, (sends_until[host] + delay_s, packets, to, packet))


# ------------------------------------------------------------------ commands on the hosts


def _run(state: dict[str, Any], args: argparse.Namespace) -> int:
    """Run a command on every host; the first exit code that is not 0, 124 where time is up."""
    command = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not command:
        _refuse("run -- COMMAND: no command")
    # A child that is killed leaves its own to this process, which waits for them.
    _call("prctl", _CHILD_SUBREAPER, 1, 0, 0, 0)
    hosts = range(len(state["ranks"]))
    children = {_fork(lambda x=host: _start(state, x, command)): host for host in hosts}
    codes: dict[int, int] = {}

    def ended() -> bool:
        for child in children.keys() - codes:
            process, status = os.waitpid(child, os.WNOHANG)
            if process:
                codes[child] = os.waitstatus_to_exitcode(status)
        return len(codes) == len(children) or not _runs(state)

    in_time = _until(ended, args.timeout)
    late = children.keys() - codes
    for child in late:
        os.kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    if late:
        why = "as the hosts are gone" if in_time else f"after {args.timeout:g} s"
        names = sorted(children[child] for child in late)
        print(f"hosts.py: ended {why}: the command on hosts {names}", file=sys.stderr)
        return 124
    return next((code for code in codes.values() if code), 0)


def _start(state: dict[str, Any], host: int, command: Sequence[str]) -> int:
    """The command on one host, in a PID namespace of its own; its exit code."""
    name, ranks = state["name"], state["ranks"]
    where = {"nnodes": len(ranks), "node_rank": host, "nproc_per_node": ranks[host]}
    where |= {"master_addr": f"{NETWORK}1", "master_port": PORT}
    settings = {key.upper(): str(value) for key, value in where.items()}
    settings |= {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    settings |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if command[0] == "torchrun":
        options = [f"--{key.replace('_', '-')}={value}" for key, value in where.items()]
        torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
        command = [*torchrun, *options, *command[1:]]
    _enter(state, host)
    _call("unshare", _NEW_MNT | _NEW_UTS | _NEW_IPC | _NEW_PID)

    def first_process() -> int:
        _call("mount", b"none", b"/", None, _PRIVATE, None)  # this machine sees no other mount
        _call("mount", b"proc", b"/proc", b"proc", 0, None)
        _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
        known = [(f"{NETWORK}{i + 1}", f"{name}-{i}") for i in range(len(ranks))]
        # Also as torch asks for them, by IPv6; no other name is to be asked for outside.
        lines = [f"{prefix}{at} {host}\n" for at, host in known for prefix in ("", "::ffff:")]
        _replace("/etc/hosts", "".join([*lines, "127.0.0.1 localhost\n"]))
        _replace("/etc/resolv.conf", "nameserver 127.0.0.1\n")
        _replace("/proc/sys/kernel/random/boot_id", state["boot_ids"][host] + "\n")
        socket.sethostname(f"{name}-{host}")
        started = subprocess.Popen(command, env=os.environ | settings)
        while True:  # the first process of a PID namespace inherits its orphans
            process, status = os.wait()
            if process == started.pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code

    return os.waitstatus_to_exitcode(os.waitpid(_fork(first_process), 0)[1])


def _replace(path: str, text: str) -> None:
    """Let a file of this mount namespace have this text."""
    other = Path("/dev/shm") / uuid.uuid4().hex
    other.write_text(text)
    _call("mount", bytes(other), path.encode(), None, _BIND, None)
    other.unlink()


def _parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--name", default="usp", help="of these hosts, if there are others")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("up", help="make the hosts").add_argument
    add("--hosts", type=int, default=2)
    numbers = {"type": lambda text: list(map(int, text.split(","))), "default": [2]}
    add("--ranks", **numbers, metavar="N[,N]", help="of each host")
    add("--gbit", type=float, default=1.0, help="Gbit/s of a host's link, each direction")
    add("--delay-ms", type=float, default=0.0, help="one way")
    add("--loss", type=float, default=0.0, help="fraction of the packets that is lost")
    add("--lifetime", type=int, default=3600, help="seconds after which they end (default: 3600)")
    add = commands.add_parser("run", help="run a command on every host").add_argument
    add("--timeout", type=float, default=600, help="seconds (default: 600)")
    add("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="torchrun: gets addresses")
    for name in ("cut", "mend"):
        commands.add_parser(name, help=f"{name} a host's link").add_argument("host", type=int)
    commands.add_parser("down", help="end the hosts and what runs on them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
