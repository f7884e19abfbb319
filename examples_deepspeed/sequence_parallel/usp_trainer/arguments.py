"""Command line of the trainer: Megatron-DeepSpeed's flag names, their ranges and contradictions.

Types of numbers and paths, and the flags that other programs share, are those of
``ds_usp.settings``. Everything that is refused is a ``USPError``, of which one rank prints a line.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from ds_usp import ConfigError, DataError, Degrees, TokenLayout
from ds_usp.settings import Integer, Number, Text, add_settings
from ds_usp.training import check_zero_stage
from megatron_patches.flags import CHECKPOINT_LAYERS_REFUSALS, SHARED_REFUSALS, check_mlp_chunks
from megatron_patches.refusals import refuse

COUNT = Integer(1)
FRACTION = Number(0, 1, below=True)
NONNEGATIVE = Number()
POSITIVE = Number(above=True)
PATH = Text()
PROGRAM = "trainer"  # of the rows of settings

QUICKSTART: Mapping[str, Any] = MappingProxyType(
    {
        "ds_sequence_parallel_size": 4,
        "ulysses_degree": 2,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "seq_length": 1024,
        "micro_batch_size": 2,
        "use_rotary_position_embeddings": True,
        "normalization": "rmsnorm",
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "disable_bias_linear": True,
        "make_vocab_size_divisible_by": 1,
        "train_iters": 60,
        "lr": 2e-3,
        "min_lr": 2e-4,
        "lr_warmup_iters": 8,
        "device": "cpu",
    }
)


def parse(argv: Sequence[str]) -> Namespace:
    """Parse a command line; ``--quickstart`` replaces defaults, which other flags override.

    Raises:
        ConfigError: an unknown flag, or a value out of its range.
    """
    parser = build_parser()
    if "--quickstart" in argv:
        parser.set_defaults(**QUICKSTART)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        near = get_close_matches(unknown[0].partition("=")[0], known, 1, 0.7) or ["--help"]
        parser.error(f"{unknown[0]} is no flag of the trainer; see {near[0]}")
    return args


class Parser(argparse.ArgumentParser):
    """No abbreviated flags; what is wrong is raised, so that one rank prints it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


