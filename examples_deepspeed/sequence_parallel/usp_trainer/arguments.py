"""Command line of the trainer: Megatron-DeepSpeed's flag names. Needs no torch.

An error is one line, printed by rank 0, with the range or a suggestion. Types of numbers and paths
are those of ``ds_usp.settings``.
"""

from __future__ import annotations

import argparse
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn

from ds_usp.settings import Integer, Number, Text, add_settings
from usp_trainer import environment
from usp_trainer.transformer_impl import CHOICES

COUNT = Integer(1)
FRACTION = Number(0, 1, below=True)
NONNEGATIVE = Number()
POSITIVE = Number(above=True)
PATH = Text()
NAME = Text("a name")
METAVARS = MappingProxyType({Integer: "N", Number: "X"})
PROGRAM = "trainer"  # of the rows of settings

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
    """The parser; ``tests/unit/test_trainer_flags.py`` freezes its flags."""
    parser = Parser(
        prog="pretrain_gpt_usp.py",
        description="Pretrain a GPT with unified sequence parallelism (Ulysses x Ring) on CPUs or "
        "GPUs: without a launcher, or under torchrun, srun or the deepspeed launcher.",
    )
    for add_group in (_start, _parallel, _memory, _model, _training, _data, _output, _logging):
        add_group(parser)
    return parser


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse a command line; ``--quickstart`` replaces the defaults, flags still override it."""
    parser = build_parser()
    if parser.parse_known_args(argv)[0].quickstart:
        parser.set_defaults(**QUICKSTART)
    return parser.parse_args(argv)


def _group(parser: Parser, title: str, description: str = "") -> tuple[Any, Callable[..., Any]]:
    """A group, and a function that adds a flag: name, type or choices, default, help, metavar."""
    group = parser.add_argument_group(title, description or None)

    def add(
        flag: str, kind: Any, default: Any, text: str, metavar: str | None = None, **more: Any
    ) -> None:
        """Add one flag to the group.

        ``kind``: bool (a ``--flag``/``--no-flag`` pair), a tuple of choices, or argparse's
        ``type``. ``text``: its help. ``more`` goes to ``add_argument``, except for a bool."""
        if kind is bool:
            group.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=default, help=text
            )
        elif isinstance(kind, tuple):
            group.add_argument(flag, choices=kind, default=default, help=text, **more)
        else:
            metavar = metavar or METAVARS.get(type(kind), "DIR")
            group.add_argument(flag, type=kind, default=default, help=text, metavar=metavar, **more)

    return group, add


def _start(parser: Parser) -> None:
    """Add the flags that choose ranks, device and mode (training, quickstart, check only)."""
    group, add = _group(parser, "start")
    group.add_argument(
        "--quickstart",
        action="store_true",
        help="train a small GPT on 4 CPU ranks (ulysses 2 x ring 2), then check that its losses "
        "equal one rank's",
    )
    add(
        "--num-processes",
        COUNT,
        None,
        "ranks to start without a launcher (default: one per GPU; without a GPU, the ranks of one "
        "model replica)",
    )
    group.add_argument(
        "--check-only",
        action="store_true",
        help="check the flags and the files that they name, for --num-processes ranks, and exit; "
        "needs torch for ZeRO stages other than 1 only",
    )
    add("--device", ("auto", "cpu", "cuda"), "auto", "auto: GPUs if any")
    text = "how long ranks wait for one that is lost (default: 10 with NCCL, 30 with gloo)"
    add("--distributed-timeout-minutes", POSITIVE, None, text)
    group.add_argument("--local_rank", "--local-rank", type=Integer(-1), help=argparse.SUPPRESS)


def _parallel(parser: Parser) -> None:
    """Add the flags of the parallel degrees, the ZeRO stage and the attention."""
    group, add = _group(parser, "parallelism", "degrees in ranks; the rest is data parallel")
    add("--ds-sequence-parallel-size", COUNT, 1, "ranks per sequence")
    add_settings(group, PROGRAM, "parallelism")
    add("--tensor-model-parallel-size", COUNT, 1, "ranks per layer")
    add("--pipeline-model-parallel-size", COUNT, 1, "stages")
    add("--zero-stage", tuple(range(4)), 1, "DeepSpeed's ZeRO stage", type=int)
    add_settings(group, PROGRAM, "attention")


def _memory(parser: Parser) -> None:
    group, _ = _group(parser, "memory", "what a layer does not save for its backward pass")
    add_settings(group, PROGRAM, "memory")


def _model(parser: Parser) -> None:
    """Add the flags of the model's sizes and architecture."""
    _, add = _group(parser, "model")
    add("--num-layers", COUNT, 4, "transformer layers")
    add("--hidden-size", COUNT, 128, "width")
    add("--ffn-hidden-size", COUNT, None, "MLP width (default: 4 x, SwiGLU 8/3 x)")
    add("--num-attention-heads", COUNT, 8, "query heads")
    add("--num-key-value-heads", COUNT, None, "KV heads (default: all, no GQA)")
    add("--seq-length", COUNT, 1024, "tokens per sequence")
    add("--max-position-embeddings", COUNT, None, "(default: the sequence length)")
    add("--use-rotary-position-embeddings", bool, False, "instead of learned ones")
    add("--window-size", COUNT, None, "tokens before a token that attention sees (default: all)")
    add("--rotary-base", Number(1, above=True), 10000.0, "base of the angles")
    add("--normalization", ("layernorm", "rmsnorm"), "layernorm", "norm of the layers")
    add("--layernorm-epsilon", POSITIVE, 1e-5, "of either norm")
    add(
        "--transformer-impl",
        CHOICES,
        None,
        "whose linear layers and norms: megatron-core's own or TransformerEngine's (default: "
        "TransformerEngine's where it is installed, on GPUs, with --bf16 and up to ZeRO-2)",
    )
    add("--swiglu", bool, False, "gated SiLU instead of GELU")
    add("--disable-bias-linear", bool, False, "no bias in linear layers")
    add("--untie-embeddings-and-output-weights", bool, False, "two matrices, not one")
    add("--init-method-std", POSITIVE, 0.02, "of normal initialization")
    add("--attention-dropout", FRACTION, 0.0, "only 0 is exact here", "P")
    add("--hidden-dropout", FRACTION, 0.0, "only 0 is exact here", "P")
    add("--make-vocab-size-divisible-by", COUNT, 128, "by padding")


def _training(parser: Parser) -> None:
    """Add the flags of batch sizes, optimizer, learning-rate schedule, seed and precision."""
    _, add = _group(parser, "training")
    add("--micro-batch-size", COUNT, 1, "sequences per replica")
    add("--global-batch-size", COUNT, None, "sequences per step (default: micro x dp)")
    add("--train-iters", COUNT, 100, "steps in all, including those before a resume")
    add("--optimizer", ("adam", "sgd"), "adam", "adam: decoupled decay (AdamW)")
    add("--lr", NONNEGATIVE, 1e-3, "peak learning rate")
    add("--min-lr", NONNEGATIVE, 0.0, "learning rate at the end of decay")
    add("--lr-decay-style", ("constant", "linear", "cosine"), "cosine", "shape")
    add("--lr-decay-iters", COUNT, None, "steps (default: --train-iters)")
    add("--lr-warmup-iters", Integer(0), 0, "steps of linear warm-up")
    add("--weight-decay", NONNEGATIVE, 0.01, "on matrices only")
    add("--clip-grad", NONNEGATIVE, 1.0, "global norm; 0: no clipping")
    add("--adam-beta1", FRACTION, 0.9, "first moment")
    add("--adam-beta2", FRACTION, 0.95, "second moment")
    add("--adam-eps", POSITIVE, 1e-8, "added to the denominator")
    add("--sgd-momentum", FRACTION, 0.0, "with --optimizer sgd")
    add("--seed", Integer(0, 2**32 - 1), 1234, "of weights and data order")
    add("--bf16", bool, False, "bf16 weights with fp32 masters (default: fp32)")
    add(
        "--check-for-nan-in-loss-and-grad",
        bool,
        True,
        "stop without saving when a loss, a gradient or a weight is not finite",
    )


def _data(parser: Parser) -> None:
    """Add the flags of the data, its split into three sets and its document boundaries."""
    _, add = _group(parser, "data")
    add(
        "--data-path",
        Text("a path"),
        None,
        "UTF-8 text files (read as bytes) or prefixes of Megatron .bin/.idx pairs; a weight before "
        "each makes a blend: 0.3 a 0.7 b (default: CPython's own documentation, which every "
        "installation has)",
        "PATH",
        nargs="+",
    )
    add(
        "--vocab-size",
        COUNT,
        None,
        "token ids in .bin/.idx data, end of document being N-1 (text files: 257)",
    )
    add("--split", Ratios(), "95,5,0", "proportions of training, validation and test data", "A,B,C")
    add("--data-cache-path", PATH, None, "folder of encoded text (default: OUTPUT_DIR/data)")
    add("--eod-mask-loss", bool, False, "no loss on end-of-document inputs")
    add("--reset-attention-mask", bool, False, "attention sees its own document only")
    add("--reset-position-ids", bool, False, "positions restart at 0 in each document")


