"""USP attention on GPUs: NCCL, one process a GPU, torch's flash kernel, against the fp64 oracle.

The tolerance is the kernel's own: at most 1.5 x the error of the same kernel run dense.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import joint_attention_cases
import pytest
import torch
import torch.distributed as dist
from cases import ALL_LAYOUTS, RESULTS, TOKEN_DIM, Case
from gpu_ranks import EVERY_WORLD, run_on_gpus
from joint_attention_cases import Joint

import ds_usp
from ds_usp import Tuning
from ds_usp.attention import tuning
from ds_usp.attention.tuning import AUTO_TUNING
from ds_usp.kernels.registry import KERNELS as TABLE
from ds_usp.kernels.registry import _load, available_kernels, unusable_reason
from ds_usp.testing import relative_error

LOW = Case(dtype=torch.bfloat16, seq_len=512, heads=8, kv_heads=8, head_dim=64, batch=1)
CAPS = {row.name: kernel.caps for row in available_kernels("cuda") for kernel in _load(row)[:1]}
KERNELS = list(CAPS)
ABSENT = [
    pytest.param(row.name, marks=pytest.mark.skip(reason=f"the kernel {row.name}: {reason}"))
    for row in TABLE
    if (reason := unusable_reason(row, "cuda"))
]
WINDOWED = [name for name, caps in CAPS.items() if caps.tiles.window]
CAPPED = [name for name, caps in CAPS.items() if caps.softcap]
WIDE = [name for name, caps in CAPS.items() if (caps.head_dims.limit or 192) >= 192]
LIMITED = ("out", "dq", "dk", "dv")
# Long enough that the CPU runs ahead of the GPU: a missing wait shows.
LONG = replace(LOW, seq_len=6144, head_dim=128, kernel="cudnn")
TUNINGS = [
    Tuning(chunks, gather, copies)
    for chunks in (1, 2)
    for gather in (False, True)
    for copies in (False, "auto")
]
# Documents of one token, of a block's length and about it, and one that is on all ranks.
PACKED = replace(
    LOW, seq_len=1034, kv_heads=4, documents=((1, 7, 128, 600, 1, 129, 127, 41),), head_dim=128
)
# One as long as all others, branches of one token and of a block's length, padding.
TREE = replace(
    LOW,
    seq_len=1034,
    kv_heads=4,
    head_dim=128,
    tree=(
        (
            (0, 500, None),
            (500, 628, 0),
            (628, 629, 0),
            (629, 800, 0),
            (800, 900, 3),
            (900, 1000, 3),
            (1000, 1034, None),
        ),
    ),
)
# Inside of documents, next to each other, of one token and longer than a window.
BLOCKS = (((2, 8), (136, 400), (400, 401), (500, 730), (740, 860)),)
CASES = [
    *(replace(LONG, tuning=how, seed=seed) for how in TUNINGS for seed in (0, 1)),
    replace(LONG, tuning=Tuning(1, True), seq_len=6142, kv_heads=4),
    *(replace(LONG, layout=layout, seq_len=6141, kv_heads=4) for layout in ALL_LAYOUTS),
    replace(LONG, layout="context_parallel", tuning=Tuning(2, True), seq_len=6143, seed=1),
    *(replace(LOW, layout=layout) for layout in ALL_LAYOUTS),
    *(replace(LOW, mask=mask) for mask in ("full", "window", "window both sides")),
    replace(LOW, kv_heads=2, head_dim=128),
    replace(LOW, kv_heads=1, seq_len=517),
    replace(LOW, heads=6, kv_heads=2, head_dim=80, batch=2),
    replace(LOW, dtype=torch.float16),
    replace(LOW, dtype=torch.float32, seq_len=131),
    *(replace(LOW, kernel=kernel) for kernel in KERNELS),
    *(replace(LOW, kernel=kernel, mask="full", kv_heads=2, head_dim=128) for kernel in KERNELS),
    *(replace(LOW, kernel=kernel, seq_len=517, kv_heads=1, batch=2) for kernel in KERNELS),
    *(
        replace(PACKED, kernel=kernel, layout=layout)
        for kernel in ("auto", *KERNELS)
        for layout in (*ALL_LAYOUTS, "balanced")
    ),
    *(replace(PACKED, kernel=kernel, mask="full", batch=2) for kernel in KERNELS),
    *(
        replace(PACKED, kernel=kernel, batch=2, documents=(*PACKED.documents, (517, 517)))
        for kernel in KERNELS
    ),
    *(replace(PACKED, kernel=kernel, mask="window") for kernel in WINDOWED),
    *(
        replace(TREE, kernel=kernel, layout=layout)
        for kernel in ("auto", *KERNELS)
        for layout in (*ALL_LAYOUTS, "balanced")
    ),
    replace(TREE, tuning=Tuning(2, True), heads=8, kv_heads=8, sinks=True),
    replace(TREE, dtype=torch.float32, batch=2, tree=(*TREE.tree, ((0, 34, None), (34, 1034, 0)))),
    replace(PACKED, tuning=Tuning(2, True), heads=8, kv_heads=8),
    replace(PACKED, dtype=torch.float32),
    *(replace(LOW, kernel=kernel, sinks=True, kv_heads=2) for kernel in KERNELS),
    *(replace(PACKED, kernel=kernel, sinks=True) for kernel in KERNELS),
    *(replace(LOW, kernel=kernel, head_dim=128, value_dim=64) for kernel in KERNELS),
    *(replace(LOW, kernel=kernel, head_dim=192, value_dim=128) for kernel in ("auto", *WIDE)),
    *(replace(PACKED, kernel=kernel, head_dim=192, value_dim=128) for kernel in WIDE),
    *(replace(LOW, kernel=kernel, softcap=3.0) for kernel in ("auto", *CAPPED)),
    *(replace(PACKED, kernel=kernel, softcap=3.0) for kernel in CAPPED),
    *(
        replace(PACKED, kernel=kernel, mask=mask, blocks=BLOCKS)
        for kernel in ("auto", *WINDOWED)
        for mask in ("causal", "window")
    ),
    *(replace(LOW, kernel=kernel, prefix=200) for kernel in KERNELS),
    *(replace(LOW, kernel=kernel, mask="full", keys=(301, "zigzag")) for kernel in KERNELS),
    replace(LOW, dtype=torch.float32, seq_len=131, sinks=True, value_dim=24, softcap=3.0),
    replace(LOW, tuning=Tuning(2, True), sinks=True, value_dim=128),
]


def attend(mesh: ds_usp.SequenceMesh, case: Case) -> dict[str, torch.Tensor]:
    """This rank's shard of the results, computed on its GPU."""
    return cases.attend(mesh, case, "cuda")


