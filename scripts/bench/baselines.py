"""Attention implementations to compare: each builds a step on this rank's shard of the tokens.

A step is a forward (and backward) pass over q ``[b, s_local, h, d]`` and k, v
``[b, s_local, h_kv, d]``, bf16. A library that is not installed raises ImportError, and one that
cannot compute a shape's mask ValueError. Which tokens a rank holds is a list of their positions, in
storage order; -1 is a token of padding.
"""

from __future__ import annotations

import argparse
import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_harness import Session, Step, Table, steps_in_a_row, warm_up_seconds
from shapes import SHAPE_SETS, SHAPE_SYNTAX, Shape
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import ds_usp
from ds_usp.attention.tuning import AUTO_TUNING
from ds_usp.geometry.degrees import divisors
from ds_usp.training import prepare_deepspeed

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}

COLUMNS = ("contender", "ms", "tflop_per_s_per_gpu", "share_of_kernel", "extra_gib")
KERNELS = {"cuda": ("flash4", "cudnn", "flash2"), "cpu": ("sdpa",)}


@dataclass(frozen=True)
class Baseline:
    """One implementation on one kernel.

    Attributes:
        attend: from the shape of the whole problem to the attention of q, k and v, the shape that
            gives this rank's heads and head dim, and the positions of this rank's tokens.
        mesh: the mesh, for ds_usp only.
        around: context manager in which each forward and backward pass runs.
    """

    name: str
    kernel: str
    attend: Callable[[Shape], tuple[Attend, Shape, list[int]]]
    mesh: ds_usp.SequenceMesh | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def label(self) -> str:
        """Value of the column ``contender``."""
        return f"{self.name}, {self.kernel}"

    def make(self, shape: Shape, device: torch.device) -> Step:
        """A step (forward, and backward unless the shape says forward) on fresh random tensors."""
        attend, share, positions = self.attend(shape)
        q, k, v, dout = share.random(device, len(positions))
        for x in (q, k, v):
            x.requires_grad_(not shape.forward)

        def step() -> None:
            with self.around(), torch.set_grad_enabled(not shape.forward):
                out = attend(q, k, v)
                if not shape.forward:
                    torch.autograd.grad(out, (q, k, v), dout)

        return step

    def prepared(self, session: Session, shape: Shape) -> Step | None:
        """The warmed-up step; None, with a printed reason, if a rank cannot build it."""

        def make() -> Step:
            step = self.make(shape, session.device)
            for _ in range(3):
                step()
            return step

        if self.mesh is not None:
            self.mesh.release()
        step_or_reason = session.try_all_ranks(make)
        if not isinstance(step_or_reason, str):
            return step_or_reason
        session.print0(f"{shape}  {self.label}: left out, {step_or_reason}")
        return None

    def extra_gib(self, session: Session, step: Step) -> float:
        """GiB: peak of a step above its inputs, plus the staging buffers that its mesh reserves."""
        reserved = 0 if self.mesh is None else self.mesh.reserved_bytes
        return (session.extra_bytes(step) + reserved) / 2**30


def usp_attend(
    mesh: ds_usp.SequenceMesh,
    layout: ds_usp.TokenLayout,
    kernel: str,
    mask: ds_usp.MaskSpec,
    tuning: ds_usp.Tuning = AUTO_TUNING,
) -> Attend:
    """usp_attention as a function of q, k and v."""
    return partial(
        ds_usp.usp_attention, mesh=mesh, layout=layout, mask=mask, kernel=kernel, tuning=tuning
    )


def torch_attend(kernel: str, causal: bool = True) -> Attend:
    """Torch's attention of [batch, tokens, heads, dim] by one of its backends."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(BACKENDS[kernel]):
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
            )
        return out.transpose(1, 2)

    return attend


def local_kernel(shape: Shape, kernel: str) -> Attend:
    """The kernel on the full sequence, called as its own library is; ds_usp's adapter of it where
    that takes more than one call (documents) and for kernels of ds_usp."""
    if kernel in BACKENDS and not (shape.window or shape.mask.documents):
        return torch_attend(kernel, causal=not shape.full)
    if kernel == "flash4" and not shape.mask.documents:
        from flash_attn.cute import flash_attn_func

        options: dict[str, Any] = {"causal": not (shape.full or shape.window)}
        if shape.window:
            options["window_size"] = (shape.window, 0)
        return lambda q, k, v: flash_attn_func(q, k, v, **options)[0]
    single = ds_usp.SequenceMesh.single()
    layout = single.layout("contiguous", shape.seq_len)
    return usp_attend(single, layout, kernel, shape.mask)


def shape_flags(parser: argparse.ArgumentParser, *shapes: str) -> None:
    """The flags ``--shapes``, by default ``shapes``, and ``--kernels``, whose default
    :func:`parse_baseline_args` sets."""
    sets = ", ".join(SHAPE_SETS)
    parser.add_argument(
        "--shapes", nargs="+", default=shapes, help=f"{SHAPE_SYNTAX}; or sets of them: {sets}"
    )
    parser.add_argument("--kernels", nargs="+", help=f"default: {KERNELS}")


def parse_baseline_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments; ``--kernels`` defaults to those of the device."""
    args = parser.parse_args()
    args.kernels = args.kernels or KERNELS[args.device]
    return args


