"""The report of exposed communication: intervals, kinds, a classified trace, table and files."""

import csv
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_usp import ConfigError
from ds_usp.profiling import exposed
from ds_usp.profiling import exposed_classify as kinds
from ds_usp.profiling.exposed import (
    KindTimes,
    gaps,
    idle,
    merge_intervals,
    step_times,
    subtract_intervals,
    total_length,
)
from ds_usp.profiling.exposed_classify import (
    STEP,
    Call,
    GpuEvent,
    StepTrace,
    classify,
    kind_of_call,
)
from ds_usp.profiling.exposed_trace import TraceEvent, events_of_profiler
from megatron_patches.flags import SHARED_REFUSALS
from megatron_patches.refusals import refuse

MS = 1_000_000
ALL_TO_ALL, RING, STATES, GRADIENTS, PARAMETERS, TENSOR, PIPELINE, P2P, OTHER = kinds.BETWEEN_RANKS
FROM_HOST, TO_HOST, COMPUTE = *kinds.KINDS[-2:], kinds.COMPUTE


def test_unions_and_differences_of_intervals():
    assert merge_intervals([(5, 6), (0, 2), (1, 3), (3, 4), (0, 1)]) == [(0, 4), (5, 6)]
    assert merge_intervals([(0, 9), (1, 2), (4, 4)]) == [(0, 9)]
    assert merge_intervals([(3, 3)]) == merge_intervals([]) == []
    assert total_length([(0, 4), (2, 6), (10, 11)]) == 7
    assert subtract_intervals([(0, 10)], [(2, 3), (3, 4), (6, 6), (9, 20)]) == [(0, 2), (4, 9)]
    assert subtract_intervals([(0, 4), (6, 8)], [(1, 7)]) == [(0, 1), (7, 8)]  # one hole over two
    assert subtract_intervals([(2, 3)], [(0, 9)]) == subtract_intervals([], [(0, 9)]) == []
    assert subtract_intervals([(0, 3), (2, 5)], []) == [(0, 5)]
    assert gaps([(0, 2), (1, 3), (5, 6)]) == [(3, 5)]
    assert gaps([]) == gaps([(4, 9)]) == []


def test_operations_are_known_by_any_of_their_names():
    operations = {
        "_allgather_base": "allgather",
        "reduce_scatter_tensor_coalesced": "reducescatter",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)": "reducescatter",
        "ncclDevKernel_AllReduce_Sum_f32_TREE_LL": "allreduce",
        "ncclDevKernel_SendRecv": "sendrecv",
        "all_to_allv": "alltoall",
        "recv_anysource": "recv",
        "gemm": "",
    }
    assert {name: kinds.operation_of(name) for name in operations} == operations


def test_groups_are_known_by_their_descriptions():
    descriptions = {
        "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
        "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
        "CONTEXT_PARALLEL_GROUP": "sequence",
        "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0": "sequence",
        "DATA_PARALLEL_GROUP_WITH_CP_AG": "data",
        "EMBEDDING_GROUP": "data",
        "TENSOR_AND_DATA_PARALLEL_GROUP": "",
        "mesh_tp": "tensor",
        "mesh_cp": "sequence",
        "mesh_dp_shard": "data",
        "default_pg": "",
        "undefined": "",
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "",
        "mesh_cp_tp": "",
        "mesh_tensor": "tensor",
        "mesh_replicate": "data",
        "usp_ring": "sequence",
        "monitoring_group": "",
    }
    assert {text: kinds.role_of_description(text) for text in descriptions} == descriptions
    assert kinds.check_role("data") == "data"
    with pytest.raises(ConfigError, match="must be one of tensor, pipeline"):
        kinds.check_role("dp")


