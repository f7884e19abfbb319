"""What every rank of ``ds-usp verify`` runs: the calls under test, the reference, relative errors.

Ranks are forked from this process (gloo), or were started by torchrun.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.functional import scaled_dot_product_attention

import ds_usp
from ds_usp import testing as oracle
from ds_usp.config import TorchrunEnv
from ds_usp.geometry.layout import DEFAULT_SP_ORDER
from ds_usp.kernels.api import KernelRequest
from ds_usp.kernels.registry import select_kernel

ENTRY_POINTS = ("usp_attention", "USPAttention")
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
_TIMEOUT = timedelta(seconds=300)  # of one collective, on a loaded machine
_SHUTDOWN_TIMEOUT_S = 10.0  # for the other ranks to fail by themselves once one has
_ROW_DIM: Mapping[str, int] = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}
# Gradients of a query that sees one key are 0: they are compared with a fraction of dout then.
_FEW_KEYS, _MIN_FRACTION_OF_DOUT = 16, 0.05
_BLOCK_ELEMENTS: Mapping[str, int] = {"cpu": 1 << 22, "cuda": 1 << 25}  # scores of the oracle
_BLOCK_COPIES = 12  # of a block's scores that are in memory at once
# Beside tensors: libraries and buffers of a rank, measured on CPUs; a CUDA context and NCCL.
_CPU_RANK_BYTES, _GPU_RANK_HOST_BYTES = 2**28, 3 * 2**30

Progress = Callable[[str], None]
Work = Callable[[TorchrunEnv, torch.device, Progress], Any]  # what every rank runs


@dataclass(frozen=True)
class VerifyCase:
    """One call, forward and backward, on one mesh; see the flags for what the fields mean."""

    ulysses: int = 2
    ring: int = 2
    order: str = DEFAULT_SP_ORDER
    batch: int = 1
    seq_len: int = 1024
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    value_dim: int = 64
    dtype: str = "fp32"
    layout: str = "zigzag"
    mask: tuple[int | None, int | None, int] = (None, 0, 0)  # left, right, prefix
    documents: tuple[tuple[int, ...], ...] = ()
    softcap: float | None = None
    sinks: bool = False
    kernel: str = "auto"
    entry_point: str = ENTRY_POINTS[0]
    backward: bool = True
    seed: int = 0

    def selected_kernel(self, device: str) -> str:
        """The name of the kernel that runs; UnsupportedAttentionError where none does."""
        request = KernelRequest(
            device=device,
            dtype=DTYPES[self.dtype],
            head_dim=self.head_dim,
            mask=self.mask_spec().band,
            documents=bool(self.documents),
            value_dim=self.value_dim,
            softcap=self.softcap,
        )
        return select_kernel(request, self.kernel).name

    @property
    def borders(self) -> tuple[tuple[int, ...], ...]:
        """Cumulative borders of the documents, as the package takes them."""
        return tuple((0, *accumulate(lengths)) for lengths in self.documents)

    @property
    def mask_name(self) -> str:
        left, right, prefix = self.mask
        if prefix:
            return f"prefix:{prefix}"
        if left is None:
            return "causal" if right == 0 else "full"
        return f"window:{left}" + (f",{right}" if right else "")

    @property
    def mesh_name(self) -> str:
        order = "" if self.order == DEFAULT_SP_ORDER else f" ({self.order})"
        return f"ulysses {self.ulysses} x ring {self.ring}{order}"

    @property
    def short_name(self) -> str:
        return f"{self.mesh_name}, {self.layout}, {self.mask_name}"

    def __str__(self) -> str:
        count = sum(map(len, self.documents))
        values = "" if self.value_dim == self.head_dim else f" (values {self.value_dim})"
        parts = [
            self.short_name,
            f"{count} documents" if count else "",
            f"softcap {self.softcap:g}" if self.softcap is not None else "",
            "sinks" if self.sinks else "",
            f"{self.batch} x {self.seq_len} tokens",
            f"{self.heads} heads ({self.kv_heads} kv) of {self.head_dim}{values}",
            self.dtype,
            f"kernel {self.kernel}",
            self.entry_point,
            "forward and backward" if self.backward else "forward only",
        ]
        return ", ".join(filter(None, parts))

    def mask_spec(self, documents: bool = True) -> ds_usp.MaskSpec:
        """The mask, by the constructor that a user would call for it.

        Args:
            documents: with the document borders; the drop-in module takes them in each call
                instead, and a mask without them when it is made.
        """
        left, right, prefix = self.mask
        borders = self.borders if documents else ()
        if prefix and not borders:
            return ds_usp.MaskSpec.prefix_lm(prefix)
        if prefix:  # with documents: refused, and the report quotes the error
            return ds_usp.MaskSpec(left, right, borders, prefix)
        if left is not None:
            return ds_usp.MaskSpec.window(left, right, borders)
        return ds_usp.MaskSpec.causal(borders) if right == 0 else ds_usp.MaskSpec.full(borders)

    def allowed(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The mask as the oracle takes it, ``[B or 1, rows, S]``."""
        left, right, prefix = self.mask
        allowed = oracle.window(query, key, left, right) | (key < prefix)
        inside = [oracle.same_document(query, key, lengths) for lengths in self.documents]
        return allowed & torch.stack(inside) if inside else allowed[None]


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank allocates for a case: of its device, and of host memory besides."""

    device: float
    host: float

    @classmethod
    def of(cls, case: VerifyCase, device: str) -> RankMemory:
        """Of the whole tensors, which every rank has, not of shards: call, dense call and reference
        are compared on all of them. An estimate: on CPUs 1 to 1.3 times what was measured at 2K and
        4K tokens."""
        tokens, size = case.batch * case.seq_len, DTYPES[case.dtype].itemsize
        drawn = max(size, 4)
        keys = tokens * case.kv_heads * (case.head_dim + case.value_dim)
        out = tokens * case.heads * case.value_dim
        inputs = tokens * case.heads * case.head_dim + keys + out
        results = inputs if case.backward else out  # dq, dk and dv are as large as q, k and v
        dense = 2.0 * inputs * size
        with contextlib.suppress(ds_usp.USPError):  # which the ranks report
            if case.selected_kernel(device) == "eager":  # scores, and their exponentials
                dense += 2.5 * case.batch * case.heads * case.seq_len**2 * drawn
        # In fp64, half of it again while it is reduced; and the blocks' scores.
        reference = 12.0 * results + _BLOCK_COPIES * 8 * _BLOCK_ELEMENTS[device]
        peak = inputs * size + max(dense, results * size + reference)
        if device == "cpu":
            return cls(peak + _CPU_RANK_BYTES, 0.0)
        return cls(peak, inputs * drawn + _GPU_RANK_HOST_BYTES)


@dataclass(frozen=True)
class TensorErrors:
    """One result's relative errors, each the largest of all ranks.

    Args:
        name: out, lse, dq, dk, dv or dsinks.
        error: of the call over the ranks.
        own: of the same kernel run dense on one device.
        ratio: of the two on one rank; None where the kernel alone has no error there.
    """

    name: str
    error: float
    own: float
    ratio: float | None


@dataclass(frozen=True)
class Report:
    """The outcome of one case.

    Args:
        kernel: the one that ran.
        refusal: the error's text where the package refused the call.
        positions: how token positions contradict the layout; None: they do not.
        errors: by tensor; empty where the call was refused.
    """

    case: VerifyCase
    kernel: str
    refusal: str | None = None
    positions: str | None = None
    errors: tuple[TensorErrors, ...] = ()


def run_cases(
    cases: list[VerifyCase], env: TorchrunEnv, device: torch.device, progress: Progress
) -> list[Report]:
    """Run the cases one after the other; collective over the default group."""
    reports = []
    for number, case in enumerate(cases, 1):

        def stage(text: str, head: str = f"[{number}/{len(cases)}] {case.short_name}") -> None:
            if env.rank == 0:
                progress(f"{head}: {text}")

        reports.append(_run(case, env, device, stage))
    return reports


def _run(case: VerifyCase, env: TorchrunEnv, device: torch.device, stage: Progress) -> Report:
    """Run one case and compare it with the dense reference; collective, the same report on every
    rank: a refusal where any rank refused."""
    stage("attention")
    kernel, refusal = case.kernel, None
    try:
        mesh = _mesh(case.ulysses, case.order, env.world)
        documents = case.borders[0] if case.layout == "balanced" and case.documents else ()
        layout = mesh.layout(case.layout, case.seq_len, documents)
        # Fields that change no tensor are blanked: cases share what _tensors and _reference keep.
        tensors = _tensors(replace(case, layout=""), device)
        kernel = case.selected_kernel(device.type)
        results = _attend(mesh, layout, case, tensors)
        single = ds_usp.SequenceMesh.single()
        dense = _attend(single, single.layout("contiguous", case.seq_len), case, tensors)
    except ds_usp.USPError as error:
        refusal = f"{type(error).__name__}: {error}"
    refusals = {r: text for r, text in enumerate(_all_gather(refusal, env)) if text is not None}
    if refusals:
        first = min(refusals)
        rank = "" if len(refusals) == env.world else f"rank {first}: "
        return Report(case, kernel, refusal=rank + refusals[first])
    stage("dense reference")
    same = replace(case, layout="", kernel="", entry_point="", ulysses=0, ring=0)
    reference = _reference(same, device, env)
    rows = torch.as_tensor(layout.positions(mesh.rank), device=device)
    by_rank = _all_gather(_errors(case, results, dense, reference, tensors, rows), env)
    errors = tuple(largest_errors(by_rank))
    return Report(case, kernel, positions=_position_error(case, layout), errors=errors)


def _all_gather(value: Any, env: TorchrunEnv) -> list[Any]:
    values: list[Any] = [value] * env.world
    if env.world > 1:
        dist.all_gather_object(values, value)
    return values


@lru_cache(maxsize=64)
def _mesh(ulysses: int, order: str, world: int) -> ds_usp.SequenceMesh:
    if world == 1 and not dist.is_initialized():
        return ds_usp.SequenceMesh.single()
    return ds_usp.SequenceMesh.from_group(None, ulysses, order)


@lru_cache(maxsize=1)
def _tensors(case: VerifyCase, device: torch.device) -> oracle.Tensors:
    """Global tensors, drawn on the CPU so that they are the same on every rank and device."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = DTYPES[case.dtype]
    draw_dtype = torch.promote_types(dtype, torch.float32)
    sizes = {
        "q": (case.heads, case.head_dim),
        "k": (case.kv_heads, case.head_dim),
        "v": (case.kv_heads, case.value_dim),
        "dout": (case.heads, case.value_dim),
    }
    drawn = {
        name: torch.randn(case.batch, case.seq_len, *size, generator=generator, dtype=draw_dtype)
        for name, size in sizes.items()
    }
    heads = torch.arange(1, case.heads + 1, device=device, dtype=draw_dtype)
    return oracle.Tensors(
        **{name: x.to(device, dtype) for name, x in drawn.items()},
        sinks=(6.0 * heads / case.heads - 2.0) if case.sinks else None,
    )


