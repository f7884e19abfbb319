"""Command line of the trainer: Megatron-DeepSpeed's flag names. Needs no torch."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from types import MappingProxyType

from ds_usp.planner import AUTO, framework_caps
from usp_trainer.arg_types import Integer, KeywordOr, Number, Ratios, Text
from usp_trainer.command_line import Parser

SWITCH = argparse.BooleanOptionalAction  # --name and --no-name
COUNT = Integer(1)
FRACTION = Number(0, 1, below=True)
POSITIVE = Number(above=True)
NAME = Text("a name")
LAYOUTS = ("zigzag", "contiguous", "striped", "context_parallel")
KERNELS = ("auto", "flash4", "flash3", "cudnn", "flash2", "efficient", "sdpa", "eager")

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
    parser = Parser(
        prog="pretrain_gpt_usp.py",
        description="Pretrain a GPT with unified sequence parallelism (Ulysses x Ring) on CPUs or "
        "GPUs: without a launcher, or under torchrun, srun or the deepspeed launcher.",
    )
    for add in (_start, _parallel, _memory, _model, _training, _data, _output, _logging):
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
        help="train a small GPT on 4 CPU ranks (ulysses 2 x ring 2), then check that its losses "
        "equal one rank's",
    )
    add(
        "--num-processes",
        type=COUNT,
        metavar="N",
        help="ranks to start without a launcher (default: one per GPU; without a GPU, the ranks of "
        "one model replica)",
    )
    add(
        "--check-only",
        action="store_true",
        help="check the flags and the files that they name, for --num-processes ranks, and exit; "
        "needs no torch",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if any")
    add("--local_rank", "--local-rank", type=Integer(-1), help=argparse.SUPPRESS)


def _parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism", "degrees in ranks; the rest is data parallel")
    add = group.add_argument
    add(
        "--ds-sequence-parallel-size", type=COUNT, default=1, metavar="N", help="ranks per sequence"
    )
    add(
        "--ulysses-degree",
        type=KeywordOr(AUTO, COUNT),
        metavar="U",
        help="ranks of a sequence that exchange heads; the rest is the ring; auto: the planner's "
        "fastest (default: as many as the heads allow)",
    )
    add(
        "--usp-cluster",
        type=Text("a name or a file"),
        metavar="NAME",
        help="the cluster that auto plans for: a built-in one, or a profile, a JSON file that "
        "`python -m ds_usp.planner profile` writes (default: by the GPU's name)",
    )
    add("--tensor-model-parallel-size", type=COUNT, default=1, metavar="N", help="ranks per layer")
    add("--pipeline-model-parallel-size", type=COUNT, default=1, metavar="N", help="stages")
    add("--zero-stage", type=int, choices=range(4), default=1, help="DeepSpeed's ZeRO stage")
    add(
        "--usp-layout",
        choices=LAYOUTS,
        default="zigzag",
        help="which rank holds which token ('balanced' is not available: it is built for one list "
        "of documents, and every step has another)",
    )
    add(
        "--usp-kernel",
        choices=KERNELS,
        default="auto",
        help="attention kernel; auto: the first of the others that supports the dtype and the head "
        "dim on this device; the run's first lines name it",
    )


def _memory(parser: argparse.ArgumentParser) -> None:
    """The same names and meanings as in the patched Megatron-DeepSpeed."""
    group = parser.add_argument_group("memory", "what a layer does not save for its backward pass")
    add = group.add_argument
    add(
        "--usp-recompute",
        choices=framework_caps("megatron-deepspeed").recompute,
        default="none",
        help="recomputed in backward: nothing, norms and activation functions (gemm-last), all but "
        "attention and its exchanges (attention), or everything (full)",
    )
    add(
        "--usp-offload-ratio",
        type=KeywordOr(AUTO, Number(0, 1)),
        default=0.0,
        metavar="R",
        help="fraction, 0 to 1, of the saved activations to offload to CPU memory; auto: the "
        "smallest with which the model fits by the planner's formulas",
    )
    add(
        "--usp-loss-chunks",
        type=Integer(0),
        default=0,
        metavar="N",
        help="compute the loss in N chunks of tokens and never hold all logits; 0: all logits",
    )


def _model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--num-layers", type=COUNT, default=4, metavar="N", help="transformer layers")
    add("--hidden-size", type=COUNT, default=128, metavar="N", help="width")
    add("--ffn-hidden-size", type=COUNT, metavar="N", help="MLP width (default: 4 x, SwiGLU 8/3 x)")
    add("--num-attention-heads", type=COUNT, default=8, metavar="N", help="query heads")
    add("--num-key-value-heads", type=COUNT, metavar="N", help="KV heads (default: all, no GQA)")
    add("--seq-length", type=COUNT, default=1024, metavar="N", help="tokens per sequence")
    add("--max-position-embeddings", type=COUNT, metavar="N", help="(default: the sequence length)")
    add(
        "--use-rotary-position-embeddings",
        action=SWITCH,
        default=False,
        help="instead of learned ones",
    )
    add(
        "--rotary-base",
        type=Number(1, above=True),
        default=10000.0,
        metavar="X",
        help="base of the angles",
    )
    add("--normalization", choices=("layernorm", "rmsnorm"), default="layernorm", help="which one")
    add("--layernorm-epsilon", type=POSITIVE, default=1e-5, metavar="X", help="of either norm")
    add("--swiglu", action=SWITCH, default=False, help="gated SiLU instead of GELU")
    add("--disable-bias-linear", action=SWITCH, default=False, help="no bias in linear layers")
    add(
        "--untie-embeddings-and-output-weights",
        action=SWITCH,
        default=False,
        help="two matrices, not one",
    )
    add(
        "--init-method-std",
        type=POSITIVE,
        default=0.02,
        metavar="X",
        help="of normal initialization",
    )
    add("--attention-dropout", type=FRACTION, default=0.0, metavar="P", help="only 0 is exact here")
    add("--hidden-dropout", type=FRACTION, default=0.0, metavar="P", help="only 0 is exact here")
    add("--make-vocab-size-divisible-by", type=COUNT, default=128, metavar="N", help="by padding")


def _training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--micro-batch-size", type=COUNT, default=1, metavar="N", help="sequences per replica")
    add(
        "--global-batch-size",
        type=COUNT,
        metavar="N",
        help="sequences per step (default: micro x dp)",
    )
    add(
        "--train-iters",
        type=COUNT,
        default=100,
        metavar="N",
        help="steps in all, with resumed ones",
    )
    add(
        "--optimizer", choices=("adam", "sgd"), default="adam", help="adam: decoupled decay (AdamW)"
    )
    add("--lr", type=Number(), default=1e-3, metavar="X", help="peak learning rate")
    add(
        "--min-lr",
        type=Number(),
        default=0.0,
        metavar="X",
        help="learning rate at the end of decay",
    )
    add(
        "--lr-decay-style", choices=("constant", "linear", "cosine"), default="cosine", help="shape"
    )
    add("--lr-decay-iters", type=COUNT, metavar="N", help="steps (default: --train-iters)")
    add(
        "--lr-warmup-iters", type=Integer(0), default=0, metavar="N", help="steps of linear warm-up"
    )
    add("--weight-decay", type=Number(), default=0.01, metavar="X", help="on matrices only")
    add("--clip-grad", type=Number(), default=1.0, metavar="X", help="global norm; 0: no clipping")
    add("--adam-beta1", type=FRACTION, default=0.9, metavar="X", help="first moment")
    add("--adam-beta2", type=FRACTION, default=0.95, metavar="X", help="second moment")
    add("--adam-eps", type=POSITIVE, default=1e-8, metavar="X", help="added to the denominator")
    add("--sgd-momentum", type=FRACTION, default=0.0, metavar="X", help="with --optimizer sgd")
    add(
        "--seed",
        type=Integer(0, 2**32 - 1),
        default=1234,
        metavar="N",
        help="of weights and data order",
    )
    add(
        "--bf16",
        action=SWITCH,
        default=False,
        help="bf16 weights with fp32 masters (default: fp32)",
    )
    add(
        "--check-for-nan-in-loss-and-grad",
        action=SWITCH,
        default=True,
        help="stop without saving when a loss, a gradient or a weight is not finite",
    )


def _data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    add = group.add_argument
    add(
        "--data-path",
        type=Text("a path"),
        nargs="+",
        metavar="PATH",
        help="UTF-8 text files (read as bytes) or prefixes of Megatron .bin/.idx pairs; a weight "
        "before each makes a blend: 0.3 a 0.7 b (default: CPython's own documentation, which every "
        "installation has)",
    )
    add(
        "--vocab-size",
        type=COUNT,
        metavar="N",
        help="token ids in .bin/.idx data, end of document being N-1 (text files: 257)",
    )
    add(
        "--split",
        type=Ratios(),
        default="95,5,0",
        metavar="A,B,C",
        help="proportions of training, validation and test data",
    )
    add(
        "--data-cache-path",
        type=Text(),
        metavar="DIR",
        help="folder of encoded text (default: OUTPUT_DIR/data)",
    )
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
        help="positions restart at 0 in each document",
    )


def _output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add = group.add_argument
    add(
        "--output-dir",
        type=Text(),
        default="usp_output",
        metavar="DIR",
        help="for metrics.jsonl and loss.png",
    )
    add("--quiet", action="store_true", help="write metrics.jsonl and nothing else")
    add("--save", type=Text(), metavar="DIR", help="checkpoints go here")
    add("--load", type=Text(), metavar="DIR", help="continue from the latest checkpoint here")
    add(
        "--overwrite-output",
        action="store_true",
        help="start even if --save holds a later checkpoint, and replace it",
    )
    add(
        "--save-interval",
        type=COUNT,
        metavar="N",
        help="steps between them (default: only the last)",
    )
    add(
        "--log-interval",
        type=COUNT,
        default=10,
        metavar="N",
        help="steps between lines of a log that is not a terminal",
    )
    add(
        "--eval-interval", type=COUNT, metavar="N", help="steps between validations (default: none)"
    )
    add(
        "--exit-interval",
        type=COUNT,
        metavar="N",
        help="save and exit after the first step that N divides (default: never)",
    )
    add(
        "--exit-duration-in-mins",
        type=COUNT,
        metavar="N",
        help="save and exit after N minutes (default: never)",
    )
    add("--eval-iters", type=COUNT, default=4, metavar="N", help="global batches per validation")


def _logging(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging", "the numbers of metrics.jsonl, written by rank 0")
    add = group.add_argument
    add("--tensorboard-dir", type=Text(), metavar="DIR", help="event files of TensorBoard")
    add("--wandb-project", type=NAME, metavar="NAME", help="project of Weights & Biases")
    add("--wandb-exp-name", type=NAME, metavar="NAME", help="its run (default: wandb's choice)")
    add("--wandb-save-dir", type=Text(), metavar="DIR", help="its files (default: wandb's choice)")