def test_a_call_s_kind_is_by_its_group_and_by_what_it_does():
    size = 1 << 20
    expected = {
        ("tensor", "allreduce"): TENSOR,
        ("pipeline", "send"): PIPELINE,
        ("sequence", "coalesced"): RING,
        ("sequence", "allgather"): RING,
        ("sequence", "alltoall"): ALL_TO_ALL,
        ("data", "reducescatter"): GRADIENTS,
        ("data", "allgather"): PARAMETERS,
        ("data", "broadcast"): PARAMETERS,
        ("pipeline", "allreduce"): GRADIENTS,
        ("", "allreduce"): GRADIENTS,
        ("", "recv"): P2P,
        ("", "barrier"): OTHER,
    }
    assert {case: kind_of_call(*case, size) for case in expected} == expected
    assert kind_of_call("data", "allreduce", 4) == OTHER  # a loss, a norm
    # A part of parameters on each of 512 ranks, and an object's.
    sizes = [kinds.gathered_bytes("allgather", 4096, 512, kind) for kind in (True, False)]
    assert [kind_of_call("", "allgather", size) for size in sizes] == [PARAMETERS, OTHER]
    operations = ("allreduce", "reducescatter", "allgather", "alltoall", "send", "recv")
    assert [kinds.sent_bytes(name, 1024, 4) for name in operations] == [
        1536,
        768,
        3072,
        768,
        1024,
        0,
    ]
    assert kinds.sent_bytes("allreduce", 1024, 1) == 0


def kernel(name: str, start: int, stop: int, **more: Any) -> TraceEvent:
    return TraceEvent("kernel", name, start * MS, stop * MS, **more)


def cpu(name: str, start: int, stop: int, **more: Any) -> TraceEvent:
    return TraceEvent("cpu", name, start * MS, stop * MS, **more)


def call(correlation: int, at: int, **more: Any) -> TraceEvent:
    return TraceEvent("runtime", "cudaLaunchKernel", at * MS, at * MS, correlation=correlation)


NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def test_a_range_a_group_or_a_name_says_what_an_event_belongs_to():
    metadata = {
        "Collective name": "_allgather_base",
        "dtype": "BFloat16",
        "In msg nelems": 1 << 20,
        "Group size": 4,
        "Process Group Name": "7",
        "Process Group Description": "undefined",
    }
    events = [
        cpu(STEP, 10, 1000, thread=1),
        kernel(NCCL, 0, 1, correlation=1),  # before the step
        call(1, 0),
        # An exchange of ds_usp, with torch's own range inside: one call.
        cpu("ds_usp.comm/ring_kv/4096", 20, 30, thread=2),
        cpu("ds_usp.comm/point to point/9999", 21, 22, thread=2),
        call(2, 25),
        kernel(NCCL, 40, 50, correlation=2, external=6),
        cpu("UnifiedAttentionBackward", 15, 60, thread=2, external=6),
        # Copy engines: no call of the driver is recorded, the profiler draws a range on the stream.
        cpu("ds_usp.comm/all_to_all/512", 60, 61, thread=2),
        TraceEvent("gpu range", "ds_usp.comm/all_to_all/512", 70 * MS, 80 * MS, stream=13),
        TraceEvent("copy", "Memcpy PtoP (Device -> Device)", 70 * MS, 75 * MS, stream=13),
        # Another torch draws none: the next call, numbered 22, was made inside the exchange.
        cpu("ds_usp.comm/all_to_all/512", 82, 85, thread=2),
        call(22, 84),
        TraceEvent("copy", "Memcpy DtoD (Device -> Device)", 90 * MS, 91 * MS, correlation=21),
        # A coalesced launch does not count again.
        cpu("ds_usp.comm/pipeline/64", 100, 101, thread=2),
        cpu("ds_usp.comm/pipeline/launch", 102, 103, thread=2),
        call(33, 102),
        kernel(NCCL, 104, 105, correlation=33),
        # NCCL's metadata: of the CPU's call, and in files also of the kernel.
        cpu("record_param_comms", 110, 111, thread=2, external=9, args=metadata),
        kernel("ncclDevKernel_AllGather_RING_LL", 112, 113, external=9),
        kernel("ncclDevKernel_AllGather_RING_LL", 114, 115, args=metadata),
        # Nothing is known but the name; copies in a GPU and of the host.
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 120, 121),
        call(35, 130),
        TraceEvent("copy", "Memcpy DtoD (Device -> Device)", 130 * MS, 131 * MS, correlation=35),
        TraceEvent("copy", "Memcpy HtoD (Pinned -> Device)", 132 * MS, 133 * MS, args={"bytes": 8}),
        TraceEvent("copy", "Memcpy DtoH (Device -> Pinned)", 134 * MS, 135 * MS),
        TraceEvent("set", "Memset (Device)", 136 * MS, 137 * MS),
        kernel("flash_fwd_kernel", 140, 150),
        # Layers that carry a state.
        cpu("ds_usp.comm/states/32", 151, 152, thread=4),
        cpu("ds_usp.comm/halo/16", 153, 154, thread=4),
    ]
    trace = classify(events, {"7": "data"})
    assert [event.kind for event in trace.gpu] == [
        *(RING, ALL_TO_ALL, ALL_TO_ALL, PIPELINE, PARAMETERS, PARAMETERS, GRADIENTS),
        *(COMPUTE, FROM_HOST, TO_HOST, COMPUTE, COMPUTE),
    ]
    assert sorted(trace.calls, key=str) == sorted(
        [
            *(Call(RING, 4096), *[Call(ALL_TO_ALL, 512)] * 2, Call(PIPELINE, 64)),
            *(Call(PARAMETERS, 3 << 21), Call(FROM_HOST, 8), Call(TO_HOST, None)),
            *(Call(STATES, 32), Call(STATES, 16)),
        ],
        key=str,
    )


