"""The trainer's flags are frozen, and flags that contradict each other are refused with a fix."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ds_usp import ConfigError, LayoutError
from ds_usp.training import solved_ratio

TRAINER = Path(__file__).resolve().parents[2] / "examples_deepspeed" / "sequence_parallel"
sys.path.insert(0, str(TRAINER))

from usp_trainer import memory  # noqa: E402
from usp_trainer.arguments import QUICKSTART, build_parser, parse  # noqa: E402
from usp_trainer.auto_args import choose_degree  # noqa: E402
from usp_trainer.memory import model_shape  # noqa: E402
from usp_trainer.validate_args import check_start, validate_and_derive  # noqa: E402

FLAGS = """
    --adam-beta1 --adam-beta2 --adam-eps --attention-dropout --bf16
    --check-for-nan-in-loss-and-grad --check-only --clip-grad --data-cache-path
    --data-path --device --disable-bias-linear --ds-sequence-parallel-size --eod-mask-loss
    --eval-interval --eval-iters --exit-duration-in-mins --exit-interval --ffn-hidden-size
    --global-batch-size --help --hidden-dropout
    --hidden-size --init-method-std --layernorm-epsilon --load --local-rank --local_rank
    --log-interval --lr --lr-decay-iters --lr-decay-style --lr-warmup-iters
    --make-vocab-size-divisible-by --max-position-embeddings --micro-batch-size --min-lr
    --no-bf16 --no-check-for-nan-in-loss-and-grad --no-disable-bias-linear --no-eod-mask-loss
    --no-reset-attention-mask
    --no-reset-position-ids --no-swiglu
    --no-untie-embeddings-and-output-weights --no-use-rotary-position-embeddings
    --normalization --num-attention-heads --num-key-value-heads --num-layers --num-processes
    --optimizer --output-dir --overwrite-output --pipeline-model-parallel-size --quickstart --quiet
    --reset-attention-mask --reset-position-ids --rotary-base --save --save-interval --seed
    --seq-length --sgd-momentum --split --swiglu
    --tensor-model-parallel-size --tensorboard-dir --train-iters --ulysses-degree
    --untie-embeddings-and-output-weights --use-rotary-position-embeddings --usp-cluster
    --usp-kernel --usp-layout --usp-loss-chunks --usp-offload-ratio --usp-recompute --vocab-size
    --wandb-exp-name --wandb-project --wandb-save-dir --weight-decay
    --zero-stage
"""


def test_the_flags_are_these() -> None:
    """A flag is a promise: add it to the list above and to the changelog, never rename one."""
    actions = build_parser()._actions
    assert sorted(o for a in actions for o in a.option_strings if o != "-h") == FLAGS.split()
    assert all(action.help for action in actions)


def test_the_offload_ratio_is_a_share_or_auto() -> None:
    for text, ratio in (("0.25", 0.25), ("auto", "auto")):
        assert parse(["--usp-offload-ratio", text]).usp_offload_ratio == ratio
    for text in ("1.5", "-1", "much"):
        with pytest.raises(SystemExit):
            parse(["--usp-offload-ratio", text])


def test_auto_offloads_what_does_not_fit() -> None:
    flags = "--hidden-size 1024 --num-layers 24 --num-attention-heads 8 --seq-length 65536 --bf16"
    args = validate_and_derive(parse([*flags.split(), "--usp-loss-chunks", "8"]), 1)
    args.padded_vocab_size = 32000
    run = memory.planner_inputs(args)
    cpu = torch.device("cpu")
    ratios = [solved_ratio("auto", *run, cpu, gib * 2**30) for gib in (200, 50, 40)]
    assert ratios[0] == 0 < ratios[1] < ratios[2] < 1
    assert solved_ratio(0.3, *run, cpu) == 0.3
    with pytest.raises(ConfigError, match="even with everything offloaded"):
        solved_ratio("auto", *run, cpu, 5 * 2**30)
    with pytest.raises(ConfigError, match="the device is cpu"):
        solved_ratio("auto", *run, cpu)


def test_the_quickstart_sets_known_flags_which_the_command_line_overrides() -> None:
    known = vars(parse([]))
    assert known.keys() >= QUICKSTART.keys()
    args = parse(["--quickstart", "--train-iters", "7", "--no-swiglu"])
    assert (args.ds_sequence_parallel_size, args.ulysses_degree) == (4, 2)
    assert (args.train_iters, args.swiglu) == (7, False)
    assert validate_and_derive(args, 4).ring_degree == 2


def test_what_follows_from_the_flags() -> None:
    argv = "--ds-sequence-parallel-size 4 --tensor-model-parallel-size 2 --global-batch-size 8"
    args = validate_and_derive(parse(argv.split()), 16)
    assert (args.ulysses_degree, args.ring_degree) == (4, 1)
    assert (args.data_parallel_size, args.accumulation_steps) == (2, 4)
    assert (args.num_key_value_heads, args.ffn_hidden_size) == (8, 512)
    assert args.lr_decay_iters == args.train_iters


REFUSED = {
    "--ds-sequence-parallel-size 4 --ulysses-degree 3": "Possible: 4 (ring 1), 2 (ring 2)",
    "--ds-sequence-parallel-size 8 --ulysses-degree 8 --num-attention-heads 4": (
        "the 4 query heads of a tensor-parallel rank (4 heads, tp 1). Possible: 4 (ring 2)"
    ),
    "--ds-sequence-parallel-size 3": "Start a multiple of 3",
    "--global-batch-size 12 --micro-batch-size 1": "8 data-parallel replicas = 8. Use "
    "--global-batch-size 8",
    "--num-attention-heads 7": "divide --hidden-size 128",
    "--num-key-value-heads 3": "of --num-key-value-heads 3",
    "--num-key-value-heads 2 --tensor-model-parallel-size 4": "Use tp 2",
    "--tensor-model-parallel-size 4 --ffn-hidden-size 30": "--ffn-hidden-size 30",
    "--pipeline-model-parallel-size 8": "--num-layers 4 cannot fill 8",
    "--pipeline-model-parallel-size 2 --zero-stage 2": "Use --zero-stage 1",
    "--pipeline-model-parallel-size 2 --zero-stage 3": "Use --zero-stage 1",
    "--bf16 --zero-stage 0": "Use --zero-stage 1",
    "--attention-dropout 0.1": "Use 0 for both",
    "--hidden-dropout 0.1": "Use 0 for both",
    "--max-position-embeddings 100": "below --seq-length 1024",
    "--reset-attention-mask --pipeline-model-parallel-size 2 --zero-stage 1": (
        "Use --pipeline-model-parallel-size 1"
    ),
    "--reset-position-ids --use-rotary-position-embeddings": "Add --reset-attention-mask",
    "--lr 1e-4 --min-lr 1e-3": "--min-lr 0.001 is above --lr 0.0001",
    "--use-rotary-position-embeddings --hidden-size 24": "even head dimension",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_contradictions_are_refused_with_the_numbers_and_the_fix(flags: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate_and_derive(parse(flags.split()), 8)
    assert REFUSED[flags] in str(refused.value)


def test_a_sequence_that_no_layout_can_cut_is_refused() -> None:
    flags = "--ds-sequence-parallel-size 8 --num-attention-heads 8 --seq-length 5"
    with pytest.raises(LayoutError, match="at least 16 tokens"):
        validate_and_derive(parse(flags.split()), 8)


BIG = """
    --ds-sequence-parallel-size 8 --num-layers 4 --hidden-size 4096 --num-attention-heads 32
    --num-key-value-heads 8 --seq-length 32768 --bf16 --device cpu --ulysses-degree auto
    --usp-cluster