def all_baselines(kernels: Sequence[str], peers: Sequence[str]) -> list[Baseline]:
    """Single-GPU kernels, ds_usp on every mesh, then the requested libraries."""
    meshes = all_meshes()
    baselines = [single_gpu_baseline(kernel) for kernel in kernels]
    baselines += [ds_usp_baseline(mesh, kernel) for kernel in kernels for mesh in meshes]
    for peer in peers:
        baselines += PEERS[peer](kernels)
    return baselines


def all_meshes() -> list[ds_usp.SequenceMesh]:
    """One mesh for each Ulysses degree."""
    degrees = reversed(divisors(dist.get_world_size()))
    return [ds_usp.SequenceMesh.from_group(None, ulysses) for ulysses in degrees]


def ds_usp_baseline(
    mesh: ds_usp.SequenceMesh, kernel: str, tuning: ds_usp.Tuning = AUTO_TUNING
) -> Baseline:
    """ds_usp over one mesh, in the shape's token layout."""

    def attend(shape: Shape) -> tuple[Attend, Shape, list[int]]:
        documents = shape.mask if shape.layout_kind == "balanced" else ()
        layout = mesh.layout(shape.layout_kind, shape.seq_len, documents)
        call = usp_attend(mesh, layout, kernel, shape.mask, tuning)
        return call, shape, layout.positions(mesh.rank)

    return Baseline(f"ds_usp {mesh.ulysses_degree}x{mesh.ring_degree}", kernel, attend, mesh)