def errors(full: dict[str, torch.Tensor], case: Case) -> dict[str, float]:
    """Against the oracle in fp64 on the GPU, whose results are the same for every kernel."""
    true = cases.reference(replace(case, tuning=AUTO_TUNING, kernel="auto"), "cuda")
    return {name: relative_error(full[name].cuda(), true[name]) for name in true}


def rank_main(rank: int, world: int, folder: str, kernel: str) -> None:
    results: dict[tuple[int, str], dict[str, float]] = {}
    for ulysses in (u for u in (1, 2, 4) if world % u == 0):
        mesh = ds_usp.SequenceMesh.from_group(None, ulysses)
        for case in (case for case in CASES if case.kernel == kernel):
            layout, kv_layout = cases.layouts(mesh, case)
            places = dict.fromkeys(RESULTS, layout) | {"dk": kv_layout, "dv": kv_layout}
            parts: list[Any] = [None] * world
            mesh.plans.clear()
            # These sizes keep no GPU busy. With seed 0 they are computed as larger ones are.
            with mock.patch.object(tuning, "is_launch_bound", lambda _, case=case: case.seed > 0):
                local_qkv = {name: x.detach().cpu() for name, x in attend(mesh, case).items()}
            dist.all_gather_object(parts, local_qkv)
            unsharded = {
                name: places[name].gather([part[name] for part in parts], TOKEN_DIM[name])
                if name in places
                else part  # the gradient of the sinks, whole on each rank
                for name, part in local_qkv.items()
            }
            if rank == 0:
                results[ulysses, str(case)] = errors(unsharded, case)
    if rank == 0:
        torch.save(results, Path(folder, "results.pt"))


@pytest.mark.several_gpus
@pytest.mark.parametrize("kernel", ["auto", *KERNELS, *ABSENT])
@pytest.mark.parametrize("world", EVERY_WORLD)
def test_equals_the_oracle_as_well_as_the_dense_kernel(world, kernel, tmp_path):
    run_on_gpus(rank_main, world, str(tmp_path), kernel)
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    for (ulysses, name), worst in results.items():
        case = next(case for case in CASES if str(case) == name)
        dense = errors(attend(ds_usp.SequenceMesh.single(), case), case)
        shown = f"ulysses {ulysses} x ring {world // ulysses} {name}: {worst}, dense {dense}"
        if case.dtype == torch.float32:
            assert max(worst.values()) <= 1e-5, shown
            continue
        assert worst["lse"] <= 1e-5, shown
        assert all(worst[each] <= 1.5 * dense[each] for each in LIMITED), shown
        # A few numbers, whose errors scatter.
        assert worst.get("dsinks", 0.0) <= 2e-2, shown


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_gpu_is_as_exact_as_its_dtype(case):
    worst = errors(attend(ds_usp.SequenceMesh.single(), case), case)
    limit = 1e-5 if case.dtype == torch.float32 else 2e-2
    assert max(worst.values()) <= limit, worst


def joint_main(rank: int, world: int, folder: str) -> None:
    errors_of_cases = [
        joint_attention_cases.errors(
            world, case, ds_usp.SequenceMesh.from_group(None, ulysses), "cuda"
        )
        for ulysses in (1, 2)
        if world % ulysses == 0
        for case in (Joint(), Joint(front=False, mask=ds_usp.MaskSpec.causal(), sinks=True))
    ]
    torch.save(errors_of_cases, Path(folder, f"{rank}.pt"))


@pytest.mark.several_gpus
@pytest.mark.parametrize("world", EVERY_WORLD)
def test_joint_tokens_equal_the_oracle(world, tmp_path):
    run_on_gpus(joint_main, world, str(tmp_path))
    for rank in range(world):
        for worst in torch.load(tmp_path / f"{rank}.pt", weights_only=False):
            assert max(worst.values()) <= 1e-5, worst