def _output(parser: Parser) -> None:
    """Add the flags of output files, checkpoints, validation and exit."""
    group, add = _group(parser, "output")
    add("--output-dir", PATH, "usp_output", "for metrics.jsonl and loss.png")
    group.add_argument("--quiet", action="store_true", help="write metrics.jsonl and nothing else")
    add("--save", PATH, None, "checkpoints go here")
    add("--load", PATH, None, "continue from the latest checkpoint here")
    group.add_argument(
        "--overwrite-output",
        action="store_true",
        help="start even if --save holds a later checkpoint, and replace it",
    )
    add("--save-interval", COUNT, None, "steps between them (default: only the last)")
    add("--log-interval", COUNT, 10, "steps between lines of a log that is not a terminal")
    add("--eval-interval", COUNT, None, "steps between validations (default: none)")
    add(
        "--exit-interval",
        COUNT,
        None,
        "save and exit after the first step that N divides (default: never)",
    )
    add("--exit-duration-in-mins", COUNT, None, "save and exit after N minutes (default: never)")
    add("--eval-iters", COUNT, 4, "global batches per validation")


def _logging(parser: Parser) -> None:
    _, add = _group(parser, "logging", "the numbers of metrics.jsonl, written by rank 0")
    add("--tensorboard-dir", PATH, None, "event files of TensorBoard")
    add("--wandb-project", NAME, None, "project of Weights & Biases", "NAME")
    add("--wandb-exp-name", NAME, None, "its run (default: wandb's choice)", "NAME")
    add("--wandb-save-dir", PATH, None, "its files (default: wandb's choice)")


# ------------------------------------------------------------------ the parser


class SingleDefaultFormatter(argparse.HelpFormatter):
    """Help texts that state one default: that of the text, or else the value."""

    def _get_help_string(self, action: argparse.Action) -> str:
        """The help text with its default, unless the text states one or there is none to state."""
        text = action.help or ""
        if "default:" in text or action.default in (None, False, argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """No abbreviated flags; an error is one line on rank 0 and exit code 2 on every rank."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=SingleDefaultFormatter, **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> Namespace:
        """Parse the flags; exit with one message that names every unknown flag."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            self.error("; ".join(map(self._unknown_flag_message, flags or unknown)))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Exit with code 2; only rank 0 prints, since all ranks have the same flags."""
        if environment.rank() == 0:
            text = message.removeprefix("argument ")
            print(f"{self.prog}: error: {text} (--help lists all flags)", file=sys.stderr)
        raise SystemExit(2)

    def _unknown_flag_message(self, flag: str) -> str:
        if not flag.startswith("-"):
            return f"{flag!r} belongs to no flag"
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        known = [name for action in shown for name in action.option_strings]
        suggestion = closest_name(flag, known)
        return f"there is no flag {flag}" + (f"; did you mean {suggestion}?" if suggestion else "")


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known flag that is most similar to ``name``, which may be its beginning; None if none is
    similar. Dashes and underscores are the same."""
    names = {candidate.replace("_", "-").strip("-"): candidate for candidate in known}
    given = name.replace("_", "-").strip("-")
    completions = [candidate for candidate in names if candidate.startswith(given)]
    if len(completions) != 1 or len(given) < 3:
        completions = get_close_matches(given, names, 1, 0.8)
    return names[completions[0]] if completions else None


@dataclass(frozen=True)
class Ratios:
    """Fractions of training, validation and test data: three numbers of 0 or more with commas, the
    first above 0. They need not sum to 1."""

    def __call__(self, text: str) -> str:
        """The unchanged text of three ratios, of which the first, for training, is not 0."""
        try:
            ratios = [float(ratio) for ratio in text.split(",")]
        except ValueError:
            ratios = []
        finite = all(math.isfinite(ratio) and ratio >= 0 for ratio in ratios)
        if len(ratios) != 3 or not finite or ratios[0] == 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not {self}")
        return text

    def __str__(self) -> str:
        return "three finite numbers of 0 or more with commas, the first above 0, such as 95,5,0"
