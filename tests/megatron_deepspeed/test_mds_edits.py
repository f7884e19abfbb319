"""Flags and edits of the checkout change a sequence-parallel run as one rank, or are refused."""

import ast
import hashlib
import importlib.util
import itertools
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkout_runs import losses_of, relative_difference
from mds_adapter import TrainingServer, flags
from mds_edits import MARK
from programs import python

import megatron_patches
from ds_usp.errors import ConfigError, LayoutError, PatchError
from megatron_patches.megatron_deepspeed import bypassed, speedups
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
def test_lines_that_a_patched_run_bypasses_are_compared(traces, name):
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
def test_each_edit_is_obeyed_or_refused(server, traces, name):
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


def test_an_edit_without_effect_is_refused_at_the_start(server):
    text = flags(more=SHORT, **SP2, pp=2, zero=1)
    for seen in server.attempt(4, text, edited="pretrain_gpt:get_batch_pipe"):
        assert isinstance(seen["refused"], PatchError)
        assert not seen["groups"]
        assert "An edit has no effect" in str(seen["refused"])


def test_a_function_that_a_flag_bypasses_is_refused_with_the_flag(server):
    flag, edited = "--usp-loss-chunks 2", "megatron.model.language_model:parallel_lm_logits"
    for seen in server.attempt(2, flags(more=SHORT, **SP2), edited=edited):
        assert f"{MARK} {edited}" in seen["traceback"]
    for seen in server.attempt(2, flags(more=f"{SHORT} {flag}", **SP2), edited=edited):
        assert f"{edited}: its source is another" in str(seen["refused"])
        assert not seen["groups"]


def test_the_commands_name_every_edited_function(checkout, tmp_path):
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
    settings = {"DS_ACCELERATOR": "cpu", "MEGATRON_DEEPSPEED_PATH": str(checkout)}
    return python("-m", *arguments, **settings)


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


# Of the names of all flags when they were last reviewed: each is refused (test_mds_edits.py),
# read by Megatron-DeepSpeed's own code, satisfied by usp_attention, or not read by pretrain_gpt.py.
REVIEWED = (316, "91d7a4637b02fc44")
FLAGS_SP2 = {"sp": 2, "u": 1, "zero": 1}
FLAGS_SHORT = "--train-iters 2 --micro-batch-size 1"
ROPE = "--use-rotary-position-embeddings"
# These change the loss, those below do not; on one rank as on two.
CHANGES = (
    "--eod-mask-loss",
    "--reset-position-ids",
    f"{ROPE} --rotary-percent 0.5",
    f"{ROPE} --rotary-position-embeddings-theta 500",
    "--layernorm-epsilon 0.1",
    "--kv-channels 16",
    "--openai-gelu",
    "--no-position-embedding",
    "--dataloader-type cyclic",
    "--clip-grad 0.5",
)
CHANGES_NOTHING = (
    "--attention-softmax-in-fp32",
    "--no-query-key-layer-scaling",
    "--create-moe-param-group",
    "--empty-unused-memory-level 2",
    "--recompute-granularity selective",
    "--memory-centric-tiled-linear --tile-factor 2",
)


