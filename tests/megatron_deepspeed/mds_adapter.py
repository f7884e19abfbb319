"""Megatron-DeepSpeed's adapter of checkout_runs: tiny runs, weights by name, what ranks record."""

import importlib
import json
import re
import runpy
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import checkout_runs
import torch
from checkout_runs import Request, drawn_by_name
from mds_edits import Trace, edit

import megatron_patches
from megatron_patches import run
from megatron_patches.megatron_deepspeed.state import get_state

TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --min-lr 1e-4 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
    --seed 1234 --log-interval 1 --eval-interval 1000 --eval-iters 1 --data-impl mmap
    --split 90,5,5 --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 256
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-gradient-accumulation-fusion --distributed-backend gloo --deepspeed
"""
# Sensitive to the scale of gradients, which Adam and clipping hide.
SGD = "--optimizer sgd --sgd-momentum 0 --lr 0.1 --weight-decay 0 --clip-grad 0"


def flags(
    *,
    sp: int = 1,
    u: int | str | None = None,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    more: str = "",
    config: dict[str, Any] | None = None,
    pipe: bool | None = None,
) -> str:
    """Flags for parallel degrees; ``pipe``: DeepSpeed's pipeline engine, by default if pp > 1."""
    use_pipe = pp > 1 if pipe is None else pipe
    degrees = (
        f"--ds-sequence-parallel-size {sp} --tensor-model-parallel-size {tp} "
        f"--pipeline-model-parallel-size {pp} --zero-stage {zero} "
        f"--make-vocab-size-divisible-by {128 // tp} --config {zero}"
    )
    if u is not None:
        degrees += f" --ulysses-degree {u}"
    if not use_pipe:
        degrees += " --no-pipeline-parallel"
    text = json.dumps(config or {}).replace(" ", "")
    return f"{degrees} --json {text} {more}"


class TrainingServer(checkout_runs.Server):
    """Options of a run:

    * without: a function of megatron_patches.megatron_deepspeed that does nothing, as
      ``file.name``;
    * watch_dropout: record which elements the first dropouts drop;
    * fake_flash: a stub of the flash-attn package, by torch;
    * trace: record which lines of the checkout run;
    * edited: a function of the checkout that raises, as ``package.module:Class.name``.
    """

    ADAPTER = __name__
    ENVIRONMENT: ClassVar = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron wants it under tensor parallelism
        "DS_ACCELERATOR": "cpu",
    }

    def arguments(self, text: str, folder: Path) -> tuple[str, ...]:
        """The script's arguments; ``--config ZERO`` and ``--json TEXT`` become DeepSpeed's file."""
        arguments = text.split()
        settings = {}
        for name in ("--config", "--json"):
            index = arguments.index(name)
            settings[name] = arguments[index + 1]
            del arguments[index : index + 2]
        arguments = [*TINY.split(), *arguments]
        if "--optimizer" not in arguments:
            arguments = [*SGD.split(), *arguments]

        def last(flag: str) -> str:
            return arguments[len(arguments) - 1 - arguments[::-1].index(flag) + 1]

        config = {
            "train_batch_size": int(last("--global-batch-size")),
            "train_micro_batch_size_per_gpu": int(last("--micro-batch-size")),
            "steps_per_print": 1000,
            "gradient_clipping": float(last("--clip-grad")),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": int(settings["--config"])},
            "bf16": {"enabled": "--bf16" in arguments},
            **json.loads(settings["--json"]),
        }
        path = folder / "deepspeed.json"
        path.write_text(json.dumps(config))
        arguments += ["--deepspeed_config", str(path), "--data-path", str(self.folder / "text")]
        return tuple(arguments)


def start(checkout: Path, folder: Path) -> None:
    """Import what the ranks need, and write what they read."""
    megatron_patches.prepare("megatron_deepspeed", checkout)
    sys.argv = [str(checkout)]
    import pretrain_gpt  # noqa: F401 - for what it imports
    from megatron.data import helpers, indexed_dataset

    del sys.modules["pretrain_gpt"]  # it holds functions that the patches are going to replace

    helpers.build_sample_idx  # noqa: B018 - compile the index builder before anyone forks
    builder = indexed_dataset.make_builder(f"{folder / 'text'}.bin", impl="mmap", vocab_size=257)
    checkout_runs.write_corpus(builder, folder / "text.idx")


