"""``ds-usp verify``: attention as the user configures it, here, against a dense reference.

A result is exact if its relative error is within the limit of its dtype: an absolute one in fp64
and fp32; in bf16 and fp16 a multiple of the error of the same kernel run dense on one device,
which itself must be a rounding error. Flags are read first; :func:`run_cases` is collective.
"""

from __future__ import annotations

import importlib
import math
import tempfile
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import multiprocessing

import ds_usp
from ds_usp import testing as oracle
from ds_usp._version import __version__
from ds_usp.config import TorchrunEnv, environment, free_memory, torchrun_env
from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import Degrees, divisors
from ds_usp.geometry.layout import KINDS
from ds_usp.planner.arguments import OneLineParser, lengths, positive, tokens
from ds_usp.planner.search import GIB

EXACT, WRONG, REFUSED = 0, 1, 2
_VERDICTS = ("exact", "WRONG", "refused")
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
_ABSOLUTE: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-5}
_MAX_RATIO = 1.5
_LSE_LIMIT = 1e-5  # kernels compute and return it in fp32, whatever the dtype
# Limit of the error of the kernel alone, in epsilons of its dtype: more is no rounding. A soft cap
# may use the GPU's tanh, which is exact to 2**-11 of the cap.
_MAX_KERNEL_EPS, _TANH = 8.0, 2.0**-11
# An error of one rounding of the result (eps / 2) is exact, however exact the kernel alone is; over
# few elements, where a ratio is noise, so are a few roundings (partial sums of ranks).
_ROUNDING_EPS, _FEW_ROUNDINGS_EPS, _FEW_ELEMENTS = 0.5, 4.0, 4096
# Gradients of a query that sees one key are 0: they are compared with a fraction of dout then.
_FEW_KEYS, _MIN_FRACTION_OF_DOUT = 16, 0.05
_ROW_DIM: Mapping[str, int] = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}
_MAX_FORKED = 16  # ranks on CPUs: more take long and test nothing else
_TIMEOUT = timedelta(seconds=300)  # of one collective, on a loaded machine
_BLOCK_ELEMENTS: Mapping[str, int] = {"cpu": 1 << 22, "cuda": 1 << 25}  # scores of the oracle
_BLOCK_COPIES = 12  # of a block's scores that are in memory at once
# Beside tensors: libraries and buffers of a rank, measured on CPUs; a CUDA context and NCCL.
_CPU_RANK_BYTES, _GPU_RANK_HOST_BYTES = 2**28, 3 * 2**30
_FAILED = multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException
_DEGREES: Mapping[str, str] = MappingProxyType(
    {"sp": "the {} ranks that torchrun started", "ulysses": "--ulysses", "ring": "--ring"}
)