def test_no_flag_is_new_since_the_last_review(checkout):
    tree = ast.parse((checkout / "megatron" / "arguments.py").read_text(encoding="utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    added = (call for call in calls if getattr(call.func, "attr", "") == "add_argument")
    names = sorted(x.value for call in added for x in call.args if isinstance(x, ast.Constant))
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
    assert (len(names), digest) == REVIEWED, "review the flags that differ from the last review"


@pytest.mark.parametrize("more", [*CHANGES, *CHANGES_NOTHING])
def test_a_flag_changes_two_ranks_as_one(server, more):
    plain, one = (
        losses_of(server.run(1, flags(zero=1, more=f"{FLAGS_SHORT} {arguments}")))
        for arguments in ("", more)
    )
    two = losses_of(server.run(2, flags(more=f"{FLAGS_SHORT} {more}", **FLAGS_SP2)))
    assert relative_difference(two, one) < 1e-5
    assert (relative_difference(one, plain) > 1e-6) == (more in CHANGES)


CHECKPOINT = "--checkpoint-activations --deepspeed-activation-checkpointing"
# What is refused beside the rows of unit/test_patched_frameworks.py: degrees, flags, and the flag,
# number or word that the message has; "": the first flag.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (SP2, "--sequence-parallel", ""),
    (SP2, "--ds-sequence-parallel-fpdt", ""),
    ({"sp": 2, "u": 3}, "", "--ulysses-degree 3"),
    ({"sp": 2, "u": "auto"}, "--usp-cluster b9", "a100"),
    (
        {"sp": 2, "u": "auto"},
        "--seq-length 9999999 --max-position-embeddings 9999999 --usp-cluster l20",
        "46.1 GiB",
    ),
    (SP2, "--usp-cluster l20", "--ulysses-degree auto"),
    ({"sp": 2, "u": 0}, "", "--ulysses-degree 0"),
    ({"sp": 2}, "--num-attention-heads 1 --kv-channels 64", "1 (ring 2)"),
    (SP2, "--seq-length 1", "1 tokens"),
    (SP2, "--attention-dropout 0.1", "--attention-dropout 0"),
    (SP2, "--attention-dropout 0.1 --use-flash-attn-v2", "--attention-dropout 0"),
    ({**SP2, "pipe": True}, "--reset-attention-mask", "--no-pipeline-parallel"),
    ({"sp": 2, "u": 2}, f"--attention-dropout 0.1 --use-flash-attn-v2 {DOCUMENTS}", ""),
    ({}, "--reset-position-ids --use-rotary-position-embeddings", "rotary"),
    (SP2, "--num-experts 2", "experts"),
    (SP2, "--num-experts-switch 2", "experts"),
    (SP2, "--data-efficiency-curriculum-learning", "one length"),
    (SP2, "--random-ltd", "one length"),
    (SP2, "--kd", "GPT"),
    (SP2, "--mos", "GPT"),
    (SP2, "--retro-add-retriever", "GPT"),
    (SP2, "--inference", "one token"),
    (SP2, "--ds-inference", "one token"),
    (SP2, f"--checkpoint-in-cpu {CHECKPOINT}", ""),
    (SP2, f"--partition-activations {CHECKPOINT}", ""),
    (SP2, "--transformer-impl transformer_engine", "local"),
    ({**SP2, "pipe": True}, "--usp-loss-chunks 2", "--no-pipeline-parallel"),
    (SP2, f"--usp-recompute full {CHECKPOINT}", ""),
    (SP2, "--usp-mlp-chunks 99999", "99999"),
    (SP2, "--usp-states-on-host --cpu-optimizer", "--cpu-optimizer"),
    (SP2, "--usp-checkpoint-layers 2", "--usp-recompute full"),
    (SP2, f"--usp-checkpoint-layers 2 --usp-recompute full {CHECKPOINT}", ""),
    ({"tp": 2}, "--usp-mlp-chunks 2 --sequence-parallel", "--sequence-parallel"),
    ({}, "--usp-recompute gemm-last --apply-residual-connection-post-layernorm", "gemm-last"),
]


@pytest.mark.parametrize(("degrees", "more", "number"), REFUSED, ids=lambda value: str(value)[:40])
def test_unsupported_options_are_refused(server, degrees, more, number):
    for seen in server.attempt(2, flags(zero=1, more=more, **degrees)):
        assert isinstance(seen.get("refused"), (ConfigError, LayoutError)), seen
        assert (number or more.split()[0]) in str(seen["refused"]), seen
        assert not seen["groups"]


def test_partitioned_activations_work_in_a_pipeline(server):
    more = f"{CHECKPOINT} --partition-activations"
    ranks = server.run(4, flags(**SP2, tp=2, pipe=True, zero=1, more=more))
    expected = losses_of(server.run(1, flags(zero=1)))
    assert relative_difference(losses_of(ranks), expected) < 1e-5


def test_deepspeeds_configuration_is_read_too(server):
    for config, message in (
        ({"sequence_parallel_size": 2}, "Leave it out: --ds-sequence-parallel-size is enough"),
        ({"curriculum_learning": {"enabled": True}}, "Train at one length"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "in 4 bits"),
        ({"optimizer": {"type": "OneBitAdam"}}, "1-bit optimizer"),
    ):
        for seen in server.attempt(2, flags(config=config, **SP2)):
            assert message in str(seen["refused"])


def test_a_pipeline_with_zero_2_is_refused(server):
    for seen in server.attempt(2, flags(pp=2, zero=2, more="--use-rotary-position-embeddings")):
        assert "ZeRO-2 does not go with a pipeline" in str(seen["refused"])
        assert not seen["groups"]


ADAM = "--optimizer adam --lr 1e-3 --clip-grad 1.0 --micro-batch-size 1 --hidden-dropout 0.1"
COMPILE = "megatron.data.dataset_utils:compile_helper"


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (1, {"zero": 0}),
        (2, {"zero": 3}),
        (2, {"tp": 2, "zero": 1}),
        (4, {"tp": 2, "pp": 2, "zero": 1}),
    ],
)
def test_one_rank_a_sequence_trains_as_without_patches(server, world, degrees):
    text = flags(more=ADAM, **degrees)
    stock = server.run(world, text, patched=False, own_weights=True, extra=((COMPILE, skip),))
    patched = server.run(world, text, own_weights=True)
    assert losses_of(patched) == losses_of(stock)
    assert patched[0]["norms"] == stock[0]["norms"]


