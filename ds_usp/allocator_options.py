"""Options of torch's allocators for programs that keep tensors in host memory."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

# Measured on an H200 host, 64 MiB blocks: 0.18 s a GiB to pin instead of 0.42 to 0.63.
_PINNED = (("pinned_use_cuda_host_register", "True"), ("pinned_num_register_threads", "8"))
_SEGMENTS = (("expandable_segments", "True"),)
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads the first that is set


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
    known = set(re.findall(r"\w+", header))
    given = [name for name in _VARIABLES if name in known and name in environment]
    variable = given[0] if given else _VARIABLES[0]
    text = environment.get(variable, "").strip(" ,")
    # Names stand before a colon; the intervals of roundup_power2_divisions are numbers.
    named = set(re.findall(r"([A-Za-z]\w*)\s*:", text))
    grows = expandable_segments and "backend" not in named  # other allocators have no segments
    options = (*_PINNED, *_SEGMENTS) if grows else _PINNED
    added = [f"{name}:{value}" for name, value in options if name in known - named]
    return {variable: ",".join(filter(None, [text, *added]))} if added else {}


def _installed_header() -> str:
    """The header of the installed torch that declares the options; empty without."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        header = Path(folder, "include", "c10", "cuda", "CUDAAllocatorConfig.h")
        if header.is_file():
            return header.read_text(encoding="utf-8")
    return ""
