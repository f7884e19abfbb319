"""``ds-usp env``: facts for a bug report about a machine and what is installed on it.

Every fact is read on its own: one that cannot be read is a line with the reason, no exception.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

import ds_usp
from ds_usp._version import commit
from ds_usp.config import environment, p2p_disabled_reason, single_hw_queue, torchrun_env
from ds_usp.errors import ConfigError
from ds_usp.planner.arguments import OneLineParser

# (name, its distributions, a module that is importable where it has no distribution)
_LIBRARIES: Sequence[tuple[str, tuple[str, ...], str]] = (
    ("deepspeed", ("deepspeed",), "deepspeed"),
    ("megatron-core", ("megatron-core",), "megatron.core"),
    ("transformer-engine", ("transformer-engine", "transformer_engine_torch"), ""),
    ("flash-attn (2)", ("flash-attn",), ""),
    ("flash-attn-3", ("flash-attn-3", "flash_attn_3"), "flash_attn_interface"),
    ("flash-attn-4", ("flash-attn-4",), "flash_attn.cute"),
    ("triton", ("triton", "pytorch-triton"), "triton"),
    ("einops", ("einops",), "einops"),
    ("numpy", ("numpy",), "numpy"),
)
_VARIABLES = (
    "CUDA_",
    "DS_",
    "FLASH_ATTENTION_",
    "FLASH_ATTN_",
    "GLOO_",
    "LOCAL_",
    "MASTER_",
    "MEGATRON_",
    "NCCL_",
    "NVIDIA_TF32",
    "NVTE_",
    "OMP_",
    "PYTORCH_",
    "RANK",
    "TORCH",
    "TRITON_",
    "USP_",
    "WORLD_SIZE",
)
_GPU_FIELDS = ("index", "name", "memory.total", "driver_version", "power.limit", "compute_cap")


def main(argv: Sequence[str], print_line: Callable[..., None]) -> int:
    """Run ``ds-usp env``. Under torchrun rank 0 alone prints."""
    text = "versions, GPUs and links, usable kernels and copy engines: for a bug report"
    parser = OneLineParser(prog="ds-usp env", description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    args = parser.parse(argv)
    try:
        if torchrun_env().rank:
            return 0
    except ConfigError:  # another launcher's variables; they are among the facts
        pass
    facts = collect()
    print_line(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0


def collect() -> dict[str, Any]:
    """All facts of the report: section -> name -> value."""
    return {
        "ds_usp": _package(),
        "system": _system(),
        "versions": _versions(),
        "gpus": _attempt(_gpus),
        "links": _attempt(_links),
        "kernels": _attempt(_kernels),
        "copy_engines": _attempt(_copy_engines),
        "variables": environment(_VARIABLES),
    }


def as_text(facts: Mapping[str, Any]) -> str:
    """The facts as text: a line for each name, indented below its section."""
    lines: list[str] = []
    for section, content in facts.items():
        lines.append(section)
        rows = content.items() if isinstance(content, dict) else [("", content)]
        rows = list(rows) or [("", "none")]
        width = max(len(str(name)) for name, _ in rows)
        for name, value in rows:
            head, *rest = ("none" if value is None else str(value)).splitlines() or [""]
            lines.append(f"  {name:{width}}  {head}".rstrip() if name else f"  {head}")
            lines += [f"  {'':{width}}  {line}" if name else f"  {line}" for line in rest]
    return "\n".join(lines)


def _attempt(read: Callable[[], Any]) -> Any:
    """The fact that is read, or why it cannot be."""
    try:
        return read()
    except Exception as error:  # a broken driver or library must not hide the rest
        return f"cannot be read: {type(error).__name__}: {error}"


def _package() -> dict[str, Any]:
    """Version, commit and folder of the installed ds_usp."""
    root = Path(ds_usp.__file__).resolve().parent
    checkout = (root.parent / ".git").exists()
    return {
        "version": ds_usp.__version__,
        "commit": commit() or "unknown: neither built from a checkout nor in one",
        "changes": _attempt(partial(_changes, root.parent)) if checkout else "not a checkout",
        "folder": str(root),
    }


def _changes(root: Path) -> str:
    """How many files of the checkout differ from its commit, and the first eight by name."""
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    files = [line[3:] for line in changed.splitlines()]
    return f"{len(files)} files differ from the commit: {', '.join(files[:8])}" if files else "none"


def _system() -> dict[str, Any]:
    """Python, the platform, and how many CPU cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cpus": f"{cores} of {os.cpu_count()} may be used",
    }


