"""One way to train a transformers model on long sequences: what ``bench_transformers.py`` times.

Every case trains the same Llama from the same weights on the same batch, with gradient
checkpointing, AdamW and a learning rate of 0, so that the loss of every step is that of the first.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from shapes import packed
from torch import Tensor, nn

Batch = dict[str, Tensor]
SHAPES = {
    "llama3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    # Three layers with a state, then one of attention, as in Qwen3-Next; without its experts.
    "qwen3-next": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "mlp_only_layers": list(range(48)),
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151936,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 211,
    },
}


@dataclass(frozen=True)
class Settings:
    """What all cases of a run have in common.

    Args:
        model: ``NAME/LAYERS`` of :data:`SHAPES`.
        documents: shortest and longest packed document in tokens.
        options: of ``enable``, of the cases of ds_usp.
        attention: transformers' implementation, of the other cases.
        bf16_weights: FSDP2's weights, gradients and moments are bf16 too, not fp32.
    """

    device: torch.device
    model: str
    documents: tuple[int, int]
    options: dict[str, Any]
    attention: str
    bf16_weights: bool = False

    @property
    def fsdp_dtype(self) -> torch.dtype:
        return self.dtype if self.bf16_weights else torch.float32

    @property
    def dtype(self) -> torch.dtype:
        """bf16; fp32 on CPUs, where the losses of all cases are compared exactly."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def new_model(settings: Settings, attention: str, dtype: torch.dtype) -> nn.Module:
    """The model with the weights that every case starts from, those of fp32 in ``dtype``."""
    import transformers

    name, layers = settings.model.split("/")
    values = {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "num_hidden_layers": int(layers),
        "max_position_embeddings": 2**20,
        "use_cache": False,
    }
    config = transformers.AutoConfig.for_model(**{**values, **SHAPES[name]})
    torch.manual_seed(0)
    with settings.device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        ).to(dtype)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def new_batches(settings: Settings, workload: str) -> list[Batch]:
    """The micro batches of ``plain:TOKENS``, ``packed:TOKENS``, or ``tree:PROMPT+NxANSWER``, its
    ``rows:PROMPT+NxANSWER``, packed, and its ``each:PROMPT+NxANSWER``, a row a micro batch; on
    every rank the same."""
    kind, _, tokens = workload.partition(":")
    vocabulary = SHAPES[settings.model.split("/")[0]]["vocab_size"]
    draw = torch.Generator().manual_seed(1)
    if kind in ("tree", "rows", "each"):
        sizes = [int(x) for x in re.split(r"[+x]", tokens)]
        batches = of_answers(answered(sizes, vocabulary, draw), kind)
        return [{name: x.to(settings.device) for name, x in batch.items()} for batch in batches]
    length = int(tokens)
    ids = torch.randint(vocabulary, (1, length), generator=draw)
    positions, labels = torch.arange(length)[None], ids.clone()
    if kind == "packed":
        starts = torch.tensor(packed(length, *settings.documents, seed=0)[:-1])
        positions = positions - starts[torch.searchsorted(starts, positions[0], right=True) - 1]
        labels[0, starts] = -100  # no document predicts the first token of the next
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return [{name: x.to(settings.device) for name, x in batch.items()}]


def answered(sizes: list[int], vocabulary: int, draw: torch.Generator) -> Any:
    """A prompt of ``sizes[0]`` tokens with ``sizes[1]`` answers of ``sizes[2]``, each of which is a
    prompt of what follows in ``sizes``, if anything does."""
    ids = torch.randint(vocabulary, (sizes[0],), generator=draw)
    if len(sizes) == 1:
        return ids
    answers = [answered(sizes[2:], vocabulary, draw) for _ in range(sizes[1])]
    return {"prompt": ids, "answers": answers}


def of_answers(example: Any, kind: str) -> list[Batch]:
    """Answers to a prompt, which are learned: a tree, or rows that repeat the prompt."""
    if kind == "tree":
        from ds_usp.training import PrefixTree

        return [PrefixTree()([example])]
    rows = []
    for parts in paths_of(example):
        row = torch.cat(parts)
        learned = torch.arange(len(row)) >= len(row) - len(parts[-1])
        rows.append((row, row.where(learned, -100), torch.arange(len(row))))
    names = ("input_ids", "labels", "position_ids")
    groups = [rows] if kind == "rows" else [[row] for row in rows]
    return [
        {name: torch.cat(x)[None] for name, x in zip(names, zip(*group, strict=True), strict=True)}
        for group in groups
    ]


