"""``ds-usp report-communication`` on a small trace, with the fields of real ones of two GPUs."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ds_usp.__main__ import main
from ds_usp.cli.report_communication import report
from ds_usp.errors import ConfigError

MAIN, AUTOGRAD, COMPUTE, NCCL, COPIES = 659, 703, 7, 21, 18  # CPU threads; streams


def event(cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    gpu = cat.startswith("gpu") or cat == "kernel"
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0 if gpu else 659,
        "tid": tid,
        "ts": 5e12 + 1e3 * ts,  # given in milliseconds
        "dur": 1e3 * dur,
        "args": args,
    }


def exchange(kind: str, sent: int, tid: int, ts: float, cat: str = "user_annotation") -> Any:
    return event(cat, f"ds_usp.comm/{kind}/{sent}", tid, ts, 1)


# Two steps of 10 ms.
EVENTS = [
    *(event("user_annotation", f"ProfilerStep#{n}", MAIN, 10 * n - 40, 9) for n in (4, 5)),
    event("gpu_user_annotation", "ProfilerStep#4", COMPUTE, 2, 5),
    # An exchange of ds_usp by NCCL, launched by the backward pass: 2 ms beside a kernel, 1 alone.
    exchange("ring_kv", 2**20, AUTOGRAD, 0),
    event("cuda_driver", "cuLaunchKernelEx", AUTOGRAD, 0.5, 0.1, correlation=1),
    event(
        "kernel",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        NCCL,
        2,
        3,
        correlation=1,
    ),
    # Another thread's exchange at that time does not count.
    exchange("halo", 2**19, MAIN, 0),
    event("cuda_runtime", "cudaLaunchKernel", MAIN, 3, 0.1, correlation=2),
    event("kernel", "cudnn_flash_fprop", COMPUTE, 0, 4, correlation=2),
    # By copy engines, which no call launched: known by the range on their stream. Hidden.
    exchange("all_to_all", 3 * 2**20, MAIN, 4),
    exchange("all_to_all", 3 * 2**20, COPIES, 6, "gpu_user_annotation"),
    event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", COPIES, 6, 1, correlation=88),
    event("kernel", "nvjet_sm90_gemm", COMPUTE, 6, 4, correlation=3),
    # Gradients: NCCL without an exchange of ds_usp around it; alone for 2 ms.
    event("cuda_driver", "cuLaunchKernelEx", MAIN, 6, 0.1, correlation=4),
    event(
        "kernel",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        *(COMPUTE, 12, 2),
        **{"correlation": 4, "Collective name": "allreduce"},
    ),
    # Copies: within the GPU, from the host beside the kernel after it, sparse memsets.
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", COMPUTE, 14, 1, correlation=5),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", COPIES, 14.5, 1, correlation=6),
    event("gpu_memset", "Memset (Device)", COMPUTE, 19, 1, correlation=7),
]
WANT = """\
                           calls       MiB      busy    hidden   exposed   of step
  Memcpy HtoD                0.5                0.50      0.25      0.25      2.5%
  all_to_all                 0.5      1.50      0.50      0.50      0.00      0.0%
  halo                       0.5      0.25      0.00      0.00      0.00      0.0%
  nccl allreduce             0.5                1.00      0.00      1.00     10.0%
  ring_kv                    0.5      0.50      1.50      1.00      0.50      5.0%
  all communication                             3.50      1.75      1.75     17.5%
  kernels                                       5.00                         50.0%
  idle                                          3.25                         32.5%
  step                                         10.00                        100.0%"""


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    text = json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "m"}, *events]})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz"])
def test_a_trace_by_hand(name, tmp_path, capsys):
    path = written(tmp_path / name, EVENTS)
    assert main(["report-communication", str(path)]) == 0
    head, table = capsys.readouterr().out.rstrip("\n").split("\n", 1)
    assert head == f"{path}: milliseconds of a step, mean of 2" and table == WANT


def test_without_a_gpu_calls_and_bytes_are_counted(tmp_path):
    lines = list(report(written(tmp_path / "cpu.json", [exchange("ring_kv", 2**20, MAIN, 0)] * 3)))
    assert lines[2].split() == ["ring_kv", "3.0", "3.00", "0.00", "0.00", "0.00"]
    assert lines[3] == "no GPU was traced: only calls and bytes are counted" and len(lines) == 4


WRONG = {
    "cut.json.gz": gzip.compress(b'{"traceEvents": []}')[:-9],
    "cut.json": b'{"traceEvents": [{"ph": "X"',
    "others.json": b'{"events": []}',
    "empty.json": b'{"traceEvents": []}',
    "texts.json": b'{"traceEvents": ["X"]}',
    "list.json": b"[]",
    "binary.json": b"\xff\xfe",
    "plain.json.gz": b"{}",
}


@pytest.mark.parametrize("name", [*WRONG, "missing.json"])
def test_a_file_that_is_no_whole_trace_is_refused(name, tmp_path, capsys):
    if name in WRONG:
        (tmp_path / name).write_bytes(WRONG[name])
    with pytest.raises(ConfigError, match=f"{name} is no whole file of torch.profiler's"):
        list(report(tmp_path / name))
    assert main(["report-communication", str(tmp_path / name)]) == 2
    assert f"{name} is no whole file" in capsys.readouterr().err
