"""``python -m ds_usp.planner profile``: measures the machine it runs on, for ``--cluster FILE``.

Rates of one GPU (GEMMs, attention, memory), of the links inside a node and between nodes, and of
whole transformer layers, embeddings and heads. All ranks measure the same items in the same order.
"""

from __future__ import annotations

import datetime
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ds_usp.attention.functional import usp_attention
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.config import torchrun_env
from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors
from ds_usp.geometry.masks import MaskSpec
from ds_usp.geometry.ranks import RankGrid
from ds_usp.planner.choose_degree import cluster_name
from ds_usp.planner.hardware import (
    CLUSTERS,
    VERSION,
    Cluster,
    MeasuredAttention,
    MeasuredEmbeddingHead,
    MeasuredExchange,
    MeasuredLayer,
    load_cluster,
)
from ds_usp.planner.models import ModelShape, fc1_width, load_model, qkv_width
from ds_usp.profiling.step_timer import Step, StepTimer

Group = dist.ProcessGroup
# torch 2.13 warns of the names that older versions have.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_UNKNOWN_GPU = "a100"  # its assumptions are used for a GPU that is not in clusters.json
_ELEMENTWISE_SHARE = 0.8  # of its memory's bandwidth that the planner gives an elementwise kernel


def run(
    out: Path,
    models: Sequence[ModelShape] | None,
    *,
    device: str,
    seconds: float,
    print_line: Callable[[str], None],
) -> Cluster | None:
    """Join torchrun's ranks, measure the machine, and write the cluster file on rank 0. Collective.

    Args:
        out: the file to write, a ``*.json`` in a folder that exists.
        models: whose layers are measured; None: those of ``_ProblemSizes`` for the device.
        device: auto | cuda | cpu.
        seconds: time budget of all measurements together; see :func:`profile`.
        print_line: function that prints one line of progress; called on rank 0 only.

    Returns:
        The cluster as the planner reads it on rank 0, None on the other ranks.

    Raises:
        ConfigError: no GPU where one is requested, a folder that does not exist, or ranks that do
            not fill nodes.
    """
    env = torchrun_env()
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here. Use --device cpu")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    torch_device = torch.device(kind, env.local_rank) if kind == "cuda" else torch.device(kind)
    if models is None:
        models = [load_model(name) for name in _ProblemSizes.of(torch_device).models]
    if kind == "cuda":
        torch.cuda.set_device(torch_device)
    if env.world > 1:
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=120))
    name = torch.cuda.get_device_name(torch_device) if kind == "cuda" else ""
    base = cluster_name(name)  # None: a GPU whose peak FLOP/s the planner does not know
    try:
        with warnings.catch_warnings():  # torch is about to rename collectives
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
            content = profile(
                device=torch_device,
                models=models,
                budget_s=seconds,
                gpus_per_node=env.local_world,
                base=base or _UNKNOWN_GPU,
                known=base is not None and kind == "cuda",
                name=out.stem,
                print_line=print_line if env.rank == 0 else lambda line: None,
            )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if env.rank:
        return None
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return load_cluster(str(out))


@dataclass(frozen=True)
class _ProblemSizes:
    """Sizes of everything that is measured.

    Args:
        dtype: of all tensors.
        width: features of a linear layer, in and out.
        product_tokens: rows that it multiplies.
        heads, head_dim: of attention, as many for keys.
        lengths: sequence lengths of attention on one rank, and on a mesh; no powers of 2, so that
            real runs are not among them.
        layer_tokens: tokens of a rank in a transformer layer.
        memory_elements: of a tensor that fills no cache.
        exchange_bytes: that a rank sends.
        max_s: for the repeats of one measurement.
        sustained_s: for repeats of attention and layers: a GPU under continuous load runs slower
            after a tenth of a second than at first.
        models: whose layers are measured unless others are named. None on a CPU, where one layer of
            a model that anybody trains takes seconds.
    """

    dtype: torch.dtype
    width: int
    product_tokens: tuple[int, ...]
    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    layer_tokens: tuple[int, ...]
    memory_elements: int
    exchange_bytes: tuple[int, ...]
    max_s: float
    sustained_s: float
    models: tuple[str, ...]

    @classmethod
    def of(cls, device: torch.device) -> _ProblemSizes:
        return _ON_GPU if device.type == "cuda" else _ON_CPU

    def random(self, timer: StepTimer, *shape: int) -> Tensor:
        """A normal tensor: products of zeros draw less power and run faster."""
        return torch.randn(shape, dtype=self.dtype, device=timer.device)