class _LocalAttention(torch.nn.Module):
    """A user's local attention for the drop-in module: torch's, with the case's mask."""

    def __init__(self, case: VerifyCase) -> None:
        super().__init__()
        self.bounds = case.mask

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of [batch, tokens, heads, dim], with torch's causal flag or a dense mask."""
        left, right, prefix = self.bounds
        groups = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        positions = torch.arange(q.shape[2], device=q.device)
        allowed, causal = None, self.bounds == (None, 0, 0)
        if not causal and self.bounds != (None, None, 0):
            allowed = oracle.window(positions, positions, left, right) | (positions < prefix)
        out: torch.Tensor = scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=causal
        )
        return out.transpose(1, 2)


def _attend(
    mesh: ds_usp.SequenceMesh, layout: ds_usp.TokenLayout, case: VerifyCase, tensors: oracle.Tensors
) -> dict[str, torch.Tensor]:
    """This rank's results of the call under test, and the full gradient of the sinks."""
    inputs = [
        layout.shard(x, 1, mesh.rank).requires_grad_(case.backward)
        for x in (tensors.q, tensors.k, tensors.v)
    ]
    dout = layout.shard(tensors.dout, 1, mesh.rank)
    q, k, v = inputs
    results: dict[str, torch.Tensor] = {}
    if case.entry_point == ENTRY_POINTS[0]:
        sinks = tensors.sinks
        if sinks is not None:
            sinks = sinks.detach().requires_grad_(case.backward)
            inputs.append(sinks)
        out, lse = ds_usp.usp_attention(
            q,
            k,
            v,
            mesh=mesh,
            layout=layout,
            mask=case.mask_spec(),
            kernel=case.kernel,
            return_lse=True,
            scores=ds_usp.Scores(case.softcap, sinks),
        )
        results |= {"out": out.detach(), "lse": lse}
    else:
        attention = ds_usp.USPAttention(
            _LocalAttention(case),
            mesh=mesh,
            layout=layout,
            mask=case.mask_spec(documents=False),
            dropout_p=0.0,
            kernel=case.kernel,
        )
        out = attention(q, k, v, 0, documents=case.borders or None)
        results["out"] = out.detach()
    if case.backward:
        grads = list(torch.autograd.grad(out, inputs, dout))
        if len(grads) > 3 and mesh.sp_degree > 1:  # a rank's gradient is of its own tokens
            dist.all_reduce(grads[3], group=mesh.sp_group)
        results |= dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False))
    return results