def test_kernels_of_the_steps_beside_hide_communication_and_fill_pauses():
    events = [
        *(cpu("step 1", 0, 100), cpu("step 2", 100, 200), cpu("step 3", 200, 300)),
        *(call(1, 90), kernel("gemm", 95, 170, correlation=1)),
        *(call(2, 110), kernel("ncclDevKernel_AllReduce", 115, 125, correlation=2)),
        *(call(3, 111), kernel("gemm", 172, 180, correlation=3)),
        *(call(4, 190), kernel("ncclDevKernel_AllReduce", 200, 260, correlation=4)),
        *(call(5, 201), kernel("gemm", 204, 284, correlation=5)),
        *(call(6, 202), kernel("ncclDevKernel_AllGather", 182, 183, correlation=6)),
    ]
    times = step_times(classify(events, step="step 2"))
    assert times.kinds == {GRADIENTS: KindTimes(0, 0, 70 * MS, 4 * MS)}
    totals = (times.step_ns, times.compute_ns, times.communication_ns, times.exposed_ns)
    assert totals == (145 * MS, (55 + 8 + 56) * MS, 71 * MS, 5 * MS)
    assert times.host_ns + times.ranks_ns + times.other_ns == (2 + 2 + 17) * MS


def test_a_launch_s_own_thread_is_asked_first_and_names_need_no_nccl():
    launch = TraceEvent("runtime", "cudaLaunchKernel", 14, 15, thread=2, correlation=1)
    events = [
        TraceEvent("cpu", "ds_usp.comm/gradient reduction/9", 10, 60, thread=1),
        TraceEvent("cpu", "ds_usp.comm/all_to_all/7", 12, 18, thread=2),
        *(launch, TraceEvent("kernel", NCCL, 20, 30, correlation=1)),
    ]
    assert [event.kind for event in classify(events).gpu] == [ALL_TO_ALL]
    names = {
        "userbuffers_fp16_sum_inplace_gpu_rr_rs": TENSOR,
        "void vllm::cross_device_reduce_1stage<float>": TENSOR,
        "void deep_ep::internode::dispatch": ALL_TO_ALL,
        "nvshmemi_put": OTHER,
        "c10d::symmetric_memory::wait_signal_kernel(unsigned int*)": OTHER,
        "multimem_all_reduce_kernel": GRADIENTS,
        "nvjet_tst_128x256": COMPUTE,
    }
    for name, kind in names.items():
        assert [event.kind for event in classify([kernel(name, 0, 1)]).gpu] == [kind], name


