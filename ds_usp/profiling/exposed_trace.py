"""The events of a trace, from a profiler in this process or from a trace file of any program."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_usp.comm.channel import PREFIX
from ds_usp.errors import ConfigError

CPU, RUNTIME, KERNEL, COPY, SET = "cpu", "runtime", "kernel", "copy", "set"
GPU_RANGE = "gpu range"  # of a CPU range: from the first to the last event that it launched
PARAM_COMMS = "record_param_comms"
_CATEGORIES: Mapping[str, str] = {
    "cpu_op": CPU,
    "user_annotation": CPU,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "gpu_memset": SET,
    "gpu_user_annotation": GPU_RANGE,
}
_SYNCHRONIZATIONS = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")
_NO_ARGS: Mapping[str, Any] = {}
_PIECE = 2_000_000  # characters that are read at once
_LONGEST = 20_000_000  # characters: what is no JSON up to here is damaged, no longer event


class TraceEvent(NamedTuple):
    """An event of a trace, times in nanoseconds.

    Args:
        category: one of the constants of this module.
        thread: of the CPU.
        correlation: one number for a call of CUDA's API and what it started on the GPU; 0: none.
        external: of an operator its own number, else that of the innermost operator in which the
            call was made; 0: none.
        stream: of the GPU.
        args: NCCL's metadata (``Collective name`` ...), and ``bytes`` of a copy.
    """

    category: str
    name: str
    start: int
    stop: int
    thread: int = 0
    correlation: int = 0
    external: int = 0
    stream: int = 0
    args: Mapping[str, Any] = _NO_ARGS


class FileRank(NamedTuple):
    """Which rank wrote a trace file, by its ``distributedInfo``."""

    rank: int
    world_size: int


def events_of_profiler(profiler: torch.profiler.profile) -> list[TraceEvent]:
    """The events that a finished profiler holds in memory."""
    recorded = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_gpu = torch.autograd.DeviceType.CUDA
    annotations = {
        e.name()
        for e in recorded
        if e.device_type() != on_gpu and (e.name().startswith(PREFIX) or e.is_user_annotation())
    }
    events = []
    for e in recorded:
        category = _category(e, e.device_type() == on_gpu, annotations)
        if category is None or (category == GPU_RANGE and not e.name().startswith(PREFIX)):
            continue
        is_cpu, correlation = category == CPU, e.correlation_id()
        name, start = e.name(), e.start_ns()
        events.append(
            TraceEvent(
                category,
                name,
                start,
                start + e.duration_ns(),
                e.start_thread_id(),
                0 if is_cpu else correlation,
                correlation if is_cpu else e.linked_correlation_id(),
                0 if is_cpu else e.device_resource_id(),
                _metadata(e) if category == COPY or name == PARAM_COMMS else _NO_ARGS,
            )
        )
    return events


def _category(event: Any, on_gpu: bool, annotations: set[str]) -> str | None:
    """By kineto's type where this torch returns it, else by device and name."""
    if hasattr(event, "activity_type"):
        return _CATEGORIES.get(event.activity_type())
    name = event.name()
    if on_gpu:
        if name in annotations or event.is_user_annotation():
            return GPU_RANGE
        if name in _SYNCHRONIZATIONS:
            return None
        return {"Memcpy": COPY, "Memset": SET}.get(name.split(" ")[0], KERNEL)
    return RUNTIME if name.startswith(("cuda", "cuLaunch", "cuMem", "cuStream")) else CPU


def _metadata(event: Any) -> Mapping[str, Any]:
    """Metadata of a collective or a copy; later versions of torch hold more of it."""
    args: dict[str, Any] = {}
    if hasattr(event, "metadata_json"):
        with contextlib.suppress(ValueError):
            args.update(json.loads("{" + event.metadata_json().strip().strip(",") + "}"))
    if hasattr(event, "extra_meta"):
        for key, text in event.extra_meta().items():
            args.setdefault(key, text.strip('"'))
    return args


def events_of_file(path: Path) -> tuple[list[TraceEvent], FileRank | None]:
    """The events of a file that ``torch.profiler``'s ``export_chrome_trace`` wrote, gzip or not,
    and its rank if the file names it before its events, as torch does.

    The file is read in pieces: its text may be larger than memory.

    Raises:
        ConfigError: no such file, no trace, or one that is cut or damaged.
    """
    if not path.is_file():
        raise ConfigError(f"there is no trace file {path}")
    with path.open("rb") as raw_file:
        opener: Any = gzip.open if raw_file.read(2) == b"\x1f\x8b" else open
    events, known = [], False
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            header, text = _header(file, path)
            for raw in _objects(file, path, text):
                known = True
                category = _CATEGORIES.get(raw.get("cat", ""))
                if raw.get("ph") == "X" and category is not None:
                    events.append(_event_of_json(raw, category))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is cut or damaged: {error}. Export the trace again") from error
    if not known:
        raise ConfigError(f"{path}: its traceEvents are empty, the profiler recorded nothing")
    return events, _rank_of(header)


def _event_of_json(raw: Mapping[str, Any], category: str) -> TraceEvent:
    args = raw.get("args", _NO_ARGS)
    start = round(float(raw["ts"]) * 1000)
    thread = raw["tid"] if isinstance(raw.get("tid"), int) else 0
    return TraceEvent(
        category,
        raw.get("name", ""),
        start,
        start + round(float(raw.get("dur", 0)) * 1000),
        thread,
        int(args.get("correlation", 0)),
        int(args.get("External id", args.get("external id", 0))),
        thread if category not in (CPU, RUNTIME) else 0,
        args,
    )


def _header(file: Any, path: Path) -> tuple[str, str]:
    """What comes before the events (its end, if it is long), and what has been read of them."""
    text = ""
    while (first := text.find('"traceEvents"')) < 0:
        piece = file.read(_PIECE)
        if not piece:
            raise ConfigError(
                f"{path} holds no traceEvents: give a file of torch.profiler's export_chrome_trace"
            )
        text = (text if len(text) < _LONGEST else text[-20:]) + piece
    return text[:first], text[first + len('"traceEvents"') :]


def _objects(file: Any, path: Path, text: str) -> Iterator[Mapping[str, Any]]:
    """The objects of the list ``traceEvents``, one at a time; ``text``: what has been read."""
    decoder, position, count = json.JSONDecoder(), 0, 0
    while True:
        position = _skip(text, position)
        if position < len(text) and text[position] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, position)
        except ValueError as error:
            piece = file.read(_PIECE) if len(text) - position < _LONGEST else ""
            if not piece:
                raise ConfigError(
                    f"{path} is cut or damaged after event {count} of traceEvents. "
                    "Export the trace again"
                ) from error
            text, position = text[position:] + piece, 0
            continue
        position, count = end, count + 1
        if isinstance(value, dict):
            yield value


def _rank_of(header: str) -> FileRank | None:
    _, key, text = header.partition('"distributedInfo"')
    with contextlib.suppress(ValueError, KeyError, TypeError):
        info = json.JSONDecoder().raw_decode(text, _skip(text, 0))[0] if key else {}
        return FileRank(int(info["rank"]), int(info.get("world_size", 0)))
    return None


def _skip(text: str, position: int) -> int:
    """The position of the next character that is no space, comma, colon or list's start."""
    while position < len(text) and text[position] in " \t\r\n,:[":
        position += 1
    return position