_ON_GPU = _ProblemSizes(
    dtype=torch.bfloat16,
    width=4096,
    product_tokens=(256, 1024, 4096, 16384, 32768),
    heads=16,
    head_dim=128,
    lengths=(6144, 12288, 40960, 122880),
    layer_tokens=(3072, 12288, 40960),
    memory_elements=2**28,
    exchange_bytes=(2**16, 2**20, 2**23, 2**26, 2**28),
    max_s=0.25,
    sustained_s=0.6,
    models=("gpt-1.3b", "llama3-8b"),
)
_ON_CPU = _ProblemSizes(
    dtype=torch.float32,
    width=256,
    product_tokens=(64, 256, 1024),
    heads=4,
    head_dim=32,
    lengths=(96, 192, 384),
    layer_tokens=(48, 192),
    memory_elements=2**22,
    exchange_bytes=(2**10, 2**14, 2**18, 2**20),
    max_s=0.02,
    sustained_s=0.02,
    models=(),
)


@dataclass
class Profile:
    """The content of one cluster's file, while it is measured.

    Args:
        base: the built-in cluster whose numbers are used where nothing is measured.
        print_line: takes lines for the user.
    """

    timer: StepTimer
    sizes: _ProblemSizes
    base: str
    gpus_per_node: int
    print_line: Callable[[str], None]
    numbers: dict[str, Any] = field(default_factory=dict)

    def record(self, name: str, value: Any, how: str) -> None:
        self.numbers[name] = {"value": value, "origin": "measured", "source": how}

    def add_row(self, name: str, row: Any, text: str) -> None:
        rows = self.numbers.setdefault(name, {"value": [], "origin": "measured", "source": ""})
        rows["value"].append(asdict(row))
        self.log(text)

    def log(self, text: str) -> None:
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
    sizes = _ProblemSizes.of(device)
    _warm_up(StepTimer(device, budget_s), sizes)
    state = Profile(StepTimer(device, budget_s), sizes, base, gpus_per_node, print_line)
    state.log(f"{world} ranks on {device.type} are warm; {budget_s:g} s to go")
    products = sorted(_product_flop_per_s(state.timer, sizes))
    state.log(f"products: up to {max(rate for _, rate in products) / 1e12:.4g} TFLOP/s")
    _memory(state)
    attention = _attention_rows(state)
    if peak is None:
        peak = max(rate for _, rate in (*products, *attention))
        state.record("peak_flop_per_s", peak, "what the fastest kernel reaches")
    for curve, rates, how in (
        ("gemm_efficiency", products, f"linear layer of {sizes.width} x {sizes.width}"),
        ("attention_efficiency", attention, "usp_attention on one rank"),
    ):
        shares = [[size, rate / peak] for size, rate in rates]
        state.record(curve, shares, f"{how}, both directions")
    if world > 1:
        _link_rows(state)
    _layers(state, models)
    return {"version": VERSION, "base": base, "name": name, **_finalize(state, world)}


def _warm_up(timer: StepTimer, sizes: _ProblemSizes) -> None:
    """Compile kernels, and bring a GPU to its sustained clock; not part of the budget."""
    _attention_call(timer, sizes, SequenceMesh.single(), sizes.lengths[0])
    for _ in _product_flop_per_s(timer, sizes):
        pass


# ------------------------------------------------------------------ one GPU


