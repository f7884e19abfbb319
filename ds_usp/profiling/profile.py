"""``python -m ds_usp.planner profile``: measures the machine it runs on, for ``--cluster FILE``."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors
from ds_usp.geometry.ranks import RankGrid
from ds_usp.planner.hardware import CLUSTERS, VERSION
from ds_usp.planner.models import ModelShape
from ds_usp.profiling import compute, layers, links
from ds_usp.profiling.problem_sizes import ProblemSizes
from ds_usp.profiling.step_timer import StepTimer

_ELEMENTWISE_SHARE = 0.8  # of its memory's bandwidth that the planner gives an elementwise kernel


@dataclass
class Profile:
    """The content of one cluster's file, while it is measured.

    Args:
        base: the built-in cluster whose numbers are used where nothing is measured.
        peak_flop_per_s: of the datasheet; None: the fastest kernel's rate is the peak.
        print_line: takes lines for the user.
    """

    timer: StepTimer
    sizes: ProblemSizes
    base: str
    peak_flop_per_s: float | None
    gpus_per_node: int
    print_line: Callable[[str], None]
    numbers: dict[str, Any] = field(default_factory=dict)

    def record(self, name: str, value: Any, how: str) -> None:
        """Record one number of the cluster with its source."""
        self.numbers[name] = {"value": value, "origin": "measured", "source": how}

    def add_row(self, name: str, row: Any, text: str) -> None:
        """Add one row to those of ``name``."""
        rows = self.numbers.setdefault(name, {"value": [], "origin": "measured", "source": ""})
        rows["value"].append(asdict(row))
        self.log(text)

    def log(self, text: str) -> None:
        """Print a line of progress."""
        self.print_line(f"[{self.timer.elapsed_s:5.1f} s] {text}")


def profile(
    *,
    device: torch.device,
    models: Sequence[ModelShape],
    budget_s: float,
    gpus_per_node: int,
    base: str,
    known: bool,
    name: str,
    print_line: Callable[[str], None],
) -> dict[str, Any]:
    """Measure; the content of a cluster's file, the same on every rank. Collective.

    Args:
        models: whose layers are measured, those of one shape once.
        budget_s: seconds in all; beyond it each item is measured once, after a warm-up, none is
            left out.
        gpus_per_node: ranks of a node; they are contiguous.
        base: a built-in cluster for what cannot be measured here, as NICs on one node.
        known: the GPUs are the base's, and so is their peak.

    Raises:
        ConfigError: ranks that do not fill nodes, or too little time.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % gpus_per_node:
        raise ConfigError(f"{world} ranks do not fill nodes of {gpus_per_node}")
    if not 0 < budget_s < inf:
        raise ConfigError(f"--seconds {budget_s:g} must be more than 0, and finite")
    peak = float(CLUSTERS[base]["peak_flop_per_s"][0]) if known else None
    sizes = ProblemSizes.of(device)
    _warm_up(StepTimer(device, budget_s), sizes)
    state = Profile(StepTimer(device, budget_s), sizes, base, peak, gpus_per_node, print_line)
    state.log(f"{world} ranks on {device.type} are warm; {budget_s:g} s to go")
    products = _gemm_rates(state)
    _memory(state)
    _kernel_efficiencies(state, products, _attention_rows(state))
    if world > 1:
        _link_rows(state)
    _layers(state, models)
    return {"version": VERSION, "base": base, "name": name, **_finalize(state, world)}


def _warm_up(timer: StepTimer, sizes: ProblemSizes) -> None:
    """Compile kernels, and bring a GPU to its sustained clock; not part of the budget."""
    for _ in compute.attention_calls(timer, sizes, SequenceMesh.single(), sizes.lengths[:1]):
        pass
    for _ in compute.product_flop_per_s(timer, sizes):
        pass


def _gemm_rates(state: Profile) -> list[tuple[int, float]]:
    """(tokens, FLOP/s) of a linear layer."""
    rates = sorted(compute.product_flop_per_s(state.timer, state.sizes))
    state.log(f"products: up to {max(rate for _, rate in rates) / 1e12:.4g} TFLOP/s")
    return rates


