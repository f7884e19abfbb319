"""An edited function of the checkout changes a sequence-parallel run, or the edit is refused."""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mds_edits import MARK
from mds_runs import HERE, TrainingServer, flags

import megatron_patches
from ds_usp.errors import PatchError
from megatron_patches.megatron_deepspeed import bypassed
from megatron_patches.megatron_deepspeed.startup import FRAMEWORK

SHORT = "--train-iters 2 --micro-batch-size 1 --data-cache-path {folder}"
SP2 = {"sp": 2, "u": 1}
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
# Name: flags of both runs, stock ranks and degrees, patched ranks and degrees, patched flags.
PAIRS: dict[str, tuple[str, tuple[int, dict[str, Any]], tuple[int, dict[str, Any]], str]] = {
    "gpt": ("--hidden-dropout 0.1", (1, {}), (2, SP2), ""),
    "ulysses": ("", (1, {}), (2, {"sp": 2, "u": 2}), ""),
    "rope": ("--use-rotary-position-embeddings", (1, {}), (2, SP2), ""),
    "rope, one rank": ("--use-rotary-position-embeddings", (1, {}), (1, {}), ""),
    "gqa": ("--num-key-value-heads 2", (1, {}), (2, SP2), ""),
    "swiglu": ("--swiglu --normalization rmsnorm --disable-bias-linear", (1, {}), (2, SP2), ""),
    "untied": ("--untie-embeddings-and-output-weights", (1, {}), (2, SP2), ""),
    "documents": (DOCUMENTS, (1, {}), (2, SP2), ""),
    "selective": ("--recompute-granularity selective", (1, {}), (2, SP2), ""),
    "flash": ("--bf16 --use-flash-attn-v2", (1, {}), (2, SP2), ""),
    "ZeRO-3": ("", (1, {"zero": 3}), (2, {**SP2, "zero": 3}), ""),
    "tp": ("", (2, {"tp": 2}), (4, {**SP2, "tp": 2}), ""),
    "pp": ("", (2, {"pp": 2, "zero": 1}), (4, {**SP2, "pp": 2, "zero": 1}), ""),
    "pipe, rope": (
        "--use-rotary-position-embeddings", (1, {"pipe": True}), (2, {**SP2, "pipe": True}), "",
    ),
    "stock Ulysses": ("", (2, {"sp": 2}), (2, SP2), ""),
    "chunks": ("", (1, {}), (2, SP2), "--usp-loss-chunks 4"),
    "gemm-last": ("", (1, {}), (2, SP2), "--usp-recompute gemm-last"),
    "attention": ("", (1, {}), (2, SP2), "--usp-recompute attention"),
    "full": ("", (1, {}), (2, SP2), "--usp-recompute full"),
    "offload": ("", (1, {}), (2, SP2), "--usp-offload-ratio 0.5"),
    "projections": ("", (1, {}), (2, SP2), "--usp-projection-overlap recompute"),
}  # fmt: skip
_TRACKER = "megatron.core.tensor_parallel.random:CudaRNGStatesTracker"
_CHECKPOINT = "megatron.core.tensor_parallel.random:CheckpointFunction"
# Lines that the stock run executes and the patched run does not, although an edit has an effect.
NOT_DROPPED = {
    "megatron.core.parallel_state:get_tensor_model_parallel_src_rank": "broadcasts over sequences",
    "megatron.core.tensor_parallel.data:broadcast_data": "broadcasts over sequences",
    "megatron.training:build_train_valid_test_data_loaders": "its first sequence rank reads",
    "megatron.core.parallel_state:get_sequence_parallel_rank": "one rank has no part to find",
    "megatron.model.transformer:ParallelMLP.__init__": "memory.run_mlp uses the layer",
    # --recompute-granularity selective computes scores again, which are never kept here.
    "megatron.core.tensor_parallel.random:checkpoint": "selective",
    f"{_CHECKPOINT}.forward": "selective",
    f"{_CHECKPOINT}.backward": "selective",
    f"{_TRACKER}.get_states": "selective",
    f"{_TRACKER}.set_states": "selective",
}


def skip(original: Any) -> None:
    """The index builder is compiled by the server."""