def paths_of(example: Any) -> Iterator[list[Tensor]]:
    """The prompts before each answer, and the answer."""
    if isinstance(example, Tensor):
        yield [example]
        return
    for answer in example["answers"]:
        yield from ([example["prompt"], *path] for path in paths_of(answer))


class Training:
    """A case that is ready to train.

    Args:
        loss_of: the loss of this rank for a batch, of which the engine averages gradients.
        backward: of the engine.
        update: the optimizer's step, and zero gradients.
        reported: the loss of the whole batch from this rank's.
        around: what forward and backward run in, which gives the batch of this rank.

    Attributes:
        reserved_bytes: memory that torch's allocator does not count.
    """

    def __init__(
        self,
        loss_of: Callable[[Batch], Tensor],
        backward: Callable[[Tensor], object],
        update: Callable[[], object],
        reported: Callable[[Tensor], Tensor] = Tensor.detach,
        around: Callable[[Batch], AbstractContextManager[Batch]] = nullcontext,
    ) -> None:
        self._loss_of, self._backward, self._update = loss_of, backward, update
        self._reported, self._around = reported, around
        self.reserved_bytes: Callable[[], int] = int
        self.loss = float("nan")

    def step(self, batches: Sequence[Batch], report: bool = False) -> None:
        """Forward and backward of micro batches of as many labels, update; with ``report`` the loss
        is kept, which waits for it."""
        losses = []
        for batch in batches:
            with self._around(batch) as inputs:
                loss = self._loss_of(inputs) / len(batches)
                self._backward(loss)
            losses.append(loss.detach())
        self._update()
        if report:
            self.loss = float(self._reported(torch.stack(losses).sum()))


# ------------------------------------------------------------------ engines


def adamw(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every case; on GPUs fused, the default of transformers' ``Trainer``."""
    fused = settings.device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=0.0, fused=fused)


def zero3(settings: Settings, model: nn.Module, mpu: Any = None) -> Any:
    """DeepSpeed's engine under ZeRO-3."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": settings.dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = adamw(settings, model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    return engine


def start_deepspeed() -> None:
    """Let DeepSpeed know of the ranks that run."""
    import deepspeed

    from ds_usp.training import prepare_deepspeed

    prepare_deepspeed()
    deepspeed.init_distributed(dist_init_required=False)


def fsdp2(settings: Settings, model: nn.Module) -> nn.Module:
    """Shard the layers and the rest by FSDP2, computing in bf16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    ranks = init_device_mesh(settings.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=settings.dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks, mp_policy=policy)
    return fully_shard(model, mesh=ranks, mp_policy=policy)


def of_torch(
    settings: Settings, model: nn.Module, loss_of: Callable[[Batch], Tensor], **more: Any
) -> Training:
    """A case on torch's optimizer."""
    optimizer = adamw(settings, model)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(loss_of, Tensor.backward, update, **more)


# ------------------------------------------------------------------ cases


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, use_cache=False).loss


def ds_usp_case(settings: Settings, ulysses: int, engine: str) -> Training:
    """A model enabled on ulysses x ring, over all ranks."""
    from ds_usp import SequenceMesh
    from ds_usp.integrations.transformers import enable

    if engine == "ZeRO-3":
        start_deepspeed()
    dtype = settings.dtype if engine == "ZeRO-3" else settings.fsdp_dtype
    model, mesh = new_model(settings, "sdpa", dtype), SequenceMesh.from_group(None, ulysses)
    enable(model, mesh, **settings.options)
    if engine == "ZeRO-3":
        sharded = zero3(settings, model)
        training = Training(partial(_loss, sharded), sharded.backward, sharded.step)
    else:
        training = of_torch(settings, fsdp2(settings, model), partial(_loss, model))
    training.reserved_bytes = lambda: mesh.reserved_bytes
    return training


def one_rank_case(settings: Settings, enabled: bool) -> Training:
    """One rank without an engine: transformers as it is, or enabled on a mesh of one rank."""
    from ds_usp import SequenceMesh
    from ds_usp.integrations.transformers import enable

    model = new_model(settings, settings.attention, settings.dtype)
    if enabled:
        enable(model, SequenceMesh.single(), **settings.options)
    return of_torch(settings, model, partial(_loss, model))