@dataclass(frozen=True)
class VerifyCase:
    """One call, forward and backward, on one mesh; see the flags for what the fields mean."""

    ulysses: int = 2
    ring: int = 2
    batch: int = 1
    seq_len: int = 1024
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "fp32"
    layout: str = "zigzag"
    mask: tuple[int | None, int | None] = (None, 0)  # keys on the left and right; None: all
    documents: tuple[int, ...] = ()  # their lengths, in every sample
    softcap: float | None = None
    sinks: bool = False
    kernel: str = "auto"
    backward: bool = True
    seed: int = 0

    def __str__(self) -> str:
        return f"ulysses {self.ulysses} x ring {self.ring}, {self.layout}, {self.mask_spec()}"

    @property
    def sizes(self) -> str:
        """Return what the cases of a command have in common, as text."""
        heads = f"{self.heads} heads ({self.kv_heads} kv) of {self.head_dim}"
        return f"{self.batch} x {self.seq_len} tokens, {heads}, {self.dtype}, kernel {self.kernel}"

    @property
    def borders(self) -> tuple[int, ...]:
        """Cumulative borders of the documents, as the package takes them."""
        return (0, *accumulate(self.documents)) if self.documents else ()

    def mask_spec(self) -> ds_usp.MaskSpec:
        """The mask as the package takes it."""
        return ds_usp.MaskSpec(*self.mask, (self.borders,) if self.borders else ())

    def allowed(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The mask as the oracle takes it, ``[1, rows, S]``."""
        allowed = oracle.window(query, key, *self.mask)
        if self.documents:
            allowed = allowed & oracle.same_document(query, key, self.documents)
        return allowed[None]


class TensorErrors(NamedTuple):
    """One result's relative errors: over the ranks, and of the same kernel run dense alone."""

    name: str  # out, lse, dq, dk, dv or dsinks
    error: float
    kernel_error: float


def main(argv: Sequence[str], print_line: Callable[[str], None]) -> int:
    """Run ``ds-usp verify``; rank 0 alone prints.

    Returns:
        0 if all results are exact, 1 if one is wrong or a rank failed, 2 if a call was refused.

    Raises:
        ConfigError: arguments that cannot be run.
    """
    args = build_parser().parse(argv)
    env = torchrun_env()
    started = "RANK" in environment(("RANK",))  # by torchrun: all ranks run this, else one forks
    gpus = torch.cuda.device_count() if started else 0
    if 0 < gpus < env.local_world:
        raise ConfigError(
            f"torchrun started {env.local_world} ranks here, and there are {gpus} GPUs: start at "
            "most as many, or hide them (CUDA_VISIBLE_DEVICES=) to use CPUs"
        )
    cases = cases_of(args, env.world if started else None, gpus > 0)
    ranks = env.local_world if started else cases[0].ulysses * cases[0].ring
    check_memory(cases[0], ranks, gpus > 0, free_memory())
    work = partial(run_cases, cases, print_line=print_line)
    try:
        return run_launched(work, env, gpus > 0) if started else run_forked(work, ranks)
    except _FAILED as error:  # of the first rank that did
        print_line(f"WRONG: rank {error.error_index} failed:\n{error.msg}")
        return WRONG


# ------------------------------------------------------------------ flags


def build_parser() -> OneLineParser:
    """The command line of ``ds-usp verify``."""
    text = (
        "Runs attention over ranks, forward and backward, and compares every result with dense "
        "attention in fp64. Started plainly it forks ranks on the CPUs (gloo); under torchrun it "
        "runs on the ranks of the launch, one GPU each (NCCL). Without --ulysses and --ring, on "
        "each ulysses x ring of the ranks; without any flag also over layouts and masks. Exit "
        "code: 0 exact, 1 wrong, 2 refused."
    )
    # Flags that are left out are not in the namespace: the defaults are VerifyCase's.
    parser = OneLineParser(
        prog="ds-usp verify", description=text, allow_abbrev=False, argument_default=SUPPRESS
    )
    add = parser.add_argument
    add("--ulysses", type=positive, help="ranks that exchange heads (default: each that divides)")
    add("--ring", type=positive, help="ranks of a ring (default: what --ulysses leaves, or 1)")
    add("--heads", type=positive, help="query heads (default: 8)")
    add("--kv-heads", type=positive, help="key/value heads (default: as many as query heads)")
    add("--head-dim", type=positive, help="default: 64")
    add("--batch", type=positive, help="samples (default: 1)")
    length = "tokens: 4096, 4K, 1M (default: 1K, or the sum of --documents)"
    add("--seq-len", type=tokens, help=length)
    add("--dtype", choices=_DTYPES, help="default: fp32 on CPUs, bf16 on GPUs")
    add("--layout", choices=KINDS, help="which rank holds which token (default: zigzag)")
    add("--mask", choices=("causal", "full"), help="default: causal")
    add("--window", type=tokens, help="tokens on the left that a token sees (default: all)")
    add("--documents", type=lengths, help="lengths of packed documents (default: one document)")
    add("--softcap", type=float, help="of the scores (default: none)")
    add("--sinks", action="store_true", help="a trainable attention sink for each head")
    add("--kernel", help="name of a kernel, `ds-usp env` lists them (default: auto)")
    add("--forward-only", action="store_false", dest="backward", help="no gradients")
    add("--seed", type=int, help="of the random tensors (default: 0)")
    return parser


def cases_of(args: Namespace, world: int | None, gpu: bool) -> list[VerifyCase]:
    """The configuration of the flags on each split of the ranks, or the sweep if they give none;
    ConfigError for degrees that do not make the ranks, and documents of another length.

    Args:
        world: ranks that torchrun started, each of which asks; None: as many as needed are forked.
        gpu: ranks have GPUs, whose defaults are larger.
    """
    flags = dict(vars(args))
    if flags.keys() & {"mask", "window"}:
        flags["mask"] = flags.pop("window", None), None if flags.get("mask") == "full" else 0
    ulysses, ring = flags.pop("ulysses", None), flags.pop("ring", None)
    if world is None:
        world = (ulysses or 1) * (ring or 1) if ulysses or ring else 4
        ulysses, ring = (ulysses or 1, ring or 1) if ulysses or ring else (None, None)
        if world > _MAX_FORKED:
            raise ConfigError(
                f"--ulysses {ulysses} x --ring {ring} = {world} ranks; a plain start forks at most "
                f"{_MAX_FORKED}. Start {world} with torchrun, or use smaller degrees"
            )
    Degrees(sp=world, ulysses=ulysses, ring=ring).check(_DEGREES)
    ulysses = world // ring if ring else ulysses
    is_sweep = not flags.keys() - {"seed"} and ulysses is None
    if is_sweep:  # a length that does not divide
        heads = max(8, world) if gpu else 8
        flags |= {"heads": heads, "kv_heads": heads // 4 if heads % (heads // 4) == 0 else heads}
        flags |= {"seq_len": 4100, "head_dim": 128} if gpu else {"seq_len": 130, "head_dim": 16}
    documents = flags.get("documents", ())
    defaults = {
        "dtype": "bf16" if gpu else "fp32",
        "kv_heads": flags.get("heads", VerifyCase.heads),
        "seq_len": sum(documents) if documents else VerifyCase.seq_len,
    }
    case = VerifyCase(**{**defaults, **flags})
    if documents and sum(documents) != case.seq_len:
        raise ConfigError(
            f"--documents {','.join(map(str, documents))} are {sum(documents)} tokens, --seq-len "
            f"is {case.seq_len}: make them equal"
        )
    splits = [ulysses] if ulysses else [x for x in divisors(world) if x <= case.heads]
    cases = [replace(case, ulysses=x, ring=world // x) for x in splits]
    masks = (None, 0), (None, None), (1000 if gpu else 37, 0)
    layouts = ("contiguous", "zigzag") if is_sweep else ()
    return [replace(x, layout=y, mask=z) for x in cases for y in layouts for z in masks] or cases


def check_memory(case: VerifyCase, local_ranks: int, gpu: bool, free: float) -> None:
    """ConfigError for a case that takes more host memory than is ``free``, in bytes. Every rank has
    whole tensors. GPU memory is not checked: without enough torch raises, and nothing else ends."""
    # 1 to 1.3 times what was measured on CPUs at 2K and 4K tokens.
    size = _DTYPES[case.dtype].itemsize
    query = case.batch * case.seq_len * case.heads * case.head_dim
    inputs = 2 * query + 2 * query * case.kv_heads // case.heads  # dout too
    results = inputs if case.backward else query
    dense = 2.0 * inputs * size
    if case.kernel == "eager":  # scores, and their exponentials
        dense += 2.5 * case.batch * case.heads * case.seq_len**2 * max(size, 4)
    # In fp64, half of it again while it is reduced; and the blocks' scores.
    reference = 12.0 * results + _BLOCK_COPIES * 8 * _BLOCK_ELEMENTS["cpu"]
    on_cpu = _CPU_RANK_BYTES + inputs * size + max(dense, results * size + reference)
    needed = _GPU_RANK_HOST_BYTES + inputs * max(size, 4) if gpu else on_cpu
    if local_ranks * needed > free:
        raise ConfigError(
            f"{local_ranks} ranks x {needed / GIB:.1f} GiB = {local_ranks * needed / GIB:.1f} GiB "
            f"of host memory, of which {free / GIB:.1f} GiB are free: every rank keeps the whole "
            f"tensors of {case.sizes}. Use a smaller --seq-len, fewer --heads or fewer ranks"
        )


# ------------------------------------------------------------------ verdicts


def limit(case: VerifyCase, measured: TensorErrors) -> float:
    """The largest error of a result that is exact (see the module's docstring)."""
    if case.dtype in _ABSOLUTE:
        return _ABSOLUTE[case.dtype]
    eps = torch.finfo(_DTYPES[case.dtype]).eps
    if not measured.kernel_error <= _MAX_KERNEL_EPS * eps + _TANH * (case.softcap or 0.0):
        return 1e-30  # the kernel alone is wrong: no error is within this
    elements = case.batch * case.seq_len * case.kv_heads * case.head_dim
    has_few = measured.name == "dsinks" or elements // (case.ulysses * case.ring) < _FEW_ELEMENTS
    rounding = eps * (_FEW_ROUNDINGS_EPS if has_few else _ROUNDING_EPS)
    least = _LSE_LIMIT if measured.name == "lse" else rounding
    return max(least, _MAX_RATIO * measured.kernel_error)


def judge(case: VerifyCase, errors: Sequence[TensorErrors], refusal: str = "") -> tuple[int, str]:
    """EXACT, WRONG or REFUSED, and the lines that say so: the largest error; of a call that is
    wrong the errors of all its results."""
    wrong = [x for x in errors if not x.error <= limit(case, x)]
    code = REFUSED if refusal else WRONG if wrong else EXACT
    lines = [f"  {case!s:44}  {_VERDICTS[code]}"]
    if refusal:
        return code, f"{lines[0]}\n    {refusal}"
    worst = max(errors, key=lambda x: x.error)
    lines[0] += f"  largest error {worst.error:.2e} ({worst.name})"
    for x in errors if wrong else ():
        alone, verdict = f"kernel alone {x.kernel_error:.2e}", "  WRONG" if x in wrong else ""
        lines.append(f"    {x.name:8}{x.error:.2e}, {alone}, limit {limit(case, x):.2e}{verdict}")
    return code, "\n".join(lines)


# ------------------------------------------------------------------ what every rank runs


def run_cases(
    cases: list[VerifyCase],
    env: TorchrunEnv,
    device: torch.device,
    print_line: Callable[[str], None],
) -> int:
    """Run the cases one after the other, and print what came of each; returns the exit code.
    Collective over the default group."""
    tensors = _tensors(cases[0], device)  # which all of them share
    references: dict[Any, dict[str, torch.Tensor]] = {}  # by mask
    single = ds_usp.SequenceMesh.single()
    meshes = {} if dist.is_initialized() else {1: single}  # by Ulysses degree
    codes = []
    if env.rank == 0:
        machine = f"NCCL on {torch.cuda.get_device_name()}" if device.type == "cuda" else "CPUs"
        print_line(f"ds-usp {__version__}, {env.world} ranks, {machine}\n{cases[0].sizes}")
    for case in cases:
        errors: list[TensorErrors] = []
        refusal = ""
        try:
            if case.ulysses not in meshes:
                meshes[case.ulysses] = ds_usp.SequenceMesh.from_group(None, case.ulysses)
            mesh = meshes[case.ulysses]
            documents = case.borders if case.layout == "balanced" else ()
            layout = mesh.layout(case.layout, case.seq_len, documents)
            results = _attend(mesh, layout, case, tensors)
            dense = _attend(single, single.layout("contiguous", case.seq_len), case, tensors)
        except ds_usp.USPError as error:
            refusal = f"{type(error).__name__}: {error}"
        refusal = next(filter(None, _all_gather(refusal, env)), "")
        if not refusal:
            if case.mask not in references:
                references[case.mask] = oracle.attention_in_blocks(
                    tensors,
                    case.allowed,
                    softcap=case.softcap,
                    backward=case.backward,
                    block_elements=_BLOCK_ELEMENTS[device.type],
                    rank=env.rank,
                    world=env.world,
                )
            rows = torch.as_tensor(layout.positions(mesh.rank), device=device)
            measured = _errors(case, results, dense, references[case.mask], tensors, rows)
            by_result = zip(*_all_gather(measured, env), strict=True)  # of each all ranks' errors
            errors = [max(x, key=lambda y: y.error / limit(case, y)) for x in by_result]
        code, text = judge(case, errors, refusal)
        codes.append(code)
        if env.rank == 0:
            print_line(text)
    worst = WRONG if WRONG in codes else max(codes)
    if env.rank == 0:
        counts = ", ".join(f"{codes.count(i)} {name}" for i, name in enumerate(_VERDICTS))
        print_line(f"\n{_VERDICTS[worst].upper()} ({counts})")
    return worst


def _all_gather(value: Any, env: TorchrunEnv) -> list[Any]:
    values: list[Any] = [value] * env.world
    if env.world > 1:
        dist.all_gather_object(values, value)
    return values


def _tensors(case: VerifyCase, device: torch.device) -> oracle.Tensors:
    """Global tensors, drawn on the CPU so that they are the same on every rank and device."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = _DTYPES[case.dtype]
    draw_dtype = torch.promote_types(dtype, torch.float32)
    q, k, v, dout = (
        torch.randn(
            *(case.batch, case.seq_len, heads, case.head_dim), generator=generator, dtype=draw_dtype
        ).to(device, dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    heads = torch.arange(1, case.heads + 1, device=device, dtype=draw_dtype)
    sinks = 6.0 * heads / case.heads - 2.0
    return oracle.Tensors(q, k, v, dout, sinks=sinks if case.sinks else None)


def _attend(
    mesh: ds_usp.SequenceMesh, layout: ds_usp.TokenLayout, case: VerifyCase, tensors: oracle.Tensors
) -> dict[str, torch.Tensor]:
    """This rank's results of the call under test, and the full gradient of the sinks."""
    inputs = [layout.shard(x, 1, mesh.rank) for x in (tensors.q, tensors.k, tensors.v)]
    dout = layout.shard(tensors.dout, 1, mesh.rank)
    inputs += [] if tensors.sinks is None else [tensors.sinks.detach().clone()]
    for x in inputs:
        x.requires_grad_(case.backward)
    out, lse = ds_usp.usp_attention(
        *inputs[:3],
        mesh=mesh,
        layout=layout,
        mask=case.mask_spec(),
        kernel=case.kernel,
        return_lse=True,
        scores=ds_usp.Scores(softcap=case.softcap, sinks=inputs[3] if case.sinks else None),
    )
    results = {"out": out.detach(), "lse": lse}
    if case.backward:
        grads = list(torch.autograd.grad(out, inputs, dout))
        if case.sinks and mesh.sp_degree > 1:  # a rank's gradient is of its own tokens
            dist.all_reduce(grads[3], group=mesh.sp_group)
        results |= dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False))
    return results


def _errors(
    case: VerifyCase,
    results: dict[str, torch.Tensor],
    dense: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    tensors: oracle.Tensors,
    rows: torch.Tensor,
) -> list[TensorErrors]:
    """Each result's relative error on this rank's shard, and that of the kernel run dense there.
    ``results`` are of the shard, whose positions are ``rows``; all others are of whole tensors."""
    # dq and dk of queries that see one key are 0, and nearly so with few keys: their errors are
    # relative to a fraction of dout then. The first token of a causal document sees itself alone,
    # and may be the only one of a rank.
    fewest_keys = min(len(rows), *case.documents, _FEW_KEYS)
    left, right = case.mask
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
        error, error_alone = (
            oracle.relative_error(x, expected, least) if x.shape == expected.shape else math.inf
            for x in (result, alone)
        )
        errors.append(TensorErrors(name, error, error_alone))
    return errors


def run_launched(work: Callable[..., Any], env: TorchrunEnv, cuda: bool) -> Any:
    """Return ``work(env, device)`` of this process, a launcher's rank: NCCL on a GPU, or gloo."""
    device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=_TIMEOUT)
    result = work(env, device)
    dist.barrier(device_ids=[env.local_rank] if cuda else None)
    dist.destroy_process_group()  # not after an error: it would wait for the other ranks
    return result


def run_forked(work: Callable[..., Any], world: int) -> Any:
    """Fork gloo ranks on the CPUs, with this process's imports; returns rank 0's result.

    Raises:
        ProcessRaisedException, ProcessExitedException: of the first rank that raised or died.
    """
    importlib.import_module("ds_usp.attention.functional")  # else each rank would, for a second
    result = multiprocessing.get_context("fork").SimpleQueue()
    with tempfile.NamedTemporaryFile(prefix="ds_usp_ranks_") as store:
        arguments = work, world, store.name, result
        multiprocessing.start_processes(_forked, arguments, world, daemon=True, start_method="fork")
    return result.get()


def _forked(rank: int, work: Callable[..., Any], world: int, store: str, result: Any) -> None:
    """A forked CPU rank: joins a gloo group, runs ``work``, and sends rank 0's result."""
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=_TIMEOUT
    )
    value = work(TorchrunEnv(rank, world, rank, world), torch.device("cpu"))
    if rank == 0:
        result.put(value)
    dist.barrier()
