"""Command line of the trainer: Megatron-DeepSpeed's flag names."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from types import MappingProxyType

from ds_usp.planner import degree_or_auto
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
        type=degree_or_auto,
        metavar="U",
        help="ranks of them that exchange heads; the rest is the ring; auto: what the planner "
        "finds fastest (default: as many as the heads allow)",
    )
    add(
        "--usp-cluster",
        metavar="NAME",
        help="what auto plans for: a built-in cluster, or a profile of this one, a JSON file that "
        "`python -m ds_usp.planner profile` writes (default: by the GPU's name)",
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
    add(
        "--reset-attention-mask",
        action=SWITCH,
        default=False,
        help="attention sees its own document only",
    )
    add(
        "--reset-position-ids",
        action=SWITCH,
        default=False,
        help="positions start anew with each document",
    )


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