@lru_cache(maxsize=4)
def _reference(case: VerifyCase, device: torch.device, env: TorchrunEnv) -> dict[str, torch.Tensor]:
    return oracle.attention_in_blocks(
        _tensors(replace(case, kernel="", entry_point=""), device),
        case.allowed,
        softcap=case.softcap,
        backward=case.backward,
        block_elements=_BLOCK_ELEMENTS[device.type],
        rank=env.rank,
        world=env.world,
    )


def _errors(
    case: VerifyCase,
    results: dict[str, torch.Tensor],
    dense: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    tensors: oracle.Tensors,
    rows: torch.Tensor,
) -> list[TensorErrors]:
    """Each result's relative error on this rank's shard, and that of the kernel run dense there."""
    # dq and dk of queries that see one key are 0, and nearly so with few keys: their errors are
    # relative to a fraction of dout then. The first token of a causal document sees itself alone,
    # and may be the only one of a rank.
    fewest_keys = min(len(rows), *chain.from_iterable(case.documents), _FEW_KEYS)
    left, right, _ = case.mask
    if left is not None and right is not None:
        fewest_keys = min(fewest_keys, left + right + 1)
    min_norm = 0.0
    if fewest_keys < _FEW_KEYS:
        min_norm = _MIN_FRACTION_OF_DOUT * float(tensors.dout[:, rows].double().norm())
    errors = []
    for name, result in results.items():
        expected, alone = reference[name], dense[name]
        if name in _ROW_DIM:
            expected, alone = (x.index_select(_ROW_DIM[name], rows) for x in (expected, alone))
        least = min_norm if name in ("dq", "dk") else 0.0
        error, own = (
            oracle.relative_error(x, expected, least) if x.shape == expected.shape else math.inf
            for x in (result, alone)
        )
        errors.append(TensorErrors(name, error, own, error / own if own > 0 else None))
    return errors


