"""Command line of the trainer: Megatron-DeepSpeed's flag names, and every check across flags."""

from __future__ import annotations

import argparse
import math
from argparse import Namespace
from collections.abc import Sequence
from types import MappingProxyType

from ds_usp import ConfigError, TokenLayout
from ds_usp.training import check_zero_stage
from usp_trainer import memory

SWITCH = argparse.BooleanOptionalAction  # --name and --no-name

QUICKSTART = MappingProxyType(
    {
        "ds_sequence_parallel_size": 4,
        "ulysses_degree": 2,
        "usp_layout": "zigzag",
        "zero_stage": 1,
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "seq_length": 1024,
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "use_rotary_position_embeddings": True,
        "normalization": "rmsnorm",
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "disable_bias_linear": True,
        "make_vocab_size_divisible_by": 1,
        "train_iters": 60,
        "lr": 2e-3,
        "min_lr": 2e-4,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 8,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "optimizer": "adam",
        "bf16": False,
        "device": "cpu",
    }
)


def build_parser() -> argparse.ArgumentParser:
    """The parser; ``tests/unit/test_trainer_cli.py`` freezes its flags."""
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt_usp.py",
        description="Pretrain a GPT with unified sequence parallelism (Ulysses x Ring) on CPUs or "
        "GPUs, alone, under torchrun or under the deepspeed launcher.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for add in (_start, _parallel, memory.add_flags, _model, _training, _data, _output):
        add(parser)
    return parser


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse a command line; ``--quickstart`` replaces the defaults, flags still override it."""
    parser = build_parser()
    if parser.parse_known_args(argv)[0].quickstart:
        parser.set_defaults(**QUICKSTART)
    return parser.parse_args(argv)


def _start(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("start")
    add = group.add_argument
    add(
        "--quickstart",
        action="store_true",
        help="train a small GPT on 4 CPU ranks (ulysses 2 x ring 2), then prove on the spot that "
        "its losses equal one rank's",
    )
    add(
        "--num-processes",
        type=int,
        metavar="N",
        help="ranks to start when no launcher did (default: one for each GPU, without GPU as many "
        "as one model replica needs)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if any")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def _parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism", "degrees in ranks; what is left is data")
    add = group.add_argument
    add("--ds-sequence-parallel-size", type=int, default=1, metavar="N", help="ranks per sequence")
    add(
        "--ulysses-degree",
        type=int,
        metavar="U",
        help="ranks of them that exchange heads; the rest is the ring (default: as many as the "
        "heads allow)",
    )
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="ranks per layer")
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="stages")
    add("--zero-stage", type=int, choices=range(4), default=1, help="DeepSpeed's ZeRO stage")
    add(
        "--usp-layout",
        choices=("zigzag", "contiguous", "striped", "context_parallel"),
        default="zigzag",
        help="which rank holds which token",
    )
    add("--usp-kernel", default="auto", metavar="NAME", help="attention kernel; auto: the fastest")


def _model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--num-layers", type=int, default=4, metavar="N", help="transformer layers")
    add("--hidden-size", type=int, default=128, metavar="N", help="width")
    add("--ffn-hidden-size", type=int, metavar="N", help="MLP width (default: 4 x, SwiGLU 8/3 x)")
    add("--num-attention-heads", type=int, default=8, metavar="N", help="query heads")
    add("--num-key-value-heads", type=int, metavar="N", help="KV heads (default: all, no GQA)")
    add("--seq-length", type=int, default=1024, metavar="N", help="tokens per sequence")
    add("--max-position-embeddings", type=int, metavar="N", help="(default: the sequence length)")
    add(
        "--use-rotary-position-embeddings",
        action=SWITCH,
        default=False,
        help="instead of learned ones",
    )
    add("--rotary-base", type=float, default=10000.0, metavar="X", help="base of the angles")
    add("--normalization", choices=("layernorm", "rmsnorm"), default="layernorm", help="which one")
    add("--layernorm-epsilon", type=float, default=1e-5, metavar="X", help="of either norm")
    add("--swiglu", action=SWITCH, default=False, help="gated SiLU instead of GELU")
    add("--disable-bias-linear", action=SWITCH, default=False, help="no bias in linear layers")
    add(
        "--untie-embeddings-and-output-weights",
        action=SWITCH,
        default=False,
        help="two matrices, not one",
    )
    add("--init-method-std", type=float, default=0.02, metavar="X", help="of normal initialization")
    add("--attention-dropout", type=float, default=0.0, metavar="P", help="only 0 is exact here")
    add("--hidden-dropout", type=float, default=0.0, metavar="P", help="only 0 is exact here")
    add("--make-vocab-size-divisible-by", type=int, default=128, metavar="N", help="by padding")


def _training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--micro-batch-size", type=int, default=1, metavar="N", help="sequences per replica")
    add(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="sequences per step (default: micro x dp)",
    )
    add("--train-iters", type=int, default=100, metavar="N", help="steps in all, with resumed ones")
    add(
        "--optimizer", choices=("adam", "sgd"), default="adam", help="adam: decoupled decay (AdamW)"
    )
    add("--lr", type=float, default=1e-3, metavar="X", help="peak learning rate")
    add("--min-lr", type=float, default=0.0, metavar="X", help="learning rate at the end of decay")
    add(
        "--lr-decay-style", choices=("constant", "linear", "cosine"), default="cosine", help="shape"
    )
    add("--lr-decay-iters", type=int, metavar="N", help="steps (default: --train-iters)")
    add("--lr-warmup-iters", type=int, default=0, metavar="N", help="steps of linear warm-up")
    add("--weight-decay", type=float, default=0.01, metavar="X", help="on matrices only")
    add("--clip-grad", type=float, default=1.0, metavar="X", help="global norm; 0: no clipping")
    add("--adam-beta1", type=float, default=0.9, metavar="X", help="first moment")
    add("--adam-beta2", type=float, default=0.95, metavar="X", help="second moment")
    add("--adam-eps", type=float, default=1e-8, metavar="X", help="added to the denominator")
    add("--sgd-momentum", type=float, default=0.0, metavar="X", help="with --optimizer sgd")
    add("--seed", type=int, default=1234, metavar="N", help="of weights and data order")
    add(
        "--bf16",
        action=SWITCH,
        default=False,
        help="bf16 weights with fp32 masters (default: fp32)",
    )


def _data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    add = group.add_argument
    add(
        "--data-path",
        nargs="+",
        metavar="PATH",
        help="UTF-8 text files (read as bytes) or prefixes of Megatron .bin/.idx pairs (default: "
        "the text of CPython's own documentation, which every installation has)",
    )
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="token ids in .bin/.idx data, end of document being N-1 (text files: 257)",
    )
    add(
        "--split",
        type=_split,
        default="95,5,0",
        metavar="A,B,C",
        help="parts for training, validation, test",
    )
    add("--data-cache-path", metavar="DIR", help="encoded text (default: OUTPUT_DIR/data)")
    add("--eod-mask-loss", action=SWITCH, default=False, help="no loss on end-of-document inputs")


def _output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--output-dir", default="usp_output", metavar="DIR", help="for metrics.jsonl and loss.png")
    add("--quiet", action="store_true", help="write metrics.jsonl and nothing else")
    add("--save", metavar="DIR", help="checkpoints go here")
    add("--load", metavar="DIR", help="continue from the latest checkpoint here")
    add(
        "--save-interval", type=int, metavar="N", help="steps between them (default: only the last)"
    )
    add(
        "--log-interval",
        type=int,
        default=10,
        metavar="N",
        help="steps between lines of a log that is not a terminal",
    )
    add("--eval-interval", type=int, metavar="N", help="steps between validations (default: none)")
    add("--eval-iters", type=int, default=4, metavar="N", help="global batches per validation")


def _split(text: str) -> str:
    parts = [float(part) for part in text.split(",")]
    if len(parts) != 3 or min(parts) < 0 or parts[0] == 0:
        raise ValueError
    return text


def replica_size(args: Namespace) -> int:
    """Ranks that hold one copy of the model and one batch of sequences."""
    return (
        args.tensor_model_parallel_size
        * args.ds_sequence_parallel_size
        * args.pipeline_model_parallel_size
    )


def check(args: Namespace, world_size: int) -> Namespace:
    """Fill in what follows from other flags and from the number of ranks, or refuse.

    Adds ``ring_degree``, ``data_parallel_size`` and ``accumulation_steps``.

    Raises:
        ConfigError, LayoutError: the flags contradict each other; the message has the fix.
    """
    args = Namespace(**vars(args))
    _check_positive(args)
    memory.check_flags(args)
    _check_heads(args)
    _check_degrees(args)
    _check_world(args, world_size)
    _check_batch(args)
    _check_model(args)
    return args


def _check_positive(args: Namespace) -> None:
    names = (
        "ds_sequence_parallel_size ulysses_degree tensor_model_parallel_size "
        "pipeline_model_parallel_size num_layers hidden_size ffn_hidden_size num_attention_heads "
        "num_key_value_heads seq_length micro_batch_size global_batch_size train_iters "
        "save_interval log_interval eval_interval eval_iters make_vocab_size_divisible_by "
        "lr_decay_iters num_processes"
    )
    for name in names.split():
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{_flag(name)} {value}: must be 1 or more")


def _check_heads(args: Namespace) -> None:
    heads, tp = args.num_attention_heads, args.tensor_model_parallel_size
    args.num_key_value_heads = args.num_key_value_heads or heads
    if heads % tp or heads % args.num_key_value_heads or args.hidden_size % heads:
        raise ConfigError(
            f"--num-attention-heads {heads} must be a multiple of --tensor-model-parallel-size "
            f"{tp} and of --num-key-value-heads {args.num_key_value_heads}, and divide "
            f"--hidden-size {args.hidden_size}"
        )
    if args.use_rotary_position_embeddings and args.hidden_size // heads % 2:
        raise ConfigError(
            f"rotary position embeddings need an even head dimension, --hidden-size "
            f"{args.hidden_size} over {heads} heads gives {args.hidden_size // heads}"
        )
    if args.num_key_value_heads % tp:
        raise ConfigError(
            f"--num-key-value-heads {args.num_key_value_heads} cannot be split over "
            f"--tensor-model-parallel-size {tp}. Use tp "
            f"{math.gcd(args.num_key_value_heads, tp)} and more sequence parallelism: it serves "
            "any number of KV heads"
        )


def _check_degrees(args: Namespace) -> None:
    sp, tp = args.ds_sequence_parallel_size, args.tensor_model_parallel_size
    heads = args.num_attention_heads // tp
    possible = [u for u in range(min(sp, heads), 0, -1) if sp % u == 0]
    args.ulysses_degree = args.ulysses_degree or possible[0]
    if args.ulysses_degree not in possible:
        raise ConfigError(
            f"--ulysses-degree {args.ulysses_degree} must divide --ds-sequence-parallel-size {sp} "
            f"and not exceed the {heads} query heads of a tensor-parallel rank "
            f"({args.num_attention_heads} heads, tp {tp}). Possible: "
            + ", ".join(f"{u} (ring {sp // u})" for u in possible)
        )
    args.ring_degree = sp // args.ulysses_degree
    TokenLayout(
        args.usp_layout, seq_len=args.seq_length, ulysses=args.ulysses_degree, ring=args.ring_degree
    )


def _check_world(args: Namespace, world_size: int) -> None:
    replica = replica_size(args)
    if world_size % replica:
        raise ConfigError(
            f"{world_size} ranks cannot hold tensor {args.tensor_model_parallel_size} x sequence "
            f"{args.ds_sequence_parallel_size} x pipeline {args.pipeline_model_parallel_size} = "
            f"{replica} ranks. Start a multiple of {replica}, or lower a degree"
        )
    args.data_parallel_size = world_size // replica


def _check_batch(args: Namespace) -> None:
    one_pass = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or one_pass
    if args.global_batch_size % one_pass:
        nearest = max(one_pass, args.global_batch_size // one_pass * one_pass)
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {args.data_parallel_size} data-parallel replicas = "
            f"{one_pass}. Use --global-batch-size {nearest}"
        )
    args.accumulation_steps = args.global_batch_size // one_pass


def _check_model(args: Namespace) -> None:
    width = 8 * args.hidden_size // 3 // 64 * 64 if args.swiglu else 4 * args.hidden_size
    args.ffn_hidden_size = args.ffn_hidden_size or max(width, 64)
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    pp, tp = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    if args.num_layers < pp:
        raise ConfigError(f"--num-layers {args.num_layers} cannot fill {pp} pipeline stages")
    check_zero_stage(args.zero_stage, stages=pp, bf16=args.bf16)
    if args.ffn_hidden_size % tp:
        raise ConfigError(
            f"--ffn-hidden-size {args.ffn_hidden_size} is not a multiple of "
            f"--tensor-model-parallel-size {tp}"
        )
    if args.max_position_embeddings < args.seq_length:
        raise ConfigError(
            f"--max-position-embeddings {args.max_position_embeddings} is below --seq-length "
            f"{args.seq_length}"
        )
    if args.attention_dropout or args.hidden_dropout:
        raise ConfigError(
            f"--attention-dropout {args.attention_dropout} --hidden-dropout {args.hidden_dropout}: "
            "dropout over sharded sequences would differ from one rank's. Use 0 for both"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
