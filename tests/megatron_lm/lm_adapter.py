"""Megatron-LM's adapter of checkout_runs: tiny runs, weights by name, what ranks record.

It is also the module of the layers of a hybrid model, ``--spec lm_adapter hybrid_stack``.
"""

import ast
import functools
import inspect
import re
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, ClassVar

import checkout_runs
import numpy as np
import recurrent_kernels
import torch
from checkout_runs import Request, drawn_by_name

import megatron_patches
from megatron_patches import Patch, PatchSet, run

TINY = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 4
    --lr 0.1 --min-lr 0.1 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
    --seed 1234 --log-interval 1 --eval-interval 1000 --eval-iters 1 --split 90,5,5 --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 256 --weight-decay 0 --clip-grad 0
    --transformer-impl local --distributed-backend gloo --disable-jit-fuser
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-gradient-accumulation-fusion --no-rope-fusion
"""
# Sensitive to the scale of gradients, which Adam and clipping hide.
SGD = "--optimizer sgd --sgd-momentum 0"
# The distributed optimizer takes Adam alone: lr * g / (|g| + 10) is nearly plain gradient descent.
SGD_BY_ADAM = "--optimizer adam --adam-beta1 0 --adam-eps 10 --lr 1 --min-lr 1"


def flags(
    *, u: int = 1, r: int = 1, tp: int = 1, pp: int = 1, virtual: int = 0, more: str = ""
) -> str:
    """Flags for parallel degrees; ``virtual``: layers of a virtual pipeline stage, 0: none."""
    degrees = (
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--make-vocab-size-divisible-by {128 // tp}"
    )
    if u * r > 1:
        degrees += f" --context-parallel-size {u * r} --ulysses-degree {u}"
    if virtual:
        degrees += f" --num-layers-per-virtual-pipeline-stage {virtual}"
    return f"{degrees} {more}"


class TrainingServer(checkout_runs.Server):
    ADAPTER = __name__
    ENVIRONMENT: ClassVar = {"TORCHDYNAMO_DISABLE": "1"}  # nothing is compiled

    def arguments(self, text: str, folder: Path) -> tuple[str, ...]:
        """The script's arguments: a tiny model, plain gradient descent, and ``text``."""
        data = f"--data-path {self.folder / 'text'} --data-cache-path {self.folder / 'cache'}"
        optimizer = "" if "--optimizer" in text else SGD
        return tuple(f"{TINY} {optimizer} {data} {text}".split())


def start(checkout: Path, folder: Path) -> None:
    """Import what the ranks need, and write what they read."""
    recurrent_kernels.install()
    megatron_patches.prepare("megatron_lm", checkout)
    import pretrain_gpt  # noqa: F401 - for what it imports
    import pretrain_mamba  # noqa: F401

    # They hold functions that the patches are going to replace.
    del sys.modules["pretrain_gpt"], sys.modules["pretrain_mamba"]

    from megatron.core.datasets import helpers
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    helpers.build_sample_idx_int32  # noqa: B018 - compile the index builder before anyone forks
    builder = IndexedDatasetBuilder(f"{folder / 'text'}.bin", dtype=np.int32)
    checkout_runs.write_corpus(builder, folder / "text.idx")
    parse_sources_once(checkout)


def parse_sources_once(checkout: Path) -> None:
    """Read and parse what every run reads and parses again: the sources of patched functions, and
    those of the classes that Megatron-LM makes flags of."""
    inspect.getsource = functools.cache(inspect.getsource)
    ast.parse = functools.cache(ast.parse)
    from megatron.training import arguments

    arguments.add_megatron_arguments(ArgumentParser())
    megatron_patches.patch_set(megatron_patches.framework_of(checkout)).verify()


class Recorder(checkout_runs.Recorder):
    TRAINING = "megatron.training.training"

    def run(self, request: Request) -> None:
        weights = ("megatron.training.training:get_model", set_weights)
        self.watch(request, *([] if request.own_weights else [weights]))
        if request.patched:
            run.main([request.script, *request.flags])
        else:
            run_unpatched(request)

    def loss_and_norm(self, losses: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        loss = losses.get("lm loss")
        return (loss[0] / loss[1] if loss is not None and loss.numel() == 2 else loss), args[6]


def run_unpatched(request: Request) -> None:
    """Run the script as it is, but for what CPUs need."""
    from megatron_patches.megatron_core.cpu_patch_table import training_without_gpu, without_gpu
    from megatron_patches.megatron_lm import missing

    helpers = Patch("megatron.core.datasets.utils:compile_helpers", missing.compile_helpers, "wrap")
    PatchSet("cpu", (*without_gpu(), *training_without_gpu(), helpers)).apply()
    sys.argv = [request.script, *request.flags]
    run.run_as_main(Path(request.script))


def set_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Initial weights that depend on a parameter's name alone, not on its sharding."""
    chunks = original(*args, **kwargs)
    for chunk in chunks:
        layers = {
            name: module.layer_number - 1
            for name, module in chunk.named_modules()
            if type(module).__name__ == "TransformerLayer"
        }
        for name, parameter in chunk.named_parameters():
            with torch.no_grad():
                parameter.copy_(weight_of(plain_name(name, layers), parameter))
    return chunks


def plain_name(name: str, layers: dict[str, int]) -> str:
    """The parameter's name in a model without a pipeline and without expert parallelism.

    Args:
        name: as ``named_parameters`` gives it.
        layers: the number of each layer in the whole model, from 0, by its name in this one.
    """
    from megatron.core import parallel_state
    from megatron.training import get_args

    held = (get_args().num_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first = held * parallel_state.get_expert_model_parallel_rank()
    name = re.sub(r"(?<=local_experts\.)\d+", lambda number: str(first + int(number.group())), name)
    for layer, number in layers.items():
        if name.startswith(f"{layer}."):
            return f"decoder.layers.{number}{name[len(layer) :]}"
    name = re.sub(r"^(module\.)*", "", name)
    if name == "output_layer.weight" and not get_args().untie_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name


def weight_of(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This tensor-parallel rank's shard of a weight that its name alone decides."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    split = getattr(parameter, "tensor_model_parallel", False) or "softmax_offset" in name
    dim = parameter.partition_dim if getattr(parameter, "partition_dim", -1) >= 0 else 0
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    shards, rank = (group.size(), group.rank()) if split else (1, 0)
    shape = list(parameter.shape)
    shape[dim] *= shards
    full = drawn_by_name(name, shape)
    if "norm" in name and name.endswith("weight"):
        full += 1
    if name.endswith("A_log"):
        full -= 4  # decays near 1: with those of the initialization states are soon forgotten
    halves = 2 if get_args().swiglu and "linear_fc1" in name else 1
    parts = full.chunk(halves, dim)  # the gate and the other half are cut for themselves
    return torch.cat([part.chunk(shards, dim)[rank] for part in parts], dim)