def _kernel_efficiencies(
    state: Profile, products: list[tuple[int, float]], attention: list[tuple[int, float]]
) -> None:
    """Record the efficiency curves of GEMMs and attention, as fractions of the peak."""
    peak = state.peak_flop_per_s
    if peak is None:
        peak = max(rate for _, rate in (*products, *attention))
        state.record("peak_flop_per_s", peak, "what the fastest kernel reaches")
    width = state.sizes.width
    for name, rates, how in (
        ("gemm_efficiency", products, f"linear layer of {width} x {width}, both directions"),
        ("attention_efficiency", attention, "usp_attention on one rank, both directions"),
    ):
        state.record(name, [[size, rate / peak] for size, rate in rates], how)


def _memory(state: Profile) -> None:
    """Record the GPU's memory bandwidth and capacity, and the bandwidth to the CPU's memory."""
    timer, sizes = state.timer, state.sizes
    rate = compute.memory_bytes_per_s(timer, sizes)
    how = (
        f"a sum of two tensors reads and writes {rate:.4g} B/s, taken as {_ELEMENTWISE_SHARE} of it"
    )
    state.record("hbm_bytes_per_s", rate / _ELEMENTWISE_SHARE, how)
    host = compute.host_bytes_per_s(timer, sizes)
    state.record("host_bytes_per_s", host, "pinned copies there and back at once, all GPUs at once")
    if timer.on_gpu:
        total = torch.cuda.get_device_properties(timer.device).total_memory
        state.record("memory_bytes", float(total), "what the driver says")
    state.log(f"memory {rate / 1e9:.4g} GB/s, host {host / 1e9:.4g} GB/s each direction")


def _attention_rows(state: Profile) -> list[tuple[int, float]]:
    """Attention on every ulysses x ring; returns (tokens, FLOP/s) of the kernels, from one rank."""
    one_rank = []
    for mesh in _meshes(state):
        pair = f"ulysses {mesh.ulysses_degree} x ring {mesh.ring_degree}"
        one = mesh.sp_degree == 1
        lengths = state.sizes.lengths if one else state.sizes.lengths[1:]
        for row in compute.attention_calls(state.timer, state.sizes, mesh, lengths):
            flop = 3.5 * 2 * row.seq_len**2 * row.heads * row.head_dim / mesh.sp_degree
            rate = flop / (row.forward_s + row.backward_s)
            if one:
                one_rank.append((row.seq_len, rate))
            text = f"attention {pair}, {row.seq_len} tokens: {rate / 1e12:.4g} TFLOP/s"
            state.add_row("calls", row, text)
        mesh.release()
    return one_rank