def own_part(original: Any, layer: Any, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """DeepSpeed's ``DistributedAttention.forward``, which fails on CPUs here."""
    return q.flatten(2)


def gather_flat(original: Any, out: torch.Tensor, given: torch.Tensor, **how: Any) -> Any:
    """Gloo wants tensors of equal ndim; Megatron-DeepSpeed's losses have another."""
    return original(out.flatten(), given.flatten(), **how)


STOCK = {
    "patched": False,
    "extra": (
        ("megatron.data.dataset_utils:compile_helper", skip),
        ("deepspeed.sequence.layer:DistributedAttention.forward", own_part),
        ("torch.distributed:all_gather_into_tensor", gather_flat),
    ),
}
Lines = dict[str, set[int]]


def traced(
    server: TrainingServer, run: tuple[int, dict[str, Any]], more: str, **options: Any
) -> Lines:
    world, degrees = run
    lines: Lines = {}
    for seen in server.attempt(world, flags(more=f"{SHORT} {more}", **degrees), **options):
        assert "refused" not in seen, seen["refused"]
        for name, reached in seen["lines"].items():
            lines.setdefault(name, set()).update(reached)
    return lines


@pytest.fixture(scope="module")
def traces(server: TrainingServer) -> dict[str, tuple[Lines, Lines]]:
    """Executed lines of the stock and of the patched run; of a failing one those before."""
    traces = {}
    for name, (more, stock, patched, added) in PAIRS.items():
        options = {"trace": True, "fake_flash": name == "flash"}
        traces[name] = (
            traced(server, stock, more, **options, **STOCK),
            traced(server, patched, f"{more} {added}", **options),
        )
    return traces


def compared() -> dict[str, str]:
    """Every function whose edit is refused, and the flag without which it is not.

    A row of a whole class stands for its methods.
    """
    patches = megatron_patches.patch_set(FRAMEWORK)
    known = {
        place.replace("__main__:", "pretrain_gpt:"): ""
        for patch in (*patches.patches, *patches.later)
        for place in (patch.target, *patch.also_in)
        if patch.guard.fingerprints
    }
    known |= {row.target.replace("__main__:", "pretrain_gpt:"): row.flag for row in bypassed.rows()}
    return known


def is_compared(name: str, added: str) -> bool:
    known = compared()
    rows = (known.get(row) for row in (name, name.rpartition(".")[0]))
    return any(flag is not None and (not flag or flag in added) for flag in rows)


@pytest.mark.parametrize("name", PAIRS)
def test_lines_that_a_patched_run_bypasses_are_compared(
    traces: dict[str, tuple[Lines, Lines]], name: str
) -> None:
    """Every line that the stock run executes, and constructors of classes whose methods it does not
    execute."""
    stock, patched = traces[name]
    assert len(stock) > 100 and len(patched) > 200
    bypassed = {
        function for function, lines in stock.items() if lines - patched.get(function, set())
    }
    idle = {function.rpartition(".")[0] for function in bypassed if function not in patched}
    bypassed |= {f"{made}.__init__" for made in idle if f"{made}.__init__" in stock}
    missing = [
        function
        for function in sorted(bypassed - set(NOT_DROPPED))
        if not is_compared(function, PAIRS[name][3])
    ]
    assert not missing, f"{name}: edits of these have no effect, and are not refused"


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_each_edit_is_obeyed_or_refused(
    server: TrainingServer, traces: dict[str, tuple[Lines, Lines]], name: str
) -> None:
    """Every function of the stock run in turn raises an error: it is raised, or refused."""
    earlier = list(itertools.takewhile(lambda each: each != name, PAIRS))
    done = set().union(*(traces[each][0] for each in earlier)) | set(NOT_DROPPED)
    more, _, (world, degrees), added = PAIRS[name]
    dropped = []
    for function in sorted(set(traces[name][0]) - done):
        if function.endswith(("<module>", ".__del__")):  # errors of __del__ reach nobody
            continue
        text = flags(more=f"{SHORT} {more} {added}", **degrees)
        ranks = server.attempt(world, text, edited=function, fake_flash=name == "flash")
        if not any(_answered(seen, function) for seen in ranks):
            dropped.append(function)
    assert not dropped


def _answered(seen: dict[str, Any], function: str) -> bool:
    if "refused" in seen:
        target = function.replace("pretrain_gpt:", "__main__:")
        names = (f"{target}: ", f"{target.rpartition('.')[0]}: ")
        return isinstance(seen["refused"], PatchError) and any(
            name in str(seen["refused"]) for name in names
        )
    return f"{MARK} {function}" in seen.get("traceback", "")


def test_an_edit_without_effect_is_refused_at_the_start(server: TrainingServer) -> None:
    text = flags(more=SHORT, **SP2, pp=2, zero=1)
    for seen in server.attempt(4, text, edited="pretrain_gpt:get_batch_pipe"):
        assert isinstance(seen["refused"], PatchError)
        assert not seen["groups"]
        assert "An edit has no effect" in str(seen["refused"])


@pytest.mark.parametrize(
    ("flag", "edited"),
    [
        ("--usp-loss-chunks 2", "megatron.model.language_model:parallel_lm_logits"),
        (
            "--usp-projection-overlap recompute",
            "megatron.core.tensor_parallel.layers:RowParallelLinear.forward",
        ),
    ],
)
def test_a_function_that_a_flag_bypasses_is_refused_with_the_flag(
    server: TrainingServer, flag: str, edited: str
) -> None:
    for seen in server.attempt(2, flags(more=SHORT, **SP2), edited=edited):
        assert f"{MARK} {edited}" in seen["traceback"]
    for seen in server.attempt(2, flags(more=f"{SHORT} {flag}", **SP2), edited=edited):
        assert f"{edited}: its source is another" in str(seen["refused"])
        assert not seen["groups"]


def test_the_commands_name_every_edited_function(checkout: Path, tmp_path: Path) -> None:
    """A copy with every compared function edited; then with comments and formatting only."""
    copy = tmp_path / "checkout"
    shutil.copytree(
        checkout, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns(".git", "*.pyc")
    )
    patches = megatron_patches.patch_set(FRAMEWORK).patches
    aliases = {alias for patch in patches for alias in patch.also_in}
    known = {
        name: flag
        for name, flag in compared().items()
        if name not in aliases and (copy / _file(name)).exists()
    }
    for name in known:
        file = copy / _file(name)
        text = file.read_text(encoding="utf-8")
        file.unlink()
        file.write_text(_with_a_line(text, name.partition(":")[2]), encoding="utf-8")
    checked = _command(copy, "megatron_patches", "--check")
    assert checked.returncode == 1
    for name, flag in known.items():
        assert (f"{name}: its source is another" in checked.stderr) == (not flag), name
    ran = _command(copy, "megatron_patches.run", str(copy / "pretrain_gpt.py"), "--seq-length", "9")
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert "megatron.model.gpt_model:CrossEntropy: its source is another" in ran.stderr
    assert "--usp-unchecked-host" in ran.stderr
    for file in {_file(name) for name in known}:
        text = (checkout / file).read_text(encoding="utf-8")
        (copy / file).write_text(f"# a comment\n\n{text}", encoding="utf-8")
    checked = _command(copy, "megatron_patches", "--check")
    assert checked.returncode == 0, checked.stderr
    always = sum(not row.flag for row in bypassed.rows())
    assert f"{always} functions that they bypass or rely on" in checked.stdout


def _file(name: str) -> str:
    return f"{name.partition(':')[0].replace('.', '/')}.py"


def _command(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "MEGATRON_DEEPSPEED_PATH": str(checkout),
        "PYTHONPATH": str(HERE.parents[1]),
    }
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def _with_a_line(text: str, path: str) -> str:
    """A file in which one function or class has one line more; its comments may be TorchScript's
    types."""
    node: Any = ast.parse(text)
    for part in path.split("."):
        node = next(x for x in node.body if getattr(x, "name", None) == part)
    last = node.body[-1]
    line = min(part.lineno for part in (last, *getattr(last, "decorator_list", ()))) - 1
    lines = text.splitlines()
    lines.insert(line, f"{' ' * last.col_offset}unused = 1")
    return "\n".join(lines)