def _versions() -> dict[str, Any]:
    """Library -> its version, None if absent, or the error's text if reading it failed."""

    def driver() -> str | None:
        return ", ".join(sorted({row["driver_version"] for row in _nvidia_smi()})) or None

    def cuda() -> str | None:
        version = _torch().version
        return version.cuda or (version.hip and f"HIP {version.hip}")

    def nccl() -> str | None:
        torch = _torch()
        return ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None

    def cudnn() -> str | None:
        version = _torch().backends.cudnn.version()
        return None if version is None else str(version)

    readers: dict[str, Callable[[], Any]] = {
        "torch": lambda: str(_torch().__version__),
        "CUDA": cuda,
        "NCCL": nccl,
        "cuDNN": cudnn,
        "driver": driver,
    }
    for name, distributions, module in _LIBRARIES:
        readers[name] = partial(_installed, distributions, module)
    return {name: _attempt(read) for name, read in readers.items()}


def _torch() -> Any:
    """Imported where it is read: its import may fail, which is a fact of its own."""
    return import_module("torch")


def _installed(distributions: Sequence[str], module: str) -> str | None:
    """The version of the first distribution that is installed; None without one and its module."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    with suppress(ModuleNotFoundError):  # of the module's parent
        if module and util.find_spec(module) is not None:
            return "installed, of no known version"
    return None


def _nvidia_smi() -> list[dict[str, str]]:
    """A row for each GPU, by the names of ``_GPU_FIELDS``; none where nvidia-smi does not run."""
    try:
        fields = ",".join(_GPU_FIELDS)
        text = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(_GPU_FIELDS)
    ]


def _gpus() -> dict[str, str]:
    """The GPUs that torch finds; where there are none, what nvidia-smi finds."""
    cuda = _torch().cuda
    if not cuda.is_available():
        rows = _nvidia_smi()
        smi = f"nvidia-smi sees {len(rows)}, e.g. {rows[0]['name']}" if rows else "nvidia-smi none"
        return {"torch": f"sees no GPU; {smi}"}
    gpus = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
    return {
        str(index): f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
        f"{gpu.total_memory / 2**30:.1f} GiB, {gpu.multi_processor_count} SMs"
        for index, gpu in enumerate(gpus)
    }


def _links() -> dict[str, str]:
    """How GPUs reach each other: torch's peer access, nvidia-smi's matrix of NVLink and PCIe."""
    cuda = _torch().cuda
    count = cuda.device_count()
    if count < 2:
        return {"peer access": f"{count or 'no'} GPU here: no links between GPUs"}

    def access(gpu: int, peer: int) -> str:
        if gpu == peer:
            return "."
        return "yes" if cuda.can_device_access_peer(gpu, peer) else "no"

    rows = [[access(gpu, peer) for peer in range(count)] for gpu in range(count)]
    lines = [f"{i}: " + " ".join(f"{x:3}" for x in row).rstrip() for i, row in enumerate(rows)]
    return {"peer access": "\n".join(lines), "nvidia-smi": _attempt(_matrix)}


def _matrix() -> str:
    """nvidia-smi's matrix without its legend and what underlines it on a terminal."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", _output("nvidia-smi", "topo", "-m"))
    return text.partition("\nLegend")[0].expandtabs().strip()


def _kernels() -> dict[str, str]:
    """Every kernel on the device that attention would run on here."""
    device = "cuda" if _torch().cuda.is_available() else "cpu"
    from ds_usp.kernels.registry import KERNELS, unusable_reason

    facts = {"device": device}
    for kernel in KERNELS:
        reason = _attempt(partial(unusable_reason, kernel, device))
        facts[kernel.name] = "can run" if reason is None else f"cannot run: {reason}"
    return facts


def _copy_engines() -> dict[str, Any]:
    """Whether this process could use them; the ranks of a mesh decide together when it is made."""
    count = _torch().cuda.device_count()
    from ds_usp.comm.copy_engine import peer_copy_unavailable_reason

    reason = peer_copy_unavailable_reason(max(count, 1))
    if reason is None and count == 1:
        reason = "one GPU here has no other to copy from"
    reason = reason or p2p_disabled_reason()
    if reason is not None:
        return {"usable": "no", "reason": reason}
    facts = {"usable": "yes", "reason": f"all {count} GPUs reach each other"}
    facts["needs"] = "NCCL, all ranks of a mesh on one node, each on a GPU of its own"
    if single_hw_queue():
        facts["limit"] = "CUDA_DEVICE_MAX_CONNECTIONS=1: not inside of CUDA graphs"
    return facts


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout
