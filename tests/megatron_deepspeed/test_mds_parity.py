"""With any degrees Megatron-DeepSpeed trains as one rank does.

SGD without momentum, clipping or decay: Adam and clipping hide a wrong gradient scale."""

import functools
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout_runs import (
    Numbers,
    check_close,
    degrees_of,
    losses_of,
    numbers_of,
    relative_difference,
)
from golden_curves import STEPS as RECORDED
from mds_adapter import TrainingServer, flags
from programs import python

from ds_usp.planner import AUTO, ModelShape, ParallelConfig, Workload
from ds_usp.planner.emit import ds_config, megatron_deepspeed

LIMIT = 1e-5  # fp32, losses and gradient norms, at every step
STEPS = 4
ROPE = "--use-rotary-position-embeddings"
GQA = "--num-key-value-heads 2"
LLAMA = (
    f"{ROPE} {GQA} --swiglu --normalization rmsnorm --untie-embeddings-and-output-weights "
    "--disable-bias-linear"
)
MODELS = {"gpt": "", "rope": ROPE, "gqa": GQA, "llama": LLAMA, "odd": "--seq-length 61"}
RECOMPUTE = {
    "": "",
    "deepspeed": "--checkpoint-activations --deepspeed-activation-checkpointing",
    "full": "--recompute-granularity full --recompute-method uniform",
}
PACKED = "--reset-attention-mask --reset-position-ids --eod-mask-loss --seq-length 512 "
PACKED += "--max-position-embeddings 512"
ATTENTION = "megatron_patches.megatron_deepspeed.attention:SequenceParallelAttention.forward"
# pipe: DeepSpeed's pipeline engine with one stage
GRIDS = (
    *("u2", "r2", "u2r2", "u4", "r4", "r2-dp2", "u2-tp2", "r2-tp2", "u2-pp2", "r2-pp2"),
    *("u2r2-pipe", "u2-tp2-pp2", "r2-tp2-pp2", "u2r2-tp2", "u2r2-pp2"),
)


def ranks_of(grid: str) -> tuple[int, dict[str, Any]]:
    """The number of ranks and the degrees that flags have; data parallelism is the rest."""
    degrees = degrees_of(grid)
    u, r, tp, pp = (degrees.get(axis, 1) for axis in ("u", "r", "tp", "pp"))
    pipe = "pipe" in grid or None
    return math.prod(degrees.values()), {"sp": u * r, "u": u, "tp": tp, "pp": pp, "pipe": pipe}


def measure(
    server: TrainingServer, grid: str, zero: int, model: str, more: str, steps: int
) -> Numbers:
    world, degrees = ranks_of(grid)
    if "dp2" in grid:
        more += " --micro-batch-size 1"  # the same global batch
    text = flags(zero=zero, more=f"{MODELS[model]} --train-iters {steps} {more}", **degrees)
    return numbers_of(server.run(world, text))


@functools.cache
def one_rank(server: TrainingServer, model: str, more: str, steps: int) -> Numbers:
    """As :func:`measure`, of one rank at ZeRO-1, where DeepSpeed reports a norm."""
    text = flags(zero=1, more=f"{MODELS[model]} --train-iters {steps} {more}")
    return numbers_of(server.run(1, text))


def check(
    server: TrainingServer,
    grid: str,
    zero: int,
    model: str = "gpt",
    more: str = "",
    steps: int = STEPS,
) -> None:
    measured = measure(server, grid, zero, model, more, steps)
    check_close(measured, one_rank(server, model, "", steps), LIMIT)


@pytest.mark.parametrize(
    ("grid", "zero", "model", "recompute"),
    [
        ("u2", 0, "gpt", ""),
        ("u2r2", 0, "rope", "full"),
        ("r4", 1, "odd", ""),
        ("u4", 2, "gqa", ""),
        ("u2r2", 3, "llama", "deepspeed"),
        ("r2-dp2", 3, "gpt", ""),
        ("r2-dp2", 2, "llama", ""),
        ("u2-tp2", 1, "llama", "deepspeed"),
        ("r2-tp2", 0, "gpt", ""),
        ("u2-pp2", 0, "llama", "deepspeed"),
        ("r2-pp2", 1, "gpt", ""),
        ("u2r2-pipe", 1, "rope", ""),
        ("r2-tp2-pp2", 0, "llama", ""),
        ("u2-tp2-pp2", 1, "gpt", "deepspeed"),
    ],
)
def test_it_trains_as_one_rank_does(server, grid, zero, model, recompute):
    check(server, grid, zero, model, RECOMPUTE[recompute])


def test_twenty_steps_are_the_recorded_ones(golden, server):
    losses, norms = measure(server, "u2r2", 1, "llama", "", RECORDED)
    golden.check("Megatron-DeepSpeed, 2x2, ZeRO-1, SGD", losses[:RECORDED], norms)


@pytest.mark.parametrize(
    ("grid", "zero", "model", "more"),
    [
        (
            "u2r2",
            1,
            "llama",
            "--usp-recompute gemm-last --usp-loss-chunks 3 --usp-offload-ratio 0.5",
        ),
        ("u2r2", 3, "gpt", "--usp-recompute gemm-last --usp-loss-chunks 2"),
        ("u2r2", 3, "gpt", "--usp-recompute gemm-last --usp-mlp-chunks 5 --usp-states-on-host"),
        ("r2-pp2", 1, "llama", "--usp-recompute attention --usp-offload-ratio 1"),
        ("u2-tp2", 2, "gpt", "--usp-recompute attention --usp-loss-chunks 5 --usp-mlp-chunks 2"),
        ("u2r2", 3, "llama", "--usp-recompute attention --deepspeed-activation-checkpointing"),
        (
            "u2-pp2",
            1,
            "gpt",
            "--usp-recompute full --usp-checkpoint-layers 2 --usp-mlp-chunks 3 "
            "--usp-states-on-host",
        ),
    ],
)
def test_every_memory_policy_trains_as_one_rank_does(server, grid, zero, model, more):
    check(server, grid, zero, model, more)


def test_saved_attention_sends_less_than_a_recomputed_one(server):
    """Nothing again in the ring, q, k, v and the output between heads and sequence."""
    plain, saved, full = (
        server.run(4, flags(sp=4, u=2, zero=1, more=f"--train-iters 2 --usp-recompute {recompute}"))
        for recompute in ("none", "attention", "full")
    )
    for rank in range(4):
        assert 0 < plain[rank]["sent"] < saved[rank]["sent"] < full[rank]["sent"]


OUTPUTS: list[int] = []  # on a rank: bytes of what layers return when they are recomputed


def watch_checkpoint(original: Any, run: Any, *args: Any) -> Any:
    """``tensor_parallel.checkpoint``: a recomputation, and none else, has gradients enabled."""

    def watched(*inputs: Any) -> Any:
        out = run(*inputs)
        if torch.is_grad_enabled():
            tensors = out if isinstance(out, tuple) else (out,)
            OUTPUTS.extend(x.untyped_storage().nbytes() for x in tensors)
        return out

    return original(watched, *args)


def check_outputs(original: Any, *args: Any) -> Any:
    """``train``: each output is in the memory of one element."""
    result = original(*args)
    assert OUTPUTS and max(OUTPUTS) <= 4, OUTPUTS
    return result


def test_recomputed_layers_keep_no_output(server):
    wraps = {
        "megatron.core.tensor_parallel:checkpoint": watch_checkpoint,
        "megatron.training:train": check_outputs,
    }
    text = flags(zero=1, more="--train-iters 1 --usp-recompute full")
    server.run(1, text, extra=tuple(wraps.items()))


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_layout_changes_nothing(server, model):
    check(server, "u2r2", 1, model, "--usp-layout contiguous")


@pytest.mark.parametrize(
    ("grid", "zero", "model", "recompute"),
    [("u2r2", 1, "gpt", ""), ("r4", 3, "rope", "deepspeed"), ("r2-tp2", 0, "gpt", "")],
)
def test_packed_documents(server, grid, zero, model, recompute):
    measured = measure(server, grid, zero, model, f"{PACKED} {RECOMPUTE[recompute]}", STEPS)
    # With learned positions one rank has Megatron-DeepSpeed's own attention and its dense mask.
    check_close(measured, one_rank(server, model, PACKED, STEPS), LIMIT)
    plain = PACKED.replace("--reset-attention-mask --reset-position-ids", "")
    assert relative_difference(measured[0], one_rank(server, model, plain, STEPS)[0]) > LIMIT


@pytest.mark.parametrize("grid", ["u2r2", "r2-pp2"])
def test_bf16_stays_within_its_rounding_error(server, grid):
    losses, norms = measure(server, grid, 1, "gpt", "--bf16", STEPS)
    expected_losses, expected_norms = one_rank(server, "gpt", "--bf16", STEPS)
    fp32, _ = one_rank(server, "gpt", "", STEPS)
    assert relative_difference(losses, expected_losses) < 2e-4
    assert relative_difference(norms, expected_norms) < 2e-3
    # Without bf16 one rank would equal fp32.
    assert 1e-5 < relative_difference(expected_losses, fp32) < 2e-3


def test_zero_0_sums_gradients_of_bf16_as_zero_1_does(server):
    """ZeRO-0 is not refused: both sum in bf16, unless ZeRO-1 is asked for fp32."""
    fp32 = {"data_types": {"grad_accum_dtype": "fp32"}}
    more = f"--bf16 --micro-batch-size 1 --global-batch-size 16 --train-iters {STEPS}"
    at_zero_0, at_zero_1, in_fp32 = (
        losses_of(server.run(2, flags(sp=2, u=1, zero=zero, config=config, more=more)))
        for zero, config in ((0, {}), (1, {}), (1, fp32))
    )
    assert relative_difference(at_zero_0, at_zero_1) < 1e-7
    assert 1e-6 < relative_difference(at_zero_0, in_fp32) < 2e-4


def test_adam_and_clipping_over_stages(server):
    """DeepSpeed's own clipping at ZeRO-0 is wrong over pipeline stages."""
    adam = "--optimizer adam --lr 1e-3 --clip-grad 0.5"
    measured = measure(server, "r2-pp2", 0, "gpt", adam, STEPS)
    check_close(measured, one_rank(server, "gpt", adam, STEPS), LIMIT)


ZERO = {
    "z3-buckets": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 1000,
        "stage3_param_persistence_threshold": 10,
    },
    "z3-all-reduce": {"stage": 3, "reduce_scatter": False},
    "z3-hpz": {
        "stage": 3,
        "zero_hpz_partition_size": 2,
        "stage3_param_persistence_threshold": 10,
    },
    "z3-offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "z2-buckets": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000},
    "z2-all-reduce": {"stage": 2, "reduce_scatter": False},
    "z2-offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "z1-all-reduce": {"stage": 1, "reduce_scatter": False},
    "z1-buckets": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 1000},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", ZERO)
def test_other_reduction_settings_of_zero(server, options):
    zero = ZERO[options]
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    text = flags(sp=2, u=1, zero=zero["stage"], config=config, more="--micro-batch-size 1")
    check_close(numbers_of(server.run(4, text)), one_rank(server, "gpt", "", STEPS), LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["prescale_gradients", "gradient_predivide_factor"])
@pytest.mark.parametrize("zero", [0, 1])
def test_scaling_before_the_sum(server, zero, scaling):
    config = {scaling: True if scaling.startswith("pre") else 2.0}
    text = flags(sp=2, u=1, zero=zero, config=config, more="--micro-batch-size 1")
    assert (
        relative_difference(losses_of(server.run(4, text)), one_rank(server, "gpt", "", STEPS)[0])
        < LIMIT
    )


def full_matrix() -> Iterator[tuple[str, int, str, str, str]]:
    """(grid, ZeRO stage, model, recompute, layout)."""
    for grid in GRIDS:
        stages = range(2 if "p" in grid.replace("tp", "").replace("dp", "") else 4)
        for zero, model in itertools.product(stages, MODELS):
            yield grid, zero, model, "", "zigzag"
        for model in ("gpt", "llama"):
            yield grid, stages[-1], model, "deepspeed", "zigzag"
            if "r" in grid:
                yield grid, stages[-1], model, "", "contiguous"


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "zero", "model", "recompute", "layout"), list(full_matrix()))
def test_the_full_matrix(server, grid, zero, model, recompute, layout):
    check(server, grid, zero, model, f"{RECOMPUTE[recompute]} --usp-layout {layout}", steps=10)


ADAM = "--optimizer adam --lr 1e-3 --clip-grad 1.0"
SAVED, CHECKPOINT_STEPS = 3, 6
CONVERT = """
import runpy, sys
from pathlib import Path
import megatron_patches
megatron_patches.prepare("megatron_deepspeed", Path(sys.argv.pop(1)))
runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")
"""


def train(
    server: TrainingServer, world: int, folder: Path, more: str, **degrees: Any
) -> list[float]:
    """Losses of an uninterrupted run that leaves a checkpoint."""
    save = f"{ADAM} --train-iters {CHECKPOINT_STEPS} --save {folder} --save-interval {SAVED} {more}"
    losses = losses_of(server.run(world, flags(more=save, **degrees)))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    (folder / "latest").write_text(f"global_step{SAVED}")
    return losses


def resume(
    server: TrainingServer, world: int, folder: Path, more: str, **degrees: Any
) -> list[float]:
    load = f"{ADAM} --train-iters {CHECKPOINT_STEPS} --load {folder} {more}"
    return losses_of(server.run(world, flags(more=load, **degrees)))


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, {"sp": 2, "u": 1, "zero": 0}),
        (2, {"sp": 2, "u": 1, "zero": 3}),
        (4, {"sp": 2, "u": 2, "tp": 2, "zero": 2}),
        (4, {"sp": 2, "u": 1, "pp": 2, "zero": 1}),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one(server, tmp_path, world, degrees):
    dropout = "--hidden-dropout 0.1"
    uninterrupted = train(server, world, tmp_path, dropout, **degrees)
    assert resume(server, world, tmp_path, dropout, **degrees) == uninterrupted[SAVED:]


@pytest.mark.parametrize(
    ("zero", "degrees", "other"),
    [
        (1, {"sp": 4, "u": 4}, {"sp": 4, "u": 1, "more": "--usp-layout contiguous"}),
        (2, {"sp": 4, "u": 2}, {"sp": 2, "u": 1, "more": "--micro-batch-size 1"}),
        (3, {"sp": 2, "u": 2, "more": "--micro-batch-size 1"}, {"sp": 4, "u": 1}),
    ],
    ids=str,
)
def test_a_run_is_resumed_in_another_split(server, tmp_path, zero, degrees, other):
    uninterrupted = train(server, 4, tmp_path, degrees.pop("more", ""), zero=zero, **degrees)
    resumed = resume(server, 4, tmp_path, other.pop("more", ""), zero=zero, **other)
    assert relative_difference(resumed, uninterrupted[SAVED:]) < 1e-5


def test_a_universal_checkpoint_goes_to_other_layouts(server, tmp_path):
    unpadded = "--make-vocab-size-divisible-by 1"  # the converter resets rows of padding
    uninterrupted = train(server, 4, tmp_path, unpadded, sp=2, u=1, pp=2, zero=1)
    script = tmp_path / "convert.py"
    script.write_text(CONVERT)
    folders = ("--input_folder", tmp_path / f"global_step{SAVED}")
    folders += ("--output_folder", tmp_path / "universal")
    workers = ("--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state")
    done = python(script, server.checkout, *folders, *workers, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    (tmp_path / "latest_universal").write_text("universal")
    (tmp_path / "latest").write_text("universal")
    more = f"{unpadded} --universal-checkpoint"
    for world, degrees in (
        (2, {"pp": 2}),
        (4, {"sp": 4, "u": 2, "pipe": True}),
        (4, {"sp": 2, "u": 2, "pp": 2}),
    ):
        resumed = resume(server, world, tmp_path, more, zero=1, **degrees)
        assert relative_difference(resumed, uninterrupted[SAVED:]) < 1e-5


# What belongs to a run, not to a plan; no GPU; fp32, because bf16 rounds every split differently.
RUN = """
    --train-iters 2 --lr 0.1 --min-lr 0.1 --lr-decay-style constant --optimizer sgd
    --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --seed 1234 --log-interval 1
    --eval-interval 1000 --eval-iters 1 --data-impl mmap --split 90,5,5 --num-workers 0
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --distributed-backend gloo
"""
PLANNER_LLAMA = ModelShape("tiny", 2, 64, 96, 8, 2, 257, head_dim=16, rope_theta=500000.0)
GPT = ModelShape(
    "gpt", 2, 64, 256, 8, 8, 257, gated=False, tied=True, learned_positions=True, biases=True
)
PLAIN = ParallelConfig(tp_sequence=False)
CASES = {
    "memory": (
        PLANNER_LLAMA,
        PLAIN.replace(ulysses=2, ring=2, recompute="gemm-last", fused_loss=True),
    ),
    "full": (
        PLANNER_LLAMA,
        PLAIN.replace(
            ring=2,
            dp=2,
            zero=3,
            recompute="full",
            offload_ratio=0.5,
        ),
    ),
    "pipeline": (GPT, PLAIN.replace(ulysses=2, pp=2, recompute="attention", offload_ratio=1.0)),
}


def planned(
    server: TrainingServer, split: ParallelConfig, shape: ModelShape
) -> Callable[..., tuple[str, ...]]:
    """Replaces the server's own flags by emitted ones."""

    def arguments(_: str, folder: Path) -> tuple[str, ...]:
        work = Workload(shape, 64, 4)
        config = folder / "ds_config.json"
        text = json.dumps(ds_config(work, split)).replace('"enabled": true', '"enabled": false')
        text = text.replace('"gradient_clipping": 1.0', '"zero_allow_untested_optimizer": true')
        config.write_text(text)
        flags = megatron_deepspeed(work, split).replace("\\", "").split()
        flags[flags.index("ds_config.json")] = str(config)
        flags.remove("--bf16")
        return (*flags, *RUN.split(), "--data-path", str(server.folder / "text"))

    return arguments


@pytest.mark.parametrize("case", CASES)
def test_what_is_emitted_trains_as_one_rank_does(server, monkeypatch, case):
    shape, split = CASES[case]
    losses = []
    for config in (replace(PLAIN, micro_batch=split.micro_batch), split):
        monkeypatch.setattr(server, "arguments", planned(server, config, shape))
        losses.append(losses_of(server.run(config.gpus, "")))
    expected, sharded = losses
    assert len(expected) >= 2 and relative_difference(sharded, expected) < LIMIT


LAUNCHERS = {
    "torchrun": "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_patches.run",
    "deepspeed": "-m deepspeed.launcher.runner --num_gpus 2 --master_port {port} "
    "--module megatron_patches.run",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_starts_the_script(server, tmp_path, launcher):
    degree = AUTO if launcher == "torchrun" else 1
    arguments = server.arguments(flags(sp=2, u=degree, zero=1), tmp_path)
    command = LAUNCHERS[launcher].format(port=29600 + os.getpid() % 300).split()
    done = python(
        *command,
        server.checkout / "pretrain_gpt.py",
        *arguments,
        PATH=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        DS_ACCELERATOR="cpu",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    if degree == AUTO:
        assert done.stdout.count("planner: ulysses 1 x ring 2 on cpu (predicted step") == 1
    losses = [float(x) for x in re.findall(r"iteration .* lm loss: (\S+)", done.stdout)]
    assert len(losses) == 4, done.stdout[-2000:] + done.stderr[-2000:]
    ranks = server.run(2, flags(sp=2, u=1, zero=1), own_weights=True)
    assert relative_difference(losses, losses_of(ranks)[:4]) < 1e-6