def largest_errors(results: Iterable[Sequence[TensorErrors]]) -> list[TensorErrors]:
    """The largest errors and ratio of each tensor, over several ranks or calls."""
    by_name: dict[str, list[TensorErrors]] = {}
    for measured in chain.from_iterable(results):
        by_name.setdefault(measured.name, []).append(measured)
    largest = []
    for name, same in by_name.items():
        ratio = max((x.ratio for x in same if x.ratio is not None), default=None)
        error, own = max(x.error for x in same), max(x.own for x in same)
        largest.append(TensorErrors(name, error, own, ratio))
    return largest


def _position_error(case: VerifyCase, layout: ds_usp.TokenLayout) -> str | None:
    """How the layout's token positions contradict its documentation; None: they do not."""
    all_tokens = torch.arange(case.seq_len)
    claimed = [torch.as_tensor(layout.positions(rank)) for rank in range(layout.degree)]
    shards = [layout.shard(all_tokens, 0, rank) for rank in range(layout.degree)]
    for rank, (positions, shard) in enumerate(zip(claimed, shards, strict=True)):
        if not torch.equal(positions, shard):
            return f"layout.shard gives rank {rank} other tokens than layout.positions says"
    if not torch.equal(torch.cat(claimed).sort().values, all_tokens):
        return "the ranks' positions do not hold every token of the sequence once"
    if not torch.equal(layout.gather(shards, 0), all_tokens):
        return "layout.gather does not undo layout.shard"
    expected = oracle.expected_positions(
        case.layout, case.seq_len, case.ulysses, case.ring, case.order
    )
    for rank, positions in enumerate(expected or ()):
        if not torch.equal(positions, claimed[rank]):
            return (
                f"rank {rank} holds {_differing(claimed[rank], positions)}, the layout "
                f"{case.layout!r} is documented to give it {_differing(positions, claimed[rank])}"
            )
    return None