class Recorded:
    """An event as kineto returns it, of the torch that tells its type or of an older one."""

    def __init__(self, kind: str, name: str, start: int, stop: int, **more: Any) -> None:
        on_gpu = kind in ("kernel", "gpu_memcpy", "gpu_user_annotation", "cuda_sync")
        device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
        values = {
            "name": name,
            "device_type": device,
            "start_ns": start,
            "duration_ns": stop - start,
            "correlation_id": 0,
            "linked_correlation_id": 0,
            "start_thread_id": 1,
            "device_resource_id": 0,
            "is_user_annotation": "annotation" in kind,
            **more,
        }
        for attribute, value in values.items():
            setattr(self, attribute, lambda value=value: value)


@pytest.mark.parametrize("types", [True, False])
def test_the_profiler_s_own_events_are_classified_alike(types):
    name = "ds_usp.comm/all_to_all/64"
    metadata = '"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 8192, '
    more = {"Group size": "2", "Process Group Description": '"TENSOR_MODEL_PARALLEL_GROUP"'}
    rows = [
        ("user_annotation", STEP, 1, 90, {}),
        ("user_annotation", name, 2, 3, {}),
        ("gpu_user_annotation", name, 5, 9, {"device_resource_id": 20}),
        ("gpu_memcpy", "Memcpy PtoP", 5, 9, {"device_resource_id": 20}),
        ("cpu_op", "record_param_comms", 10, 12, {
            "correlation_id": 3, "metadata_json": f"{metadata}", "extra_meta": more}),
        ("cuda_runtime", "cudaLaunchKernelExC", 11, 12, {"correlation_id": 77}),
        ("kernel", "ncclDevKernel_AllReduce", 13, 20, {
            "correlation_id": 77, "linked_correlation_id": 3}),
        ("cuda_sync", "Context Sync", 20, 30, {}),
        ("kernel", "gemm", 15, 40, {}),
    ]  # fmt: skip
    recorded = []
    for kind, label, start, stop, values in rows:
        recorded.append(Recorded(kind, label, start, stop, **values))
        if types:
            recorded[-1].activity_type = lambda kind=kind: kind
    results = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: recorded))
    trace = classify(events_of_profiler(SimpleNamespace(profiler=results)))  # type: ignore[arg-type]
    assert [event[:4] for event in trace.gpu] == [
        ("Memcpy PtoP", ALL_TO_ALL, 5, 9),
        ("ncclDevKernel_AllReduce", TENSOR, 13, 20),
        ("gemm", COMPUTE, 15, 40),
    ]
    assert trace.calls == (Call(ALL_TO_ALL, 64), Call(TENSOR, 32768))


def gpu(kind: str, start: int, stop: int, launched: int | None = 0, name: str = "x") -> GpuEvent:
    return GpuEvent(name, kind, start * MS, stop * MS, None if launched is None else launched * MS)


STREAMS = StepTrace(
    (
        gpu(COMPUTE, 0, 4),
        gpu(COMPUTE, 2, 6),  # another stream
        gpu(RING, 3, 5),  # hidden
        gpu(GRADIENTS, 5, 9),  # 1 hidden, 3 exposed
        gpu(RING, 8, 10),  # both kinds for 1 ms
        gpu(COMPUTE, 12, 13, launched=12),  # the CPU was late
        gpu(ALL_TO_ALL, 15, 16, launched=0, name="Memcpy PtoP"),  # another rank was
        gpu(COMPUTE, 17, 18, launched=None),
        gpu(COMPUTE, 18, 18),
    ),
    (Call(RING, 10), Call(RING, 20), Call(GRADIENTS, 5), Call(OTHER, None)),
)