def _meshes(state: Profile) -> list[SequenceMesh]:
    """Meshes to measure: one rank, and every ulysses x ring in a node that the heads allow."""
    found = [SequenceMesh.single()]
    if state.timer.world == 1:
        return found
    for ranks in divisors(state.gpus_per_node)[1:]:
        rest = state.timer.world // ranks
        for ulysses in divisors(ranks):
            if state.sizes.heads % ulysses == 0:
                sizes = {"ulysses": ulysses, "ring": ranks // ulysses, "dp": rest}
                found.append(SequenceMesh.build(RankGrid(sizes)))
    return found


def _link_rows(state: Profile) -> None:
    """Measure all collectives, record their rows and the bandwidth inside and between nodes.

    Collective over all ranks. The planner's level takes the fastest all-to-all as its bandwidth,
    and the smallest one's seconds as its latency.
    """
    timer, sizes, node = state.timer, state.sizes, state.gpus_per_node
    best: dict[int, float] = {}
    latency = 0.0
    for ranks in divisors(node)[1:]:
        group = links.intra_node_groups(ranks, timer.world)
        for row in links.exchanges(timer, sizes, group):
            rate = row.sent_bytes / row.seconds
            state.add_row("exchanges", row, f"{_exchange_text(row)}: {rate / 1e9:.4g} GB/s")
            if row.collective == "all_to_all":
                best[ranks] = max(best.get(ranks, 0.0), rate)
                latency = row.seconds if row.sent_bytes == sizes.exchange_bytes[0] else latency
    level = _base_level(state)
    if node > 1:
        level[2], level[4] = best[node], latency
        _contention(state, links.intra_node_groups(node, timer.world))
    if timer.world > node:
        level[3] = node * _network(state)
    state.record("levels", [level], "all-to-all inside a node; between nodes, if there are some")


def _exchange_text(row: Any) -> str:
    return f"{row.collective} of {row.ranks} ranks, {row.sent_bytes} B"


def _base_level(state: Profile) -> list[Any]:
    """The base's node with this number of GPUs; NICs scale with the GPUs."""
    name, gpus, port, uplink, latency = CLUSTERS[state.base]["levels"][0][-1]
    share = state.gpus_per_node / gpus
    nics = max(1, round(CLUSTERS[state.base]["nics"][0] * share))
    state.numbers["nics"] = {"value": nics, "origin": "assumed", "source": f"as {state.base}"}
    return [name, state.gpus_per_node, port, uplink * share, latency]


def _network(state: Profile) -> float:
    """Bytes/s of one GPU to other nodes while all GPUs send."""
    timer = state.timer
    group = links.inter_node_pairs(timer.world, state.gpus_per_node)
    rows = [r for r in links.exchanges(timer, state.sizes, group) if r.collective == "all_to_all"]
    rate = max(row.sent_bytes / row.seconds for row in rows)
    state.record("network_latency_s", rows[0].seconds, "the smallest all-to-all across nodes")
    state.log(f"between nodes {rate / 1e9:.4g} GB/s for each GPU, all at once")
    return rate


def _contention(state: Profile, group: dist.ProcessGroup) -> None:
    """Slowdown of attention by a concurrent exchange, as a fraction of the exchange's time."""
    timer, sizes = state.timer, state.sizes
    q = sizes.random(timer, 1, sizes.lengths[1], sizes.heads, sizes.head_dim)
    mesh = SequenceMesh.single()
    layout = mesh.layout("zigzag", q.shape[1])

    def attend() -> object:
        return compute.usp_attention(
            q, q, q, mesh=mesh, layout=layout, mask=compute.MaskSpec.causal()
        )

    once = timer.seconds(attend, sizes.max_s)
    send = links.COLLECTIVES["all_to_all"](timer, sizes, group, sizes.exchange_bytes[-2])
    sent = timer.seconds(send, sizes.max_s)
    times = max(1, round(1.5 * sent / once))

    def enough() -> None:
        for _ in range(times):
            attend()

    one_rank = timer.seconds(enough, sizes.max_s)
    both = timer.overlapped(enough, send, sizes.max_s)
    share = min(1.0, max(0.0, both - max(one_rank, sent)) / min(one_rank, sent))
    state.record(
        "contention", share, f"attention of {one_rank:.3g} s over an exchange of {sent:.3g} s"
    )
    state.log(f"contention: computation loses {share:.0%} of a hidden exchange's time")


def _layers(state: Profile, models: Sequence[ModelShape]) -> None:
    """Rows of layers, embeddings and heads, one for each shape: models may share layers."""
    timer, sizes = state.timer, state.sizes
    seen: set[tuple[object, ...]] = set()
    for model in models:
        layer = model.hidden, model.ffn, model.q_width, model.kv_width, model.gated
        for tp in divisors(state.gpus_per_node):
            possible = not (model.heads % tp or model.kv_heads % tp or model.ffn % tp)
            if not possible or (*layer, tp) in seen:
                continue
            seen.add((*layer, tp))
            group = links.intra_node_groups(tp, timer.world) if tp > 1 else None
            for row in layers.layers(timer, sizes, model, tp, group):
                both = row.forward_s + row.backward_s
                text = f"layer of {model.name}, tp {tp}, {row.tokens} tokens: {both * 1e3:.4g} ms"
                state.add_row("layers", row, text)
        if (model.hidden, model.vocab) in seen:
            continue
        seen.add((model.hidden, model.vocab))
        for end in layers.embedding_and_head(timer, sizes, model):
            text = f"head of {model.name}, {end.tokens} tokens: {end.seconds * 1e3:.4g} ms"
            state.add_row("ends", end, text)


def _finalize(state: Profile, world: int) -> dict[str, Any]:
    """The content of the file: all recorded numbers, with the machine in every source."""
    gpu = torch.cuda.get_device_name(state.timer.device) if state.timer.on_gpu else "CPU"
    versions = f"torch {torch.__version__}"
    if state.timer.on_gpu:
        versions += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    where = f"{world} x {gpu}, {versions}, {datetime.date.today()}"
    for number in state.numbers.values():
        number["source"] = "; ".join(filter(None, (where, number["source"])))
    state.numbers["gpus_per_node"] = {
        "value": state.gpus_per_node,
        "origin": "measured",
        "source": where,
    }
    if "levels" not in state.numbers:  # one rank
        level = _base_level(state)
        source = f"as {state.base}: one rank has no links to measure"
        state.numbers["levels"] = {"value": [level], "origin": "assumed", "source": source}
    state.log("done")
    return state.numbers
