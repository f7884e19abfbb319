"""``ds-usp env``: facts for a bug report about a machine and what is installed on it.

In one process, without communication; under torchrun in each, and rank 0 prints. Every section is
read on its own: one that cannot be read is a line with the reason, no exception.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ds_usp
from ds_usp._version import commit
from ds_usp.config import environment, p2p_disabled_reason, single_hw_queue, torchrun_env
from ds_usp.errors import ConfigError
from ds_usp.planner.arguments import OneLineParser

_REPORT = "the issue tracker of the repository that you have it from (a vulnerability: SECURITY.md)"
_DISTRIBUTIONS = re.compile(
    r"torch|triton|pytorch-triton|deepspeed|megatron-core|transformer[-_]engine\S*|flash[-_]attn\S*|"
    r"cuda-bindings|nvidia-(nccl|cudnn|cuda-runtime)\S*|einops|numpy|transformers|accelerate|peft|"
    r"trl|diffusers|datasets|tokenizers|safetensors|huggingface[-_]hub|fla[-_]core|"
    r"flash-linear-attention|mamba[-_]ssm|causal[-_]conv1d|verl|openrlhf|axolotl|ms[-_]swift|"
    r"llamafactory|vllm|flashinfer[-_]\S+|apache[-_]tvm[-_]ffi|ring[-_]flash[-_]attn|"
    r"liger[-_]kernel|bitsandbytes|apex"
)
_VARIABLES = (
    *("CUDA_", "DS_", "FLASH_ATTENTION_", "FLASH_ATTN_", "FLASHINFER_", "GLOO_", "LOCAL_"),
    *("MASTER_", "MEGATRON_"),
    *("NCCL_", "NVIDIA_TF32", "NVTE_", "OMP_", "PYTORCH_", "RANK", "TORCH", "TRITON_", "USP_"),
    "WORLD_SIZE",
)
# Words in names of variables whose values are nobody else's business.
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASS|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(_|$)")
# Fields of torch.utils.collect_env that say the same of every machine, or pages of it.
_LONG = ("cpu_info", "pip_packages", "conda_packages", "pip_version", "miopen_runtime_version")


def main(argv: Sequence[str], print_line: Callable[..., None]) -> int:
    """Run ``ds-usp env``."""
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
    """All facts of the report: section (the reader's name) -> name -> value, or why it cannot be
    read."""
    readers = (_package, _system, _versions, _gpus, _links, _kernels, _copy_engines)
    facts = {read.__name__[1:]: _attempt(read) for read in readers}
    variables = {
        name: "set, and not printed: its name is that of a secret"
        if _SECRET.search(name)
        else value
        for name, value in environment(_VARIABLES).items()
    }
    return {"ds_usp": facts.pop("package"), **facts, "variables": variables}


def as_text(facts: Mapping[str, Any]) -> str:
    """The facts as text: a line for each name, indented below its section."""
    lines: list[str] = []
    for section, content in facts.items():
        rows = content if isinstance(content, dict) else {"": content}
        width = max(map(len, rows), default=0)
        lines.append(section)
        for name, value in (rows or {"": "none"}).items():
            head, *rest = str(value).splitlines() or [""]
            left = f"  {name:{width}}  " if name else "  "
            lines += [f"{left}{head}".rstrip(), *(f"{'':{len(left)}}{line}" for line in rest)]
    return "\n".join(lines)


def _attempt(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # a broken driver or library must not hide the rest
        return f"cannot be read: {type(error).__name__}: {error}"


def _package() -> dict[str, Any]:
    root = Path(ds_usp.__file__).resolve().parent

    def changes() -> str:
        command = ("git", "-C", str(root.parent), "status", "--porcelain", "--untracked-files=no")
        files = [line[3:] for line in _output(*command).splitlines()]
        first = ", ".join(files[:8])
        return f"{len(files)} files differ from the commit: {first}" if files else "none"

    return {
        "version": ds_usp.__version__,
        "commit": commit() or "unknown: neither built from a checkout nor in one",
        "changes": _attempt(changes) if (root.parent / ".git").exists() else "not a checkout",
        "folder": str(root),
        "bugs to": _REPORT,
    }


def _system() -> dict[str, Any]:
    """Return what ``torch.utils.collect_env`` knows, without its pages on CPU and packages."""
    from torch.utils import collect_env

    system_info = collect_env.get_env_info()._asdict()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {name: value for name, value in system_info.items() if value and name not in _LONG}
    cpus = f"{cores} of {os.cpu_count()} may be used"
    return {"python": sys.executable, **facts, "cpus": cpus}


def _versions() -> dict[str, str]:
    """Return the versions of installed distributions and of the libraries that torch has loaded."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""  # "": an installation left half done
        if _DISTRIBUTIONS.fullmatch(name):
            versions.setdefault(name, distribution.version)  # the first on the path is imported

    def loaded() -> str:
        import torch

        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none"
        return f"NCCL {nccl}, cuDNN {torch.backends.cudnn.version() or 'none'}"

    facts = {**dict(sorted(versions.items())), "loaded by torch": _attempt(loaded)}
    return {**facts, **_against_requirements(versions)}


def _against_requirements(versions: Mapping[str, str]) -> dict[str, str]:
    """Name the requirements of ds-usp and its extras that are absent or of another version; none
    where ds-usp itself is not installed."""
    installed = {canonicalize_name(name): version for name, version in versions.items()}
    absent, other = set(), set()
    try:
        needed = [Requirement(line) for line in metadata.requires("ds-usp") or ()]
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return {}
    for package in needed:
        version = installed.get(canonicalize_name(package.name))
        if version is None and _DISTRIBUTIONS.fullmatch(package.name):
            absent.add(package.name)
        elif version and not package.specifier.contains(version, prereleases=True):
            other.add(f"{package.name} {version}, not {package.specifier}")
    rows = {"not installed": absent, "not as required": other}
    return {name: ", ".join(sorted(packages)) for name, packages in rows.items() if packages}


def _gpus() -> dict[str, str]:
    import torch

    gpus = range(torch.cuda.device_count())
    properties = {str(index): str(torch.cuda.get_device_properties(index)) for index in gpus}
    return properties or {"torch": "sees no GPU"}


def _links() -> dict[str, str]:
    """How GPUs reach each other: torch's peer access, nvidia-smi's matrix of NVLink and PCIe."""
    import torch

    gpus = range(torch.cuda.device_count())
    if len(gpus) < 2:
        return {"peer access": f"{len(gpus) or 'no'} GPU here: no links between GPUs"}
    access = torch.cuda.can_device_access_peer
    apart = [f"{a}-{b}" for a in gpus for b in gpus if a != b and not access(a, b)]
    matrix = _attempt(partial(_output, "nvidia-smi", "topo", "-m"))
    matrix = re.sub(r"\x1b\[[0-9;]*m", "", matrix).partition("\nLegend")[0].expandtabs().strip()
    return {"peer access": f"not {', '.join(apart)}" if apart else "all", "nvidia-smi": matrix}


def _kernels() -> dict[str, str]:
    import torch

    from ds_usp.kernels.registry import KERNELS, unusable_reason

    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = {"device": device}
    for kernel in KERNELS:
        reason = _attempt(partial(unusable_reason, kernel, device))
        facts[kernel.name] = "can run" if reason is None else f"cannot run: {reason}"
    return facts


def _copy_engines() -> dict[str, str]:
    """Whether this process could use them; the ranks of a mesh decide together when it is made."""
    import torch

    from ds_usp.comm.copy_engine import peer_copy_unavailable_reason
    from ds_usp.comm.fused_exchange import fused_unavailable_reason

    count = torch.cuda.device_count()
    reason = peer_copy_unavailable_reason(max(count, 1))
    if reason is None and count == 1:
        reason = "one GPU here has no other to copy from"
    reason = reason or p2p_disabled_reason()
    if reason is not None:
        return {"usable": "no", "reason": reason}
    facts = {"usable": "yes", "reason": f"all {count} GPUs reach each other"}
    facts["needs"] = "NCCL, all ranks of a mesh on one node, each on a GPU of its own"
    facts["FlashInfer"] = fused_unavailable_reason() or "for Tuning(copies='flashinfer')"
    if single_hw_queue():
        facts["limit"] = "CUDA_DEVICE_MAX_CONNECTIONS=1: not inside of CUDA graphs"
    return facts


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