class Recorder(checkout_runs.Recorder):
    TRAINING = "megatron.training"

    def run(self, request: Request) -> None:
        options, more = request.options, []
        if not request.own_weights:
            more.append(("megatron.training:get_model", set_weights))
        if options.get("watch_dropout"):
            self.seen["dropped"] = []
            more.append(("torch.nn.functional:dropout", self._dropout))
        if options.get("fake_flash"):
            self.seen["flash_calls"] = 0
            self._install_flash()
        if options.get("without"):
            file, name = options["without"].split(".")
            module = importlib.import_module(f"megatron_patches.megatron_deepspeed.{file}")
            setattr(module, name, lambda original, *args: original(*args))
        self.watch(request, *more)
        root = Path(request.script).parent
        if options.get("edited"):
            edited = edit(options["edited"], root, request.folder)
            if edited.name == Path(request.script).name:
                runs = run.run_as_main
                run.run_as_main = lambda _: runs(edited)
        trace = Trace(str(root))
        self.seen["lines"] = trace.lines
        with trace if options.get("trace") else nullcontext():
            self._train(request)

    def _train(self, request: Request) -> None:
        if request.patched:
            run.main([request.script, *request.flags])
            self.seen["sent"] = sum(get_state().mesh.ledger.bytes.values())
        else:
            sys.argv = [request.script, *request.flags]
            runpy.run_path(request.script, run_name="__main__")

    def loss_and_norm(self, losses: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        return losses["lm loss"], args[9][0].get_global_grad_norm()

    def _dropout(self, original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(x, *args, **kwargs)
        if len(self.seen["dropped"]) < 6:
            self.seen["dropped"].append(tuple((out == 0).flatten()[:512].tolist()))
        return out

    def _install_flash(self) -> None:
        """Megatron-DeepSpeed's imports of flash-attn 2, for sequences of one length."""
        import torch.nn.functional as F
        from megatron.model import transformer

        def flash_attn_varlen_func(
            q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, length: int, _: int, dropout_p: float,
            softmax_scale: float | None, causal: bool,
        ) -> torch.Tensor:  # fmt: skip
            self.seen["flash_calls"] += 1
            groups = q.shape[1] // k.shape[1]
            q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal)
            return out.transpose(1, 2).flatten(0, 1)

        package = ModuleType("flash_attn")
        package.__spec__ = ModuleSpec("flash_attn", None)
        sys.modules["flash_attn"] = package
        transformer.flash_attn_varlen_func = flash_attn_varlen_func
        transformer.FlashAttentionBuilder = None  # as it is on CUDA


def set_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Initial weights that depend on a parameter's name alone, not on its sharding."""
    from megatron import get_args

    models = original(*args, **kwargs)
    for name, parameter in models[0].named_parameters():
        _set(plain_name(name, get_args().num_layers), parameter)
    return models


def plain_name(name: str, num_layers: int) -> str:
    """The parameter's name in a model without a pipeline."""
    name = name.removeprefix("module.")
    for prefix in ("language_model.embedding.", "language_model.encoder.", "language_model."):
        name = name.removeprefix(prefix)
    name = name.removeprefix("tied_modules.embed.")
    match = re.match(r"(\d+)\.(.*)", name)
    if not match:
        return name
    index, rest = int(match[1]) - 2, match[2]  # before the layers: a cast and the embedding
    if index < 0:
        return rest
    if index < num_layers:
        return f"layers.{index}.{rest}"
    return f"final_layernorm.{rest}" if index == num_layers else f"output_layer.{rest[8:]}"


def _set(name: str, parameter: torch.nn.Parameter) -> None:
    import deepspeed

    if "layernorm" in name:
        return
    context = deepspeed.zero.GatheredParameters(
        [parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")
    )
    with context, torch.no_grad():
        if parameter.numel():
            parameter.copy_(weight_of(name, parameter))


def weight_of(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This tensor-parallel rank's shard of a weight that its name alone decides."""
    from megatron import get_args
    from megatron.core import parallel_state

    args, shards, rank, dim = get_args(), 1, 0, 0
    if getattr(parameter, "tensor_model_parallel", False):
        dim = parameter.partition_dim
        shards = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    shape = list(parameter.shape)
    shape[dim] *= shards
    sections = [shape[dim]]
    if "query_key_value" in name:
        kv = args.kv_channels * args.num_key_value_heads
        sections = [args.kv_channels * args.num_attention_heads, kv, kv]
    if "dense_h_to_4h" in name and args.swiglu:
        sections = [shape[dim] // 2] * 2
    full = drawn_by_name(name, shape)
    return torch.cat([x.chunk(shards, dim)[rank] for x in full.split(sections, dim)], dim)