"""


def chosen(cluster: str, flags: str = "", world: int = 8) -> tuple[int, str]:
    args = parse([*BIG.split(), cluster, *flags.split()])
    args.ulysses_degree = None
    choice = choose_degree(validate_and_derive(args, world), world)
    return choice.ulysses, "\n".join(choice.why)


def test_auto_follows_the_cluster() -> None:
    """NVLink carries the heads anywhere; on PCIe only the ring, which hides, leaves a switch."""
    nvlink, why = chosen("a100")
    assert nvlink == 8 and why.startswith("planner: ulysses 8 x ring 1 on a100")
    for pair in ("8 x 1", "4 x 2", "2 x 4", "1 x 8"):
        assert f"{pair} " in why
    assert "ulysses 8, because ulysses 4 reaches" in why
    for given in ("tp", "pp", "dp", "zero", "recompute"):
        assert f"planner: {given} 1, because" not in why
    assert chosen("l20")[0] == 2


def test_auto_knows_what_is_not_kept() -> None:
    """Half a million tokens fit where layers keep their inputs alone and no logits are there."""
    long = "--seq-length 524288 --num-layers 32 --ffn-hidden-size 14336 --vocab-size 128256"
    with pytest.raises(ConfigError, match="lacks"):
        chosen("h200", f"{long} --zero-stage 3")
    saving = "--usp-recompute full --usp-loss-chunks 16"
    assert chosen("h200", f"{long} --zero-stage 3 {saving}")[0] <= 4
    assert chosen("h200", f"{long} --zero-stage 3 {saving} --usp-offload-ratio auto")[0] <= 4


def test_auto_of_one_rank_a_sequence() -> None:
    assert chosen("h200", "--ds-sequence-parallel-size 1")[0] == 1


def test_auto_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"nothing fits into 46.1 GiB.*lacks .* GiB.*is taken"):
        chosen("l20", "--seq-length 4194304")


def test_a_cluster_without_auto_is_refused() -> None:
    flags = "--usp-cluster h200 --ds-sequence-parallel-size 2"
    with pytest.raises(ConfigError, match="is for --ulysses-degree auto"):
        check_start(parse(flags.split()))


def test_the_planner_knows_the_trainers_model() -> None:
    args = parse(["--num-key-value-heads", "2", "--swiglu", "--vocab-size", "500"])
    args = validate_and_derive(args, 1)
    shape = model_shape(args)
    assert (shape.kv_heads, shape.ffn, shape.vocab) == (2, args.ffn_hidden_size, 500)
    assert shape.gated and shape.tied and shape.learned_positions and shape.biases
