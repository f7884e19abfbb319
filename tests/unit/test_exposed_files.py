"""The report of exposed communication from trace files: what is read, and what is refused."""

import csv
import gzip
import json

import pytest

from ds_usp import ConfigError
from ds_usp.__main__ import main
from ds_usp.profiling import exposed
from ds_usp.profiling.exposed_trace import events_of_file

# As torch writes it: kernels have NCCL's metadata and the number of the CPU's operator.
FILE = {
    "schemaVersion": 1,
    "distributedInfo": {"backend": "nccl", "rank": 0},
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "tid": 1, "ts": 10.0,
         "dur": 90.0, "args": {"External id": 1}},
        {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "tid": 1, "ts": 20.5, "dur": 2.0,
         "args": {"External id": 2, "Collective name": "allreduce", "dtype": "Float",
                  "In msg nelems": 4096, "Group size": 2, "Process Group Name": "3",
                  "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "tid": 1, "ts": 21.0,
         "dur": 1.0, "args": {"External id": 2, "correlation": 77}},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "tid": 20,
         "ts": 30.0, "dur": 5.5,
         "args": {"External id": 2, "correlation": 77, "Collective name": "allreduce",
                  "dtype": "Float", "In msg nelems": 4096, "Group size": 2,
                  "Process Group Name": "3",
                  "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": 33.0, "dur": 7.0, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": 200.0, "dur": 7.0, "args": {}},
    ],
    "traceName": "a.json",
}  # fmt: skip


def test_a_file_of_any_program_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ds_usp.profiling.exposed_trace._PIECE", 100)  # read in many pieces
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(FILE, indent=2).encode()))
    assert len(events_of_file(path)[0]) == 6
    arguments = ["report-communication", str(path), "--step", "ProfilerStep#5"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("  tensor parallel"))
    assert row.split()[2:] == ["1", "0.02", "0.01", "0.00", "0.00", "30.0%", "0.00", "r0"]
    assert (tmp_path / "communication.csv").exists()
    assert main([*arguments, "--group", "3=data"]) == 0
    assert "gradient reduction" in capsys.readouterr().out
    empty = tmp_path / "b.json"
    empty.write_text("{}")
    for argument in (str(empty), str(tmp_path / "missing.json")):
        assert main(["report-communication", argument]) == 2
    assert main([*arguments, "--group", "3"]) == 2
    assert main([*arguments, "--group", "3=dp"]) == 2
    assert capsys.readouterr().err.count("error: ") == 4


def test_a_file_that_is_cut_or_of_another_step_is_refused(tmp_path):
    text = json.dumps(FILE).encode()
    packed = gzip.compress(text)
    contents = {
        "cut.json": (text[: len(text) * 2 // 3], "cut or damaged after event 4"),
        "broken.json": (text.replace(b'"gemm"', b'"ge"mm"'), "cut or damaged after event 5"),
        "cut.json.gz": (packed[:200], "cut or damaged"),
        "plain.json.gz": (text, ""),  # what the file holds counts, not its name
        "packed.json": (packed, ""),
        "empty.json": (b'{"traceEvents": []}', "the profiler recorded nothing"),
        "none.json": (b"{}", "holds no traceEvents"),
    }
    for name, (content, message) in contents.items():
        (tmp_path / name).write_bytes(content)
        if message:
            with pytest.raises(ConfigError, match=message):
                exposed.read_traces([tmp_path / name])
        else:
            assert exposed.read_traces([tmp_path / name]).ranks[0].step_ns == 177_000
    with pytest.raises(ConfigError, match="no step 'ProfilerStep#77'; it has ProfilerStep#5"):
        exposed.read_traces([tmp_path / "packed.json"], step="ProfilerStep#77")
    with pytest.raises(ConfigError, match="is no folder"):
        exposed.read_traces([tmp_path / "packed.json"]).write(tmp_path / "none.json")


def test_ranks_are_those_that_the_files_name(tmp_path):
    for rank in (3, 1):
        info = {"backend": "nccl", "rank": rank, "world_size": 4}
        events = [{**event, "dur": 7.0 + rank} for event in FILE["traceEvents"]]  # type: ignore[attr-defined]
        content = {"distributedInfo": info, "traceEvents": events}
        (tmp_path / f"{rank}.json").write_text(json.dumps(content))
    paths = [tmp_path / "3.json", tmp_path / "1.json"]
    report = exposed.read_traces(paths)
    lines = report.table().splitlines()
    assert lines[0].startswith("communication of whole traces, 2 of 4 ranks;")
    assert next(line for line in lines if "tensor parallel" in line).endswith("r1")
    rows = csv.DictReader(report.write(tmp_path)[0].read_text().splitlines()[1:])
    steps = {row["rank"]: row["busy_ms"] for row in rows if row["kind"] == "step"}
    assert steps == {"1": "0.1780", "3": "0.1800"}
    with pytest.raises(ConfigError, match="was given twice"):
        exposed.read_traces([*paths, paths[0]])
    copy = tmp_path / "copy.json"
    copy.write_bytes(paths[0].read_bytes())
    with pytest.raises(ConfigError, match=r"3.json and .*copy.json are both of rank 3"):
        exposed.read_traces([*paths, copy])