def test_exposed_is_what_runs_under_no_kernel():
    times = step_times(STREAMS)
    assert times.kinds == {
        ALL_TO_ALL: KindTimes(0, 0, MS, MS),
        RING: KindTimes(2, 30, 4 * MS, 2 * MS),
        GRADIENTS: KindTimes(1, 5, 4 * MS, 3 * MS),
        OTHER: KindTimes(1, None),
    }
    assert times.kinds[RING].hidden_ns == 2 * MS
    assert (times.step_ns, times.compute_ns) == (18 * MS, 8 * MS)
    assert (times.communication_ns, times.exposed_ns) == (8 * MS, 5 * MS)
    assert (times.host_ns, times.ranks_ns, times.other_ns) == (2 * MS, 2 * MS, MS)
    parts = times.compute_ns + times.exposed_ns + times.host_ns + times.ranks_ns + times.other_ns
    assert parts == times.step_ns
    # A launch that is a few microseconds old is the CPU's too.
    late = (GpuEvent("a", COMPUTE, 0, 100, 0), GpuEvent("b", COMPUTE, 5100, 5200, 2000))
    assert {name: total_length(found) for name, found in idle(StepTrace(late, ())).items()} == {
        "host": 5000,
        "ranks": 0,
        "other": 0,
    }


def test_the_table_and_the_files_have_every_rank(tmp_path):
    report = exposed.CommunicationReport((step_times(STREAMS),) * 2, STREAMS, "step 3")
    table, timeline = report.write(tmp_path / "new")
    lines = report.table().splitlines()
    assert lines[0].startswith("communication of step 3, 2 ranks; milliseconds")
    ring = next(line for line in lines if line.startswith("  ring"))
    assert ring.split() == ["ring", "2", "0.00", "4.00", "2.00", "2.00", "11.1%", "2.00", "r0"]
    assert lines[-4].startswith("gradient reduction: 16.7% of the step is exposed. Try overlap")
    assert lines[-1].startswith("the GPU waits for the CPU 11.1% of the step")
    rows = list(csv.DictReader(table.read_text().splitlines()[1:]))
    assert [row["rank"] for row in rows if row["kind"] == "step"] == ["0", "1"]
    gradients = next(row for row in rows if row["kind"] == GRADIENTS)
    assert (gradients["exposed_ms"], gradients["of_step"]) == ("3.0000", "0.16667")
    other = next(row for row in rows if row["kind"] == OTHER)
    assert (other["calls"], other["sent_bytes"]) == ("1", "")

    events = json.loads(timeline.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [(lanes[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert events[0]["args"]["name"] == "rank 0: step 3"
    assert slices == [
        *((COMPUTE, COMPUTE, ts, dur) for ts, dur in ((0, 6e3), (12e3, 1e3), (17e3, 1e3))),
        (ALL_TO_ALL, "exposed", 15e3, 1e3),
        *((RING, "exposed", 8e3, 2e3), (RING, "hidden", 3e3, 2e3)),
        *((GRADIENTS, "exposed", 6e3, 3e3), (GRADIENTS, "hidden", 5e3, 1e3)),
        ("idle: for the CPU", "idle: for the CPU", 10e3, 2e3),
        ("idle: for other ranks", "idle: for other ranks", 13e3, 2e3),
        ("idle: other", "idle: other", 16e3, 1e3),
    ]
    for trace, message in (
        (StepTrace((), STREAMS.calls), "times need a GPU"),
        (StepTrace(), "no communication was recorded"),
    ):
        report = exposed.CommunicationReport((step_times(trace),), trace)
        assert message in report.table()
        assert [path.name for path in report.write(tmp_path)] == ["communication.csv"]


def test_a_step_is_refused_that_is_none_or_profiled_twice():
    for values, message in (
        ({"usp_report_communication": 9}, "is no step of 1 to --train-iters 8"),
        ({"usp_report_communication": 0}, "is no step of 1"),
        ({"usp_report_communication": 8, "profile": True}, "leave one of them out"),
    ):
        with pytest.raises(ConfigError, match=message):
            refuse(SHARED_REFUSALS, SimpleNamespace(usp_cluster=None, train_iters=8, **values))
    for step, profile in ((8, False), (None, True)):
        served = {"usp_report_communication": step, "profile": profile}
        refuse(SHARED_REFUSALS, SimpleNamespace(usp_cluster=None, train_iters=8, **served))
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(ConfigError, match="a profiler records already"),
        exposed.report(),
    ):
        pass
    with exposed.report(print_line=[].append) as report:  # one process, without groups
        torch.ones(2)
    assert len(report.ranks) == 1
