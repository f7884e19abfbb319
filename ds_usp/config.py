"""Settings as one frozen value, and the only reader of argument namespaces and environment: each
process reads its own, mostly at start, and nothing here communicates."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import Degrees
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, KINDS, ORDERS, TokenLayout

_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# Measured on an H200 host, 64 MiB blocks: 0.18 s a GiB to pin instead of 0.42 to 0.63.
_PINNED = (("pinned_use_cuda_host_register", "True"), ("pinned_num_register_threads", "8"))
_SEGMENTS = (("expandable_segments", "True"),)
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads the first that is set


@dataclass(frozen=True, kw_only=True)
class USPConfig:
    """The sequence-parallel configuration.

    Args:
        sp_degree: ranks that share a sequence (``--ds-sequence-parallel-size``).
        ulysses_degree: of these, ranks that exchange heads (``--ulysses-degree``); None: all, as
            DeepSpeed-Ulysses does. The ring takes the rest.
        layout: token layout (``--usp-layout``) of a program that shards the batch itself.
        order: which axis has its ranks next to each other.
        kernel: attention kernel (``--usp-kernel``).

    Raises:
        ConfigError: degrees that do not multiply, or unknown names.
    """

    sp_degree: int = 1
    ulysses_degree: int | None = None
    layout: str = TokenLayout.LOADERS_KIND
    order: str = DEFAULT_SP_ORDER
    kernel: str = "auto"

    def __post_init__(self) -> None:
        Degrees(sp=self.sp_degree, ulysses=self.ulysses_degree).check(Degrees.FLAGS)
        for name, choices in (("layout", KINDS), ("order", ORDERS)):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"unknown {name} {getattr(self, name)!r}; there are {', '.join(choices)}"
                )

    @property
    def ulysses(self) -> int:
        return self.sp_degree if self.ulysses_degree is None else self.ulysses_degree

    @property
    def ring(self) -> int:
        return self.sp_degree // self.ulysses

    @classmethod
    def from_args(cls, args: Any) -> USPConfig:
        """Read a framework's argparse namespace; missing attributes keep their default."""
        names = {
            "sp_degree": "ds_sequence_parallel_size",
            "ulysses_degree": "ulysses_degree",
            "layout": "usp_layout",
            "order": "usp_order",
            "kernel": "usp_kernel",
        }
        values = {field: getattr(args, name, None) for field, name in names.items()}
        return cls(**{field: value for field, value in values.items() if value is not None})


@contextmanager
def without_multicast() -> Iterator[None]:
    """Symmetric memory that is allocated inside is not bound to NVLink multicast, which is unused:
    some machines refuse it, and a program that dies with it can leave their GPUs unusable."""
    before = os.environ.get(_MULTICAST)
    os.environ[_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST]
        else:
            os.environ[_MULTICAST] = before


@dataclass(frozen=True)
class TorchrunEnv:
    """This process's ranks among those that torchrun started; alone, if none did."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def torchrun_env() -> TorchrunEnv:
    """This process's ranks from torchrun's environment variables.

    Raises:
        ConfigError: some of the variables are missing, as under another launcher.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = [os.environ.get(name) for name in names]
    if values[:2] == [None, None]:
        return TorchrunEnv()
    if None in values:
        missing = ", ".join(
            name for name, value in zip(names, values, strict=True) if value is None
        )
        raise ConfigError(f"this rank has no {missing} in its environment: start it with torchrun")
    return TorchrunEnv(*(int(value) for value in values if value is not None))


def num_ranks_on_node(world: int | None = None) -> int:
    """Return how many of a program's ``world`` ranks are on this node, by the variables of
    torchrun, DeepSpeed or MPI; without them ``world``, or 1 where that is None."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    on_node = int(next((os.environ[name] for name in names if name in os.environ), world or 1))
    return min(world or on_node, on_node)


def is_first_on_node() -> bool:
    """Whether this process speaks for the ranks of its node, whose errors are the same."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    """The environment variables whose names begin so, by name."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def free_memory() -> float:
    """Bytes of host memory that this process and its ranks can still take: of the machine, and of
    the container's limit; or USP_HOST_MEMORY_GIB. Infinite where nothing is known."""
    if limit_gib := os.environ.get("USP_HOST_MEMORY_GIB"):
        return float(limit_gib) * 2**30
    free = [math.inf]
    with suppress(OSError):
        text = Path("/proc/meminfo").read_text()
        free += [1024.0 * int(kib) for kib in re.findall(r"^MemAvailable:\s+(\d+)", text, re.M)]
    # Of cgroup 2 and 1; what is cached from files is given back when it is needed.
    for limit, used, cached, folder in (
        ("memory.max", "memory.current", "inactive_file", "/sys/fs/cgroup"),
        (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
            "/sys/fs/cgroup/memory",
        ),
    ):
        with suppress(OSError, ValueError):  # "max": there is no limit
            over_limit = int(Path(folder, used).read_text()) - int(Path(folder, limit).read_text())
            text = Path(folder, "memory.stat").read_text()
            files = sum(map(int, re.findall(rf"^{cached} (\d+)", text, re.M)))
            free.append(float(files - over_limit))
    return min(free)


def p2p_disabled_reason() -> str | None:
    """Why GPUs may not read each other's memory: the user's NCCL_P2P_DISABLE; None if unset."""
    disabled = os.environ.get("NCCL_P2P_DISABLE", "0") == "1"
    return "NCCL_P2P_DISABLE=1 disables peer access between GPUs" if disabled else None


def single_hw_queue() -> bool:
    """Whether all streams of a GPU share one hardware queue: a wait in it stalls the others."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def allocator_variables(
    environment: Mapping[str, str],
    *,
    expandable_segments: bool = False,
    torch_header: str | None = None,
) -> dict[str, str]:
    """The environment variable that lets torch pin host memory by registration, in less than half
    the time: ``os.environ.update(allocator_variables(os.environ))``.

    To be called before the first use of a GPU or of pinned memory, when torch reads it. What the
    user's variable names stays as it is; options that this torch does not know, with which it
    would not start, are left out.

    Args:
        environment: the environment variables; not changed.
        expandable_segments: GPU memory in segments that grow, which fragment less.
        torch_header: text of torch's header of the options; None: of the torch that is installed.

    Returns:
        The variable and its value; empty where there is nothing to add.
    """
    header = _installed_header() if torch_header is None else torch_header
    header_names = set(re.findall(r"\w+", header))
    set_variables = [name for name in _VARIABLES if name in header_names and name in environment]
    variable = set_variables[0] if set_variables else _VARIABLES[0]
    text = environment.get(variable, "").strip(" ,")
    # Names stand before a colon; the intervals of roundup_power2_divisions are numbers.
    named = set(re.findall(r"([A-Za-z]\w*)\s*:", text))
    grows = expandable_segments and "backend" not in named  # other allocators have no segments
    options = (*_PINNED, *_SEGMENTS) if grows else _PINNED
    added = [f"{name}:{value}" for name, value in options if name in header_names - named]
    return {variable: ",".join(filter(None, [text, *added]))} if added else {}


def _installed_header() -> str:
    """The header of the installed torch that declares the options; empty without."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        header = Path(folder, "include", "c10", "cuda", "CUDAAllocatorConfig.h")
        if header.is_file():
            return header.read_text(encoding="utf-8")
    return ""