def single_gpu_baseline(kernel: str) -> Baseline:
    """The kernel without communication: full sequence, 1/world of the heads. The upper limit."""

    def attend(shape: Shape) -> tuple[Attend, Shape, list[int]]:
        world, mesh = dist.get_world_size(), ds_usp.SequenceMesh.single()
        local = replace(shape, heads=shape.heads // world, kv_heads=max(shape.kv_heads // world, 1))
        layout = mesh.layout("contiguous", shape.seq_len)
        return usp_attend(mesh, layout, kernel, shape.mask), local, layout.positions(0)

    return Baseline("one GPU", kernel, attend)


def time_baselines(
    session: Session,
    args: argparse.Namespace,
    table: Table,
    shape: Shape,
    baselines: Sequence[Baseline],
    *,
    graphs: bool = False,
) -> None:
    """Time baselines interleaved and add a row for each: the shape, then :data:`COLUMNS`.

    Args:
        graphs: time the replay of each step, captured in a CUDA graph.
    """
    steps, extra = {}, {}
    for baseline in baselines:
        step = baseline.prepared(session, shape)
        if step is None:
            continue
        extra[baseline.label] = baseline.extra_gib(session, step)
        replay = session.try_all_ranks(partial(session.capture_graph, step)) if graphs else step
        if isinstance(replay, str):
            session.print0(f"{shape}  {baseline.label}: left out, no CUDA graph of it: {replay}")
        else:
            steps[baseline.label] = replay
    repeats = steps_in_a_row(args, shape.tflop / session.world)
    medians = session.medians(steps, args.rounds, repeats, warm_up_seconds(args))
    for name, seconds in medians.items():
        rate = shape.tflop / session.world / seconds
        fraction = medians.get(f"one GPU, {name.split(', ')[-1]}", float("nan")) / seconds
        numbers = (f"{seconds * 1e3:.3f}", f"{rate:.1f}", f"{fraction:.3f}", f"{extra[name]:.2f}")
        table.add([str(shape), name, *numbers])
        session.print0(
            f"{shape}  {name:44} {seconds * 1e3:9.2f} ms {rate:6.1f} TFLOP/s per GPU "
            f"{fraction:7.1%} of the kernel {extra[name]:6.2f} GiB"
        )


# ------------------------------------------------------------------ other libraries


def even_piece(shape: Shape) -> list[int]:
    """This rank's piece, one after the other, of a library that shards evenly; ValueError if the
    tokens do not divide."""
    tokens, rest = divmod(shape.seq_len, dist.get_world_size())
    if rest:
        raise ValueError(f"{shape.seq_len} tokens do not divide among {dist.get_world_size()}")
    return list(range(dist.get_rank() * tokens, (dist.get_rank() + 1) * tokens))


def mirrored_chunks(borders: Sequence[int], world: int, rank: int) -> list[int]:
    """What TransformerEngine's load balancing gives a rank: each document is padded to a multiple
    of 2 x world and cut into as many chunks; rank r has chunk r and the r-th from behind."""
    positions = []
    for start, stop in pairwise(borders):
        chunk = math.ceil((stop - start) / (2 * world))
        for index in (rank, 2 * world - 1 - rank):
            chunk_positions = range(start + index * chunk, start + (index + 1) * chunk)
            positions += [p if p < stop else -1 for p in chunk_positions]
    return positions


def check_heads_divide(shape: Shape) -> None:
    """ValueError if not every rank can have as many heads of the queries and of the keys."""
    world = dist.get_world_size()
    if shape.heads % world or shape.kv_heads % world:
        raise ValueError(f"{shape.heads}/{shape.kv_heads} heads do not divide by {world}")


def causal_chunks(shape: Shape) -> list[int]:
    """:func:`mirrored_chunks` of a library that is called with a causal mask alone."""
    if shape.mask != ds_usp.MaskSpec.causal():
        raise ValueError("this comparison is causal")
    world = dist.get_world_size()
    if shape.seq_len % (2 * world):
        raise ValueError(f"{shape.seq_len} tokens do not divide into {2 * world} chunks")
    return mirrored_chunks((0, shape.seq_len), world, dist.get_rank())


def deepspeed_ulysses(kernels: Sequence[str]) -> Iterator[Baseline]:
    """DeepSpeed's DistributedAttention around the same kernel."""
    for kernel in kernels:

        def attend(shape: Shape, kernel: str = kernel) -> tuple[Attend, Shape, list[int]]:
            import deepspeed.comm
            from deepspeed.sequence.layer import DistributedAttention

            if not deepspeed.comm.is_initialized():
                prepare_deepspeed()  # else it compiles an operator for CPUs
                deepspeed.comm.init_distributed(dist.get_backend(), verbose=False)
            positions = even_piece(shape)
            check_heads_divide(shape)  # else its uneven_heads_all2all may hang: 40/5 heads, 2 ranks
            attention = DistributedAttention(local_kernel(shape, kernel), dist.group.WORLD, 2, 1)
            return lambda q, k, v: attention(q, k, v, 0), shape, positions

        yield Baseline("DeepSpeed ulysses", kernel, attend)


class AllToAll(torch.autograd.Function):
    """One Ulysses all-to-all over all ranks, and its inverse in backward.

    To heads: ``[b, s_local, h, d]`` to ``[b, s, h / world, d]``; else from there back. ``lengths``
    are the tokens of each rank.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lengths: Sequence[int], to_heads: bool) -> torch.Tensor:
        """See the class."""
        ctx.lengths, ctx.to_heads = lengths, to_heads
        return to_local_heads(x, lengths) if to_heads else to_local_tokens(x, lengths)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The inverse exchange."""
        inverse = to_local_tokens if ctx.to_heads else to_local_heads
        return inverse(grad, ctx.lengths), None, None


def to_local_heads(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """All tokens of this rank's heads."""
    sent = x.unflatten(2, (len(lengths), -1)).movedim(2, 0).contiguous()
    _, batch, _, heads, dim = sent.shape
    sizes = [batch * tokens * heads * dim for tokens in lengths]
    received = x.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent.view(-1), _unless_equal(sizes))
    if batch == 1:  # shards of one sequence follow each other in memory
        return received.view(1, sum(lengths), heads, dim)
    shards = zip(received.split(sizes), lengths, strict=True)
    return torch.cat([shard.view(batch, tokens, heads, dim) for shard, tokens in shards], dim=1)


def to_local_tokens(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """All heads of this rank's tokens."""
    batch, _, heads, dim = x.shape
    if batch == 1:
        sent = x.reshape(-1)
    else:
        sent = torch.cat([shard.reshape(-1) for shard in x.split(list(lengths), 1)])
    sizes = [batch * tokens * heads * dim for tokens in lengths]
    received = x.new_empty(len(lengths), batch, lengths[dist.get_rank()], heads, dim)
    dist.all_to_all_single(received.view(-1), sent, None, _unless_equal(sizes))
    return received.movedim(0, 2).flatten(2, 3)


def _unless_equal(sizes: list[int]) -> list[int] | None:
    """The argument of all_to_all_single, which has a shorter path for equal sizes."""
    return sizes if len(set(sizes)) > 1 else None


def plain_all_to_alls(kernels: Sequence[str]) -> Iterator[Baseline]:
    """Ulysses as one writes it by hand: q, k and v each packed by torch and exchanged by one
    all_to_all_single, the kernel, and one back. Uneven tokens are allowed, heads must divide."""
    for kernel in kernels:

        def attend(shape: Shape, kernel: str = kernel) -> tuple[Attend, Shape, list[int]]:
            world = dist.get_world_size()
            check_heads_divide(shape)
            tokens, rest = divmod(shape.seq_len, world)
            lengths = [tokens + (rank < rest) for rank in range(world)]
            start = sum(lengths[: dist.get_rank()])
            local = local_kernel(shape, kernel)

            def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                heads = [AllToAll.apply(x, lengths, True) for x in (q, k, v)]
                return AllToAll.apply(local(*heads), lengths, False)

            return run, shape, list(range(start, start + lengths[dist.get_rank()]))

        yield Baseline("plain all-to-all", kernel, attend)


@lru_cache(maxsize=1)
def _world_group() -> DeviceMesh:
    return init_device_mesh("cuda", (dist.get_world_size(),))


@contextmanager
def torch_rotation(method: str) -> Iterator[None]:
    """torch's context parallelism around one pass; it requires a buffer to shard."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)
    buffer = torch.empty(2 * dist.get_world_size(), device="cuda")
    with context_parallel(
        _world_group(), buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}
    ):
        yield


def torch_context_parallel(kernels: Sequence[str]) -> Iterator[Baseline]:
    """torch's context parallel, keys and values gathered or rotated by all-to-all."""
    for kernel in (k for k in kernels if k in BACKENDS):
        for method in ("allgather", "alltoall"):

            def attend(shape: Shape, kernel: str = kernel) -> tuple[Attend, Shape, list[int]]:
                return torch_attend(kernel), shape, causal_chunks(shape)

            around = partial(torch_rotation, method)
            yield Baseline(f"torch {method}", kernel, attend, around=around)


@lru_cache(maxsize=1)
def load_cudnn() -> None:
    """Load cuDNN from torch's package; TransformerEngine would load the system's version."""
    try:
        import nvidia.cudnn
    except ImportError:  # torch was not installed with the package of it
        return

    folder = Path(nvidia.cudnn.__path__[0]) / "lib"
    for name in ("graph", "ops", "cnn", "adv"):  # each needs the ones before it
        ctypes.CDLL(str(folder / f"libcudnn_{name}.so.9"), mode=ctypes.RTLD_GLOBAL)


def transformer_engine(kernels: Sequence[str]) -> Iterator[Baseline]:
    """TransformerEngine's DotProductAttention over all ranks, on cuDNN whatever ``kernels`` are:
    one baseline for each kind of context parallelism, ``a2a+p2p`` on 4 ranks only. Documents are
    its ``thd`` format."""
    world = dist.get_world_size()
    world_ranks = list(range(world))
    kinds = ["p2p", "a2a"] + (["a2a+p2p"] if world == 4 else [])
    for kind in kinds:

        def attend(shape: Shape, kind: str = kind) -> tuple[Attend, Shape, list[int]]:
            """See ``Baseline.attend``; collective for ``a2a+p2p``, which creates its groups."""
            load_cudnn()
            from transformer_engine.pytorch import DotProductAttention

            attention = DotProductAttention(
                shape.heads,
                shape.head_dim,
                num_gqa_groups=shape.kv_heads,
                attention_dropout=0.0,
                qkv_format="thd" if shape.documents else "bshd",
                attn_mask_type="padding_causal" if shape.documents else "causal",
            )
            group: object = dist.group.WORLD
            if kind == "a2a+p2p":
                # Of a 2 x 2 grid of ranks: [this rank's a2a group, its p2p group].
                pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
                rank = dist.get_rank()
                group = [pairs[rank // 2], pairs[2 + rank % 2]]
            attention.set_context_parallel_group(group, world_ranks, torch.cuda.Stream(), kind)
            if shape.documents:
                return thd_attend(attention, shape), shape, thd_chunks(shape)

            def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return attention(q, k, v).unflatten(2, (shape.heads, -1))

            return run, shape, causal_chunks(shape)

        yield Baseline(f"TransformerEngine {kind}", "cudnn", attend)


def thd_chunks(shape: Shape) -> list[int]:
    """:func:`mirrored_chunks` of causal documents."""
    if shape.window or shape.full or shape.batch > 1:
        raise ValueError("this comparison of documents is causal and of one sequence")
    return mirrored_chunks(shape.borders, dist.get_world_size(), dist.get_rank())


def thd_attend(attention: Callable[..., torch.Tensor], shape: Shape) -> Attend:
    """TransformerEngine's attention of documents, in its format ``thd``: where all lengths are
    multiples of 2 x world without padding, else with padding behind each document."""
    unit = 2 * dist.get_world_size()
    lengths = [stop - start for start, stop in pairwise(shape.borders)]
    padded = [math.ceil(length / unit) * unit for length in lengths]
    borders = torch.tensor(shape.borders, dtype=torch.int32, device="cuda")
    padded_borders = borders  # the same object says that there is no padding
    if padded != lengths:
        sums = [0, *accumulate(padded)]
        padded_borders = torch.tensor(sums, dtype=torch.int32, device="cuda")
    longest = math.ceil(max(padded) / 128) * 128
    options = {
        "cu_seqlens_q": borders,
        "cu_seqlens_kv": borders,
        "cu_seqlens_q_padded": padded_borders,
        "cu_seqlens_kv_padded": padded_borders,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = attention(q[0], k[0], v[0], **options)
        return out.view(1, -1, shape.heads, v.shape[3])

    return run


@lru_cache(maxsize=1)
def magi_group() -> dist.ProcessGroup:
    """All ranks, with the NCCL settings of MagiAttention's own benchmark; collective."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.cga_cluster_size = 1
    return dist.new_group(backend="nccl", pg_options=options)


def magi_attention(kernels: Sequence[str]) -> Iterator[Baseline]:
    """MagiAttention on its own kernel, FFA, whatever ``kernels`` are: that kernel on one GPU, then
    over all ranks as its benchmark has it, 2 stages of communication beside the local one. It plans
    in ``attend``, which is not timed."""

    def alone(shape: Shape) -> tuple[Attend, Shape, list[int]]:
        from magi_attention.env.general import is_cat_gqa_enable
        from magi_attention.functional import flex_flash_attn_func

        world, borders = dist.get_world_size(), magi_borders(shape)
        local = replace(shape, heads=shape.heads // world, kv_heads=max(shape.kv_heads // world, 1))
        ranges = torch.tensor(list(pairwise(borders)), dtype=torch.int32, device="cuda")
        causal = torch.ones(len(ranges), dtype=torch.int32, device="cuda")
        cat = is_cat_gqa_enable()  # MAGI_ATTENTION_CATGQA=1
        options = {"disable_bwd_dkv_atomic_reduction": cat, "cat_gqa": cat}

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            inputs = q[0], k[0], v[0], ranges, ranges, causal
            out, _ = flex_flash_attn_func(*inputs, disable_fwd_atomic_reduction=True, **options)
            return out[None]

        return run, local, list(range(shape.seq_len))

    def attend(shape: Shape) -> tuple[Attend, Shape, list[int]]:
        from magi_attention import api, config
        from magi_attention.common import AttnRanges

        documents = AttnRanges.from_ranges(list(pairwise(magi_borders(shape))))
        heads = shape.heads, shape.kv_heads, shape.head_dim
        order = config.UniformOverlapAlg(random_costs=True, random_seed=42)
        stages = config.OverlapConfig(degree=2, max_num_chunks=4096, alg=order)
        plan = config.DistAttnConfig(config.DispatchConfig(chunk_size=2048), stages)
        masks = documents, documents, "causal", shape.seq_len, shape.seq_len
        key = api.magi_attn_flex_key(*masks, *heads, 0, magi_group(), plan)
        positions = api.get_position_ids(key).tolist()
        if len(positions) * dist.get_world_size() != shape.seq_len:
            raise ValueError(f"{shape.seq_len} tokens do not divide into MagiAttention's chunks")
        return lambda q, k, v: api.calc_attn(q[0], k[0], v[0], key)[0][None], shape, positions

    yield Baseline("one GPU", "ffa", alone)
    yield Baseline("MagiAttention", "ffa", attend)


def magi_borders(shape: Shape) -> tuple[int, ...]:
    """Cumulative lengths of causal documents, or of the one; ValueError for any other mask."""
    if shape.window or shape.full or shape.tree or shape.batch > 1:
        raise ValueError("this comparison is causal and of one sequence")
    return shape.borders or (0, shape.seq_len)


PEERS = {
    "deepspeed": deepspeed_ulysses,
    "plain": plain_all_to_alls,
    "torch": torch_context_parallel,
    "te": transformer_engine,
    "magi": magi_attention,
}