class DefaultsFormatter(argparse.HelpFormatter):
    """Help texts with their default, where there is one to state."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "default:" in text or action.default in (None, False, argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default)s)"


def build_parser() -> argparse.ArgumentParser:
    """The parser, whose flags ``tests/data/public_api.txt`` lists."""
    parser = Parser(
        prog="pretrain_gpt_usp.py",
        description="Pretrain a GPT with unified sequence parallelism (Ulysses x ring), on CPUs or "
        "GPUs: one rank of torchrun or of the deepspeed launcher.",
        allow_abbrev=False,
        formatter_class=DefaultsFormatter,
    )
    for add_flags in (_start, _parallelism, _model, _training, _data, _output):
        add_flags(parser)
    return parser


def _group(parser: Parser, title: str) -> tuple[Any, Callable[..., None]]:
    """A group, and a function that adds a flag to it: name, type or choices, default, help."""
    group = parser.add_argument_group(title)

    def add(flag: str, kind: Any, default: Any, text: str, **options: Any) -> None:
        """``kind`` is bool (``--flag`` and ``--no-flag``), a tuple of choices, or a type."""
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(kind, tuple):
            options["choices"] = kind
        else:
            options["type"] = kind
            options.setdefault("metavar", {Integer: "N", Number: "X"}.get(type(kind), "DIR"))
        group.add_argument(flag, default=default, help=text, **options)

    return group, add


def _start(parser: Parser) -> None:
    group, add = _group(parser, "start")
    group.add_argument(
        "--quickstart",
        action="store_true",
        help="train a small GPT on 4 CPU ranks (Ulysses 2 x ring 2) that are started here, then "
        "check that their losses and gradient norms equal one process's",
    )
    add("--device", ("auto", "cpu", "cuda"), "auto", "auto: GPUs if any")
    text = "how long ranks wait for one that is lost (default: 10 with NCCL, 30 with gloo)"
    add("--distributed-timeout-minutes", POSITIVE, None, text)
    # Of launchers of DeepSpeed, and of command lines for Megatron-DeepSpeed.
    group.add_argument("--local_rank", "--local-rank", type=Integer(-1), help=argparse.SUPPRESS)
    group.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)


def _parallelism(parser: Parser) -> None:
    group, add = _group(parser, "parallelism and memory")
    add("--ds-sequence-parallel-size", COUNT, 1, "ranks that share a sequence")
    add_settings(group, PROGRAM, "parallelism")
    add("--zero-stage", tuple(range(4)), 1, "DeepSpeed's ZeRO stage", type=int)
    text = "JSON of DeepSpeed's configuration; what flags say must agree"
    add("--deepspeed_config", PATH, None, text, metavar="FILE")
    add("--tensor-model-parallel-size", COUNT, 1, "1: more is Megatron-DeepSpeed's")
    add("--pipeline-model-parallel-size", COUNT, 1, "1: more is Megatron-DeepSpeed's")
    add_settings(group, PROGRAM, "attention")
    add_settings(group, PROGRAM, "memory")


def _model(parser: Parser) -> None:
    _, add = _group(parser, "model")
    add("--num-layers", COUNT, 4, "transformer layers")
    add("--hidden-size", COUNT, 128, "width")
    add("--ffn-hidden-size", COUNT, None, "MLP width (default: 4 x, SwiGLU 8/3 x)")
    add("--num-attention-heads", COUNT, 8, "query heads")
    add("--num-key-value-heads", COUNT, None, "KV heads (default: all, no GQA)")
    add("--seq-length", COUNT, 1024, "tokens per sequence")
    add("--max-position-embeddings", COUNT, None, "(default: the sequence length)")
    add("--use-rotary-position-embeddings", bool, False, "instead of learned ones")
    add("--rotary-base", Number(1, above=True), 10000.0, "base of the angles")
    add("--normalization", ("layernorm", "rmsnorm"), "layernorm", "norm of the layers")
    add("--layernorm-epsilon", POSITIVE, 1e-5, "of either norm")
    add("--swiglu", bool, False, "gated SiLU instead of GELU")
    add("--disable-bias-linear", bool, False, "no bias in linear layers")
    add("--untie-embeddings-and-output-weights", bool, False, "two matrices, not one")
    add("--init-method-std", POSITIVE, 0.02, "of normal initialization")
    add("--attention-dropout", FRACTION, 0.0, "only 0 is exact here", metavar="P")
    add("--hidden-dropout", FRACTION, 0.0, "only 0 is exact here", metavar="P")
    add("--make-vocab-size-divisible-by", COUNT, 128, "by padding")


def _training(parser: Parser) -> None:
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
    add("--seed", Integer(0, 2**31 - 1), 1234, "of weights and data order")
    add("--bf16", bool, False, "bf16 weights with fp32 masters (default: fp32)")


def _data(parser: Parser) -> None:
    _, add = _group(parser, "data")
    text = "a text file, read as bytes, or the prefix of a .bin/.idx (default: CPython's own text)"
    add("--data-path", Text("a path"), None, text, metavar="PATH")
    text = "token ids in .bin/.idx data, end of document being N-1 (text files: 257)"
    add("--vocab-size", COUNT, None, text)
    text = "proportions of training, validation and test data, the last of which is not read"
    add("--split", _ratios, "95,5,0", text, metavar="A,B,C")
    add("--eod-mask-loss", bool, False, "no loss on end-of-document inputs")
    add("--reset-attention-mask", bool, False, "attention sees its own document only")
    add("--reset-position-ids", bool, False, "positions restart at 0 in each document")


def _output(parser: Parser) -> None:
    group, add = _group(parser, "output")
    add("--output-dir", PATH, "usp_output", "for metrics.jsonl and loss.png")
    group.add_argument("--quiet", action="store_true", help="write metrics.jsonl and nothing else")
    add("--save", PATH, None, "checkpoints go here")
    add("--load", PATH, None, "continue from the latest checkpoint here")
    text = "--load what DeepSpeed's ds_to_universal made, for another number of ranks"
    group.add_argument("--universal-checkpoint", action="store_true", help=text)
    add("--save-interval", COUNT, None, "steps between them (default: only the last)")
    add("--log-interval", COUNT, 10, "steps between lines of a log that is not a terminal")
    add("--eval-interval", COUNT, None, "steps between validations (default: none)")
    add("--eval-iters", COUNT, 4, "global batches per validation")
    text = "save and exit after the first step that N divides (default: never)"
    add("--exit-interval", COUNT, None, text)
    add("--exit-duration-in-mins", COUNT, None, "save and exit after N minutes (default: never)")
    add("--tensorboard-dir", PATH, None, "event files of TensorBoard")


def _ratios(text: str) -> tuple[float, float, float]:
    """Three ratios of the data; the first one, of training, is above 0."""
    try:
        train, valid, test = (NONNEGATIVE(part) for part in text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        train = valid = test = 0.0
    if train == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not three numbers of 0 or more with commas, the first above 0: 95,5,0"
        )
    return train, valid, test


def validated(args: Namespace, world_size: int) -> Namespace:
    """The arguments with what follows from them and from the number of ranks: ``ring_degree``,
    ``data_parallel_size``, ``accumulation_steps``, and defaults that depend on other flags.

    ``--ulysses-degree auto`` counts as the largest degree here.

    Raises:
        ConfigError, LayoutError, DataError: with the numbers and the fix, on every rank.
    """
    args = Namespace(**vars(args))
    width = 8 * args.hidden_size // 3 // 64 * 64 if args.swiglu else 4 * args.hidden_size
    args.ffn_hidden_size = args.ffn_hidden_size or max(width, 64)
    args.num_key_value_heads = args.num_key_value_heads or args.num_attention_heads
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    refuse((*SHARED_REFUSALS, *CHECKPOINT_LAYERS_REFUSALS), args)
    _refuse_contradictions(args)
    check_zero_stage(args.zero_stage, stages=1, bf16=args.bf16)
    if args.data_path and not is_text(args.data_path) and not args.vocab_size:
        raise DataError(f"--data-path {args.data_path} is encoded: give its --vocab-size")
    _set_degrees(args, world_size)
    return args


def _refuse_contradictions(args: Namespace) -> None:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    heads, hidden = args.num_attention_heads, args.hidden_size
    no_states = args.zero_stage == 0 and args.optimizer == "sgd"
    problems = {
        f"--tensor-model-parallel-size {tp} and --pipeline-model-parallel-size {pp}: this trainer "
        "shards sequences, data and, by ZeRO, weights. Set MEGATRON_DEEPSPEED_PATH to a checkout "
        "of Megatron-DeepSpeed, which has both, and start the same script": max(tp, pp) > 1,
        f"--num-attention-heads {heads} must divide --hidden-size {hidden}": hidden % heads,
        f"--max-position-embeddings {args.max_position_embeddings} is below --seq-length "
        f"{args.seq_length}": args.max_position_embeddings < args.seq_length,
        f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}, from which the learning rate "
        "decays": args.min_lr > args.lr,
        f"--attention-dropout {args.attention_dropout} --hidden-dropout {args.hidden_dropout}: "
        "over shards dropout would differ from one rank's. Use 0 for both": (
            args.attention_dropout or args.hidden_dropout
        ),
        "--reset-attention-mask and --reset-position-ids are of the same documents: give both, or "
        "neither": args.reset_attention_mask != args.reset_position_ids,
        "--usp-states-on-host: SGD has no states, and ZeRO-0 no master weights: "
        "leave it out": args.usp_states_on_host and no_states,
        "--universal-checkpoint says how to read --load, which is missing": (
            args.universal_checkpoint and not args.load
        ),
    }
    for text, is_wrong in problems.items():
        if is_wrong:
            raise ConfigError(text)


def _set_degrees(args: Namespace, world_size: int) -> None:
    degrees = Degrees(
        sp=args.ds_sequence_parallel_size,
        ulysses=None if args.ulysses_degree == "auto" else args.ulysses_degree,
        world=world_size,
        heads=args.num_attention_heads,
        kv_heads=args.num_key_value_heads,
    ).check(Degrees.FLAGS)
    args.ulysses_degree = degrees.ulysses or degrees.valid_ulysses()[0]
    args.ring_degree = degrees.sp // args.ulysses_degree
    args.data_parallel_size = degrees.dp
    layout = TokenLayout(args.usp_layout, args.seq_length, args.ulysses_degree, args.ring_degree)
    check_mlp_chunks(args, min(map(layout.length, range(layout.degree))))
    one_pass = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or one_pass
    if args.global_batch_size % one_pass:
        fitting = max(one_pass, args.global_batch_size // one_pass * one_pass)
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {args.data_parallel_size} data-parallel replicas = "
            f"{one_pass}. Use --global-batch-size {fitting}"
        )
    args.accumulation_steps = args.global_batch_size // one_pass


def is_text(path: str) -> bool:
    """Whether a ``--data-path`` is a text file, and not the prefix of a ``.bin/.idx`` pair.

    Raises:
        DataError: it is neither.
    """
    pair = [Path(f"{path}{suffix}") for suffix in (".bin", ".idx")]
    if all(file.is_file() for file in pair):
        return False
    if not Path(path).is_file():
        raise DataError(
            f"--data-path {path}: there is no such file, nor {pair[0]} and {pair[1]}. Give a text "
            "file, or the prefix of what Megatron's tools/preprocess_data.py wrote"
        )
    return True