def _differing(positions: torch.Tensor, others: torch.Tensor) -> str:
    """Of the first of two ranks' tokens: where they differ first."""
    if len(positions) != len(others):
        return f"{len(positions)} tokens"
    index = int((positions != others).nonzero()[0])
    return f"token {int(positions[index])} at index {index}"


class RankError(Exception):
    """A rank raised or died; the message names it and holds its traceback."""


def run_launched(work: Work, env: TorchrunEnv, cuda: bool, progress: Progress) -> Any:
    """Run ``work`` in this process, one of a launcher's ranks: NCCL on a GPU, or gloo."""
    device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=_TIMEOUT)
    result = work(env, device, progress)
    dist.barrier(device_ids=[env.local_rank] if cuda else None)
    dist.destroy_process_group()  # not after an error: it would wait for the other ranks
    return result


def run_forked(work: Work, world: int, progress: Progress) -> Any:
    """Fork gloo ranks on the CPUs, with this process's imports; returns rank 0's result.

    Raises:
        RankError: a rank raised or died, the first one; the others have a moment to fail.
    """
    importlib.import_module("ds_usp.attention.functional")  # else each rank would, for a second
    with tempfile.TemporaryDirectory(prefix="ds_usp_ranks_") as folder:
        arguments = work, world, folder, progress
        ranks = multiprocessing.start_processes(
            _forked, arguments, world, join=False, daemon=True, start_method="fork"
        )
        try:
            while not ranks.join(grace_period=_SHUTDOWN_TIMEOUT_S):
                pass
        except multiprocessing.ProcessRaisedException as error:
            trace = error.msg.partition("following error:\n")[2]
            raise RankError(f"rank {error.error_index} failed:\n{trace}") from None
        except multiprocessing.ProcessExitedException as error:
            raise RankError(f"rank {error.error_index} failed:\n{error.msg}") from None
        return pickle.loads(Path(folder, "result").read_bytes())


def _forked(rank: int, work: Work, world: int, folder: str, progress: Progress) -> None:
    """A forked CPU rank: joins a gloo group, runs ``work``, and writes rank 0's result."""
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=_TIMEOUT
    )
    result = work(TorchrunEnv(rank, world, rank, world), torch.device("cpu"), progress)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.barrier()