def alst_case(settings: Settings) -> Training:
    """DeepSpeed's ALST over all ranks, with its tiled MLP and tiled loss, under ZeRO-3."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    start_deepspeed()
    model = new_model(settings, settings.attention, settings.dtype)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, settings.attention, dist.get_world_size(), micro_batch_size=1
    )
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(tiled_mlp, layer.mlp)
    model.forward = types.MethodType(_tiled_forward, model)
    engine = zero3(settings, model, mpu)
    # For one rank DeepSpeed makes no groups, and attention is not wrapped.
    group = mpu.get_sequence_parallel_group() if mpu else dist.group.WORLD
    return Training(partial(_alst_loss, engine, group), engine.backward, engine.step)


def tiled_mlp(self: nn.Module, x: Tensor) -> Tensor:
    """ALST's example of a tiled MLP: a tile has as many tokens as the hidden size."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def mlp(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
    return TiledMLP.apply(mlp, self, x, math.ceil(x.shape[-2] / x.shape[-1]), weights)


def _tiled_forward(self: Any, shift_labels: Tensor, **inputs: Any) -> Tensor:
    """The sum of this rank's losses, in tiles of 1 GiB of logits."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    def loss_of_tile(self: Any, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm_head(x).float()
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")

    x = self.model(**inputs).last_hidden_state
    tiles = math.ceil(x.shape[1] * self.config.vocab_size * 4 / 2**30)
    weights = [self.lm_head.weight]
    return TiledFusedLogitsLoss.apply(
        loss_of_tile, self, x, shift_labels, None, tiles, weights, "sum"
    )


def _alst_loss(engine: Any, group: Any, batch: Batch) -> Tensor:
    """The batch as UlyssesSPDataLoaderAdapter shards it, and the loss of ALST's tutorial."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    inputs = {name: x for name, x in batch.items() if name != "labels"} | {"shift_labels": labels}
    shard = {name: x.chunk(ranks, dim=1)[rank].contiguous() for name, x in inputs.items()}
    total = engine(**shard, use_cache=False)
    return sum(differentiable.all_gather(total, group=group)) / (labels != -100).sum()


def accelerate_case(settings: Settings) -> Training:
    """What Accelerate does for ``cp_size``: torch's context parallelism, KV gathered and
    masks dropped, over all ranks, under FSDP2."""
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    model = new_model(settings, "sdpa", settings.fsdp_dtype)
    _attach_context_parallel_hooks(model)
    set_rotate_method("allgather")
    ranks = init_device_mesh(settings.device.type, (dist.get_world_size(),))
    around = partial(_context_parallel, ranks)
    loss_of = partial(_loss, fsdp2(settings, model))
    return of_torch(settings, model, loss_of, reported=_mean_over_ranks, around=around)


@contextmanager
def _context_parallel(ranks: Any, batch: Batch) -> Iterator[Batch]:
    """This rank's shard; its mean loss, all ranks having equally many tokens, is averaged."""
    from torch.distributed.tensor.experimental import context_parallel

    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    count = (labels != -100).sum() / dist.get_world_size()
    names = ("input_ids", "position_ids", "labels")
    buffers = [batch["input_ids"].clone(), batch["position_ids"].clone(), labels]
    with context_parallel(
        ranks, buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers)
    ):
        shard = dict(zip(names, buffers, strict=True))
        yield {**shard, "shift_labels": shard["labels"], "num_items_in_batch": count}


def _mean_over_ranks(loss: Tensor) -> Tensor:
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


@dataclass(frozen=True)
class Case:
    """A way to train.

    Args:
        build: called on every rank.
        packed: whether its results are right for packed documents.
        ranks: 1 for one rank; 0: all.
    """

    build: Callable[[Settings], Training]
    packed: bool = True
    ranks: int = 0


def cases(world: int, attention: str) -> dict[str, Case]:
    """All cases by name, for a number of ranks.

    Packed documents: ALST's are right where the core attention reads positions (FlashAttention);
    torch's context parallelism has no documents. transformers alone is right without a cache, on
    sdpa by a mask of tokens x tokens.
    """
    flash = attention.startswith("flash")
    found = {
        "transformers, one rank": Case(partial(one_rank_case, enabled=False), ranks=1),
        "ds_usp 1x1, one rank": Case(partial(one_rank_case, enabled=True), ranks=1),
    }
    for engine in ("ZeRO-3", "FSDP2"):
        for ulysses in (u for u in range(world, 0, -1) if world > 1 and world % u == 0):
            build = partial(ds_usp_case, ulysses=ulysses, engine=engine)
            found[f"ds_usp {ulysses}x{world // ulysses}, {engine}"] = Case(build)
    if world > 1:
        found["ALST, ZeRO-3"] = Case(alst_case, packed=flash)
        found["Accelerate context parallel, FSDP2"] = Case(accelerate_case, packed=False)
    return found