def _memory(state: Profile) -> None:
    timer, sizes = state.timer, state.sizes
    a, b = (sizes.random(timer, sizes.memory_elements) for _ in range(2))
    out = torch.empty_like(a)
    moved = 3 * a.numel() * a.element_size()
    rate = moved / timer.seconds(lambda: torch.add(a, b, out=out), sizes.max_s)
    how = (
        f"a sum of two tensors reads and writes {rate:.4g} B/s, taken as {_ELEMENTWISE_SHARE} of it"
    )
    state.record("hbm_bytes_per_s", rate / _ELEMENTWISE_SHARE, how)
    host = _host_bytes_per_s(timer, sizes)
    state.record("host_bytes_per_s", host, "pinned copies there and back at once, all GPUs at once")
    if timer.on_gpu:
        total = torch.cuda.get_device_properties(timer.device).total_memory
        state.record("memory_bytes", float(total), "what the driver says")
    state.log(f"memory {rate / 1e9:.4g} GB/s, host {host / 1e9:.4g} GB/s each direction")


def _product_flop_per_s(timer: StepTimer, sizes: _ProblemSizes) -> Iterator[tuple[int, float]]:
    """(tokens, FLOP/s) of a linear layer's three GEMMs: forward, and both of backward."""
    width = sizes.width
    weight = sizes.random(timer, width, width)
    for tokens in sizes.product_tokens:
        x, dy = sizes.random(timer, tokens, width), sizes.random(timer, tokens, width)

        def step(x: Tensor = x, dy: Tensor = dy) -> None:
            x @ weight
            dy @ weight.t()
            x.t() @ dy

        yield tokens, 6 * tokens * width**2 / timer.seconds(step, sizes.max_s)