@pytest.mark.parametrize(
    ("without", "degrees"),
    [
        ("gradients.scatter_gradients", {"sp": 2, "u": 1, "zero": 3}),
        ("gradients.reduce_gradients", {"sp": 2, "u": 1, "pp": 2, "zero": 0}),
    ],
)
def test_without_the_patch_deepspeed_scales_gradients_wrongly(server, without, degrees):
    right = losses_of(server.run(1, flags(zero=1)))
    world = 2 * degrees.get("pp", 1)
    wrong = [each["losses"] for each in server.run(world, flags(**degrees), without=without)]
    assert abs(wrong[0][0] / right[0] - 1) < 1e-6  # the first loss knows no gradient yet
    assert abs(wrong[0][1] / right[1] - 1) > 1e-3


def test_gelu_is_megatron_deepspeeds(checkout, monkeypatch):
    """The code for GPUs against Megatron-DeepSpeed's in fp64, where rounding is negligible."""
    file = checkout / "megatron" / "model" / "fused_bias_gelu.py"
    spec = importlib.util.spec_from_file_location("hosts_gelu", file)
    assert spec is not None and spec.loader is not None
    stock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)
    function = stock.GeLUFunction
    x = torch.randn(6, 2, 16, dtype=torch.float64).mul(3).requires_grad_()
    bias = torch.randn(16, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(6, 2, 16, dtype=torch.float64)

    def results() -> tuple[torch.Tensor, ...]:
        y = function.apply(x, bias)
        return y, *torch.autograd.grad(y, (x, bias), dy)

    expected = results()
    torchs, used = F.gelu, []

    def gelu(x: torch.Tensor, **options: str) -> torch.Tensor:
        used.append(options)
        return torchs(x, **options)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(F, "gelu", gelu)
    for name, patched in (("forward", speedups.gelu), ("backward", speedups.gelu_backward)):
        wrapped = staticmethod(partial(patched, None))  # without the original
        monkeypatch.setattr(function, name, wrapped)
    patched = results()
    assert used == [{"approximate": "tanh"}]
    for result, original in zip(patched, expected, strict=True):
        torch.testing.assert_close(
            result, original, rtol=1e-6, atol=1e-7
        )  # its constants have 8 digits


def test_tensor_parallel_ranks_wait_for_the_index_of_a_first_run(server):
    shutil.rmtree(server.folder / "index-cache", ignore_errors=True)
    assert len(server.run(4, flags(sp=2, u=1, tp=2, zero=1))) == 4
    assert (server.folder / "index-cache").is_dir()


def test_dropout_differs_between_shards_and_is_the_same_again(server):
    text = flags(sp=2, u=1, tp=2, zero=1, more="--hidden-dropout 0.2 --bf16")
    first, second = (server.run(4, text, watch_dropout=True) for _ in range(2))
    assert [seen["dropped"] for seen in first] == [seen["dropped"] for seen in second]
    assert [seen["losses"] for seen in first] == [seen["losses"] for seen in second]
    tp0_of_sp0, tp1_of_sp0, tp0_of_sp1, tp1_of_sp1 = (seen["dropped"] for seen in first)
    assert tp0_of_sp0 == tp1_of_sp0 and tp0_of_sp1 == tp1_of_sp1  # they hold the same activations
    for mask, other_mask in zip(tp0_of_sp0, tp0_of_sp1, strict=True):
        assert mask != other_mask
    assert len(set(tp0_of_sp0)) == len(tp0_of_sp0)


def test_dropout_differs_between_replicas(server):
    """Data-parallel ranks hold other sequences."""
    text = flags(sp=2, u=1, zero=1, more="--hidden-dropout 0.2 --bf16 --micro-batch-size 1")
    first, second = (server.run(4, text, watch_dropout=True) for _ in range(2))
    assert [seen["dropped"] for seen in first] == [seen["dropped"] for seen in second]
    for masks in zip(*(seen["dropped"] for seen in first), strict=True):
        assert len(set(masks)) == 4


def test_dropout_is_the_same_when_activations_are_recomputed(server):
    text = "--hidden-dropout 0.2"
    recompute = " --checkpoint-activations --deepspeed-activation-checkpointing"
    saved, recomputed = (
        losses_of(server.run(2, flags(sp=2, u=1, zero=1, more=more)))
        for more in (text, text + recompute)
    )
    assert relative_difference(recomputed, saved) < 1e-6


@pytest.mark.parametrize("degrees", [{"sp": 2, "u": 2}, {"sp": 2, "u": 1}], ids=["u2", "r2"])
def test_a_flash_attention_that_is_installed_serves_without_a_ring(server, degrees):
    more = "--bf16 --use-flash-attn-v2 --num-key-value-heads 2"
    ranks = server.run(2, flags(zero=1, more=more, **degrees), fake_flash=True)
    assert all((seen["flash_calls"] > 0) == (degrees["u"] == 2) for seen in ranks)
    expected = losses_of(server.run(1, flags(zero=1, more="--bf16 --num-key-value-heads 2")))
    assert relative_difference(losses_of(ranks), expected) < 2e-4