def _host_bytes_per_s(timer: StepTimer, sizes: _ProblemSizes) -> float:
    """Pinned copies to host memory and back in parallel, on all GPUs at once: rate a direction."""
    x = sizes.random(timer, sizes.memory_elements // 4)
    y = torch.empty_like(x)
    pinned, pinned_source = (
        torch.empty(x.shape, dtype=x.dtype, pin_memory=timer.on_gpu) for _ in range(2)
    )
    seconds = timer.overlapped(
        lambda: pinned.copy_(x, non_blocking=True),
        lambda: y.copy_(pinned_source, non_blocking=True),
        sizes.max_s,
    )
    return x.numel() * x.element_size() / seconds


def _attention_rows(state: Profile) -> list[tuple[int, float]]:
    one_rank = []
    for mesh in _meshes(state):
        pair = f"ulysses {mesh.ulysses_degree} x ring {mesh.ring_degree}"
        one = mesh.sp_degree == 1
        lengths = state.sizes.lengths if one else state.sizes.lengths[1:]
        for length in lengths:
            row = _attention_call(state.timer, state.sizes, mesh, length)
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
    meshes = [SequenceMesh.single()]
    if state.timer.world == 1:
        return meshes
    for ranks in divisors(state.gpus_per_node)[1:]:
        rest = state.timer.world // ranks
        for ulysses in divisors(ranks):
            if state.sizes.heads % ulysses == 0:
                sizes = {"ulysses": ulysses, "ring": ranks // ulysses, "dp": rest}
                meshes.append(SequenceMesh.build(RankGrid(sizes)))
    return meshes


def _attention_call(
    timer: StepTimer, sizes: _ProblemSizes, mesh: SequenceMesh, length: int
) -> MeasuredAttention:
    """One call of so many tokens of the whole sequence, forward and backward."""
    layout = mesh.layout("zigzag", length)
    shape = (1, layout.length(mesh.rank), sizes.heads, sizes.head_dim)
    q, k, v = (sizes.random(timer, *shape).requires_grad_() for _ in range(3))
    dout = sizes.random(timer, *shape)

    def attend() -> Tensor:
        return usp_attention(q, k, v, mesh=mesh, layout=layout, mask=MaskSpec.causal())

    def both() -> None:
        torch.autograd.grad(attend(), (q, k, v), dout)

    forward, backward = timer.forward_backward(attend, both, sizes.sustained_s)
    heads = sizes.heads, sizes.heads, sizes.head_dim
    seconds = forward.device_s, backward.device_s, forward.host_s, backward.host_s
    return MeasuredAttention(mesh.ulysses_degree, mesh.ring_degree, length, *heads, *seconds)


# ------------------------------------------------------------------ links


def _link_rows(state: Profile) -> None:
    """Measure all collectives. The planner's level of a node takes the fastest all-to-all as its
    bandwidth, and the smallest one's seconds as its latency."""
    timer, sizes, node = state.timer, state.sizes, state.gpus_per_node
    best: dict[int, float] = {}
    latency = 0.0
    for ranks in divisors(node)[1:]:
        group = _intra_node_groups(ranks, timer.world)
        for row in _exchanges(timer, sizes, group):
            rate = row.sent_bytes / row.seconds
            text = f"{row.collective} of {ranks} ranks, {row.sent_bytes} B: {rate / 1e9:.4g} GB/s"
            state.add_row("exchanges", row, text)
            if row.collective == "all_to_all":
                best[ranks] = max(best.get(ranks, 0.0), rate)
                latency = row.seconds if row.sent_bytes == sizes.exchange_bytes[0] else latency
    level = _base_level(state)
    if node > 1:
        level[2], level[4] = best[node], latency
        _contention(state, _intra_node_groups(node, timer.world))
    if timer.world > node:
        level[3] = node * _network(state)
    state.record("levels", [level], "all-to-all inside a node; between nodes, if there are some")


def _base_level(state: Profile) -> list[Any]:
    """The base's node with this number of GPUs; NICs scale with the GPUs."""
    name, gpus, port, uplink, latency = CLUSTERS[state.base]["levels"][0][-1]
    share = state.gpus_per_node / gpus
    nics = max(1, round(CLUSTERS[state.base]["nics"][0] * share))
    state.numbers["nics"] = {"value": nics, "origin": "assumed", "source": f"as {state.base}"}
    return [name, state.gpus_per_node, port, uplink * share, latency]


def _network(state: Profile) -> float:
    timer = state.timer
    # The ranks with this one's local rank on all nodes.
    nodes = RankGrid({"ulysses": state.gpus_per_node, "dp": timer.world // state.gpus_per_node})
    group = _groups_along(nodes, "dp")
    rows = [r for r in _exchanges(timer, state.sizes, group) if r.collective == "all_to_all"]
    rate = max(row.sent_bytes / row.seconds for row in rows)
    state.record("network_latency_s", rows[0].seconds, "the smallest all-to-all across nodes")
    state.log(f"between nodes {rate / 1e9:.4g} GB/s for each GPU, all at once")
    return rate


def _contention(state: Profile, group: Group) -> None:
    """Slowdown of attention by a concurrent exchange, as a fraction of the exchange's time: calls
    that take about 1.5 times as long as the exchange, so that they cover all of it."""
    timer, sizes = state.timer, state.sizes
    q = sizes.random(timer, 1, sizes.lengths[1], sizes.heads, sizes.head_dim)
    mesh = SequenceMesh.single()
    layout = mesh.layout("zigzag", q.shape[1])

    def attend() -> object:
        return usp_attention(q, q, q, mesh=mesh, layout=layout, mask=MaskSpec.causal())

    once = timer.seconds(attend, sizes.max_s)
    send = _exchange_step("all_to_all", timer, sizes, group, sizes.exchange_bytes[-2])
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


def _exchange_step(
    collective: str, timer: StepTimer, sizes: _ProblemSizes, group: Group, sent: int
) -> Step:
    """A step in which each rank sends about ``sent`` bytes: of an all-to-all to all others
    together, else to the next rank of a ring."""
    members, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    ranks = len(members)
    num_bytes = sent * ranks // (ranks - 1)
    num_bytes = {"p2p": sent, "all_reduce": num_bytes // 2}.get(collective, num_bytes)
    parts = 1 if collective == "p2p" else ranks
    elements = max(1, num_bytes // sizes.dtype.itemsize // parts) * parts
    x = torch.zeros(elements, dtype=sizes.dtype, device=timer.device)
    if collective == "all_reduce":
        return lambda: dist.all_reduce(x, group=group)
    if collective in ("all_gather", "reduce_scatter"):
        shard = x.new_zeros(elements // ranks)
        if collective == "all_gather":
            return lambda: _ALL_GATHER(x, shard, group=group)
        return lambda: _REDUCE_SCATTER(shard, x, group=group)
    y = torch.empty_like(x)
    if collective == "all_to_all":
        return lambda: dist.all_to_all_single(y, x, group=group)

    def shift() -> None:
        pair = [
            dist.P2POp(dist.isend, x, members[(rank + 1) % ranks], group),
            dist.P2POp(dist.irecv, y, members[rank - 1], group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return shift


def _intra_node_groups(size: int, world: int) -> Group:
    return _groups_along(RankGrid({"ulysses": size, "dp": world // size}), "ulysses")


def _groups_along(grid: RankGrid, axis: str) -> Group:
    """This rank's group on a grid's axis; collective, as every rank must make every group."""
    own_group = None
    for ranks in grid.groups(axis):
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own_group = group
    return own_group  # type: ignore[return-value]


def _exchanges(timer: StepTimer, sizes: _ProblemSizes, group: Group) -> Iterator[MeasuredExchange]:
    """Every collective and size over a group, while all other groups do the same."""
    ranks = dist.get_world_size(group)
    for name in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p"):
        for sent in sizes.exchange_bytes:
            step = _exchange_step(name, timer, sizes, group, sent)
            yield MeasuredExchange(name, ranks, sent, timer.seconds(step, sizes.max_s / 4))


# ------------------------------------------------------------------ layers


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
            group = _intra_node_groups(tp, timer.world) if tp > 1 else None
            reference = _ReferenceLayer(timer, sizes, model, tp, group)
            for tokens in sizes.layer_tokens:
                x = sizes.random(timer, tokens, model.hidden)
                weights = reference.weights.values()
                times = layer_times(timer, reference, weights, x, sizes.sustained_s)
                text = f"layer of {model.name}, tp {tp}, {tokens} tokens: "
                text += f"{(times[0] + times[1]) * 1e3:.4g} ms"
                state.add_row("layers", MeasuredLayer(*layer, tp, tokens, *times), text)
        if (model.hidden, model.vocab) in seen:
            continue
        seen.add((model.hidden, model.vocab))
        for end in _embedding_and_head(timer, sizes, model):
            text = f"head of {model.name}, {end.tokens} tokens: {end.seconds * 1e3:.4g} ms"
            state.add_row("ends", end, text)


class _ReferenceLayer:
    """Norms, projections, MLP and residuals; the queries are used as attention's output.

    Tensor parallelism (Megatron's, 1909.08053) has two all-reduces a direction: of the outputs of
    row-parallel matrices, and of the input gradients of column-parallel ones.
    """

    def __init__(
        self,
        timer: StepTimer,
        sizes: _ProblemSizes,
        model: ModelShape,
        tp: int,
        group: Group | None,
    ) -> None:
        self.model, self.tp, self.group = model, tp, group
        h = model.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "qkv": (qkv_width(model) // tp, h),
            "out": (h, model.q_width // tp),
            "fc1": (fc1_width(model) // tp, h),
            "fc2": (h, model.ffn // tp),
            "norm1": (h,),
            "norm2": (h,),
        }
        self.weights = {
            name: (sizes.random(timer, *shape) * 0.02).requires_grad_()
            for name, shape in shapes.items()
        }

    def __call__(self, x: Tensor) -> Tensor:
        """The layer's output for ``x``, both ``[tokens, hidden]``, tokens of this rank."""
        w, model = self.weights, self.model
        qkv = F.linear(self._reduce_input_grad(self._norm(x, w["norm1"])), w["qkv"])
        core = qkv[:, : model.q_width // self.tp].contiguous()
        x = x + self._all_reduced(F.linear(core, w["out"]))
        fc1 = F.linear(self._reduce_input_grad(self._norm(x, w["norm2"])), w["fc1"])
        if model.gated:
            gate, value = fc1.chunk(2, -1)
            inner = F.silu(gate) * value
        else:
            inner = F.gelu(fc1)
        return x + self._all_reduced(F.linear(inner, w["fc2"]))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.model.biases:
            return F.layer_norm(x, (self.model.hidden,), weight)
        return F.rms_norm(x, (self.model.hidden,), weight)

    def _all_reduced(self, x: Tensor) -> Tensor:
        if self.tp > 1:
            dist.all_reduce(x.data, group=self.group)
        return x

    def _reduce_input_grad(self, x: Tensor) -> Tensor:
        """Sum the gradient of the column-parallel input over the tensor-parallel ranks."""

        def all_reduced(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=self.group)
            return gradient

        if self.tp > 1 and x.requires_grad:
            x.register_hook(all_reduced)
        return x


def layer_times(
    timer: StepTimer,
    layer: Callable[[Tensor], Tensor],
    weights: Iterable[Tensor],
    x: Tensor,
    max_s: float,
) -> tuple[float, float, float, float]:
    """Seconds of a layer's forward pass, and of its backward pass for the input and the weights;
    collective.

    Args:
        weights: the tensors whose gradients backward computes.
        x: the layer's input, ``[tokens, hidden]`` for :class:`_ReferenceLayer`.
        max_s: of :meth:`StepTimer.seconds`, for forward alone and for both passes.

    Returns:
        GPU seconds forward and backward, CPU launch seconds forward and backward (0 on a CPU): the
        last four fields of ``MeasuredLayer``.
    """
    dy = torch.randn_like(x)
    x = x.detach().requires_grad_()
    inputs = (x, *weights)

    def both() -> None:
        torch.autograd.grad(layer(x), inputs, dy)

    forward, backward = timer.forward_backward(lambda: layer(x), both, max_s)
    return forward.device_s, backward.device_s, forward.host_s, backward.host_s


def _embedding_and_head(
    timer: StepTimer, sizes: _ProblemSizes, model: ModelShape
) -> Iterator[MeasuredEmbeddingHead]:
    """Rows of embedding, last norm, output head and cross entropy, without tensor parallelism."""
    table = (sizes.random(timer, model.vocab, model.hidden) * 0.02).requires_grad_()
    norm = sizes.random(timer, model.hidden).requires_grad_()
    for tokens in sizes.layer_tokens[:-1]:
        ids = torch.randint(model.vocab, (tokens,), device=timer.device)

        def step(ids: Tensor = ids) -> None:
            hidden = F.rms_norm(F.embedding(ids, table), (model.hidden,), norm)
            loss = F.cross_entropy(F.linear(hidden, table).float(), ids)
            torch.autograd.grad(loss, (table, norm))

        times = timer.times(step, sizes.sustained_s)
        yield MeasuredEmbeddingHead(
            model.hidden, model.vocab, 1, tokens, times.device_s, times.host_s
        )


def _finalize(state: Profile, world: int) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(state.timer.device) if state.timer.on_gpu else "CPU"
    versions = f"torch {torch.__version__}"
    if state.timer.on_gpu:
        versions += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    where = f"{world} x {gpu}, {versions}, {datetime.date.today()}"
    for number in state.numbers.values():
        number["source"] = "; ".join(filter(None, (where, number["source"])))
    state.record("gpus_per_node", state.gpus_per_node, where)
    if "levels" not in state.numbers:  # one rank
        level = _base_level(state)
        source = f"as {state.base}: one rank has no links to measure"
        state.numbers["levels"] = {"value": [level], "origin": "assumed", "source": source}
    state.log("done")
    return state.numbers
