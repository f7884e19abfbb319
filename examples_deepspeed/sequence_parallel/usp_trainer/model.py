"""The GPT as one list of layers, run in sequence or partitioned into DeepSpeed pipeline stages."""

from __future__ import annotations

import contextlib
import io
import math
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from ds_usp import SequenceMesh, TokenLayout
from ds_usp.memory import LayerMemory
from ds_usp.training import (
    ParallelGroups,
    RotaryPositions,
    chunked_weighted_loss,
    local_positions,
    weighted_loss,
)
from megatron_patches.megatron_core.core_attention import USPCoreAttention
from megatron_patches.megatron_core.layer_memory import save_less, without_zero_offset
from megatron_patches.megatron_core.rotary import rotate_in_projection
from usp_trainer import transformer_impl
from usp_trainer.auto_args import planned_run


class Embedding(nn.Module):
    """Token ids ``[b, s_local]`` to hidden states ``[s_local, b, h]``.

    Args:
        positions: ``[s_local]``, of batches that bring none.
    """

    def __init__(
        self, seed: int, config: TransformerConfig, args: Namespace, positions: Tensor
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        rotary = args.use_rotary_position_embeddings
        self.embedding = LanguageModelEmbedding(
            config,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            position_embedding_type="rope" if rotary else "learned_absolute",
        )
        if not args.untie_embeddings_and_output_weights:
            self.output = output_projection(config, args, own_weight=False)
        self.positions = positions

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        positions = self.positions if positions is None else positions
        return self.embedding(tokens, positions.expand_as(tokens))


class Layer(nn.Module):
    """One transformer layer, hidden states in and out."""

    def __init__(
        self,
        seed: int,
        config: TransformerConfig,
        spec: ModuleSpec,
        number: int,
        rotary: RotaryPositions | None,
        memory: LayerMemory,
        mlp_chunks: int,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = TransformerLayer(config, spec.submodules, layer_number=number)
        self.number, self.memory = number, memory
        without_zero_offset(self.layer)
        save_less(self.layer, memory.recompute, mlp_chunks)
        if rotary is not None:
            rotate_in_projection(self.layer, rotary)

    def forward(self, hidden: Tensor, documents: PackedSeqParams | None = None) -> Tensor:
        return self.memory.run(self.number, partial(self._run, documents), hidden)

    def _run(self, documents: PackedSeqParams | None, hidden: Tensor) -> Tensor:
        hidden, _ = self.layer(hidden, attention_mask=None, packed_seq_params=documents)
        return hidden


class FinalNorm(nn.Module):
    """The norm before the output projection."""

    def __init__(self, config: TransformerConfig, norm: ModuleSpec | type) -> None:
        super().__init__()
        self.norm = build_module(
            norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Output(nn.Module):
    """Untied output projection and loss."""

    def __init__(self, seed: int, config: TransformerConfig, args: Namespace, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.output = output_projection(config, args, own_weight=True)
        self.loss = loss

    def forward(self, hidden: Tensor, *targets: Tensor) -> Tensor:
        return self.loss.from_output(self.output, hidden, self.output.weight, *targets)


def tied_output(loss: Loss, embedding: Embedding, hidden: Tensor, *targets: Tensor) -> Tensor:
    """Output projection and loss with the weight of the embedding."""
    weight = embedding.embedding.word_embeddings.weight
    return loss.from_output(embedding.output, hidden, weight, *targets)


def output_projection(
    config: TransformerConfig, args: Namespace, *, own_weight: bool
) -> ColumnParallelLinear:
    """The projection to logits ``[s, b, vocab / tp]``; a tied one gets its weight at each call."""
    return ColumnParallelLinear(
        config.hidden_size,
        args.padded_vocab_size,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
        skip_weight_param_allocation=not own_weight,
    )


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy ``[b, s_local]`` of logits ``[s_local, b, vocab / tp]``."""
    return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()


class Loss:
    """This rank's part of the loss, from all logits or in chunks of tokens.

    Args:
        chunks: number of chunks; 0: all logits in one piece.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self._weight: Tensor | None = None

    def from_output(
        self, output: nn.Module, hidden: Tensor, weight: Tensor, *targets: Tensor
    ) -> Tensor:
        """The last layer. With labels and loss weights ``[b, s_local]`` the loss; without them (a
        pipeline passes them to :meth:`for_stage`) logits ``[s_local, b, vocab / tp]``, or with
        chunks the hidden states."""
        if self.chunks:
            self._weight = None if targets else weight
            return self._chunked(hidden, weight, *targets) if targets else hidden
        logits = output(hidden, weight=weight)[0]
        return self.for_stage(logits, targets) if targets else logits

    def for_stage(self, stage_output: Tensor, labels_and_weights: Sequence[Tensor]) -> Tensor:
        """DeepSpeed's pipeline ``loss_fn``: output of the last stage, labels and loss weights."""
        if self.chunks:
            return self._chunked(stage_output, self._weight, *labels_and_weights)
        labels, weights = labels_and_weights
        return weighted_loss(token_losses(stage_output, labels), weights)

    def _chunked(self, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        group = get_tensor_model_parallel_group()
        return chunked_weighted_loss(
            hidden, weight, labels.t(), weights.t(), chunks=self.chunks, tp_group=group
        )


class GPT(nn.Module):
    """All layers in sequence, without a pipeline; returns this rank's part of the loss."""

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.calls = []
        built: dict[Any, nn.Module] = {}
        for spec in specs:
            key = spec.key if isinstance(spec, TiedLayerSpec) else len(self.layers)
            if key not in built:
                built[key] = spec.build()
                self.layers.append(built[key])
            forward = getattr(spec, "forward_fn", None)
            self.calls.append(partial(forward, built[key]) if forward else built[key])

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        weights: Tensor,
        positions: Tensor | None = None,
        documents: list[list[int]] | None = None,
    ) -> Tensor:
        """The loss of ``tokens, labels, weights``, each ``[b, s_local]``.

        Args:
            positions: ``[b, s_local]`` if they restart in each document.
            documents: cumulative document lengths of each sample.
        """
        embedding, *layers, norm, output = self.calls
        packed = None if documents is None else packed_documents(documents)
        hidden = embedding(tokens, positions)
        for layer in layers:
            hidden = layer(hidden, packed)
        return output(norm(hidden), labels, weights)


def packed_documents(documents: Sequence[Sequence[int]]) -> PackedSeqParams:
    """Cumulative document lengths of each sample as megatron-core's layers take them."""
    longest = max(map(len, documents))
    rows = [[*lengths, *lengths[-1:] * (longest - len(lengths))] for lengths in documents]
    return PackedSeqParams("sbhd", torch.tensor(rows, dtype=torch.int32))


def build_model(
    args: Namespace,
    mesh: SequenceMesh,
    layout: TokenLayout,
    groups: ParallelGroups,
    device: torch.device,
) -> nn.Module:
    """This rank's part of the model: all layers, or its pipeline stage."""
    loss = Loss(args.usp_loss_chunks)
    specs = layer_specs(args, mesh, layout, device, loss)
    if groups.stages == 1:
        return GPT(specs)
    deepspeed.init_distributed(dist.get_backend(), verbose=False)  # which PipelineModule asks
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its partition on rank 0
        return PipelineModule(
            layers=specs,
            topology=PipeModelDataParallelTopology(
                num_pp=groups.stages,
                num_mp=dist.get_world_size(groups.tp),
                num_dp=dist.get_world_size(groups.sp_dp),
            ),
            loss_fn=loss.for_stage,
            partition_method="type:^layer$",
        )


def layer_specs(
    args: Namespace, mesh: SequenceMesh, layout: TokenLayout, device: torch.device, loss: Loss
) -> list[LayerSpec]:
    """The layers of the model. Weights depend on the seed and the layer, not on the degrees:
    megatron-core draws the full matrix on every rank and keeps its shard."""
    config = transformer_config(args)
    positions = local_positions(layout, mesh.rank, device)
    rotary = None
    if args.use_rotary_position_embeddings:  # relative, so documents need no own positions
        rotary = RotaryPositions.of(
            positions, config.kv_channels, args.rotary_base, seq_len=args.seq_length
        )
    spec, norm = megatron_layer(transformer_impl.chosen(args), config)
    core = {"mesh": mesh, "layout": layout, "kernel": args.usp_kernel}
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(USPCoreAttention, params=core)
    embedding = [Embedding, args.seed, config, args, positions]
    if args.untie_embeddings_and_output_weights:
        first = LayerSpec(*embedding)
        last = LayerSpec(Output, args.seed + args.num_layers + 1, config, args, loss)
    else:
        weight = "embedding.word_embeddings.weight"
        first, last = (
            TiedLayerSpec("embedding", *embedding, forward_fn=forward, tied_weight_attr=weight)
            for forward in (None, partial(tied_output, loss))
        )
    numbers = range(1, args.num_layers + 1)
    more = planned_run(args).layer_memory(device), args.usp_mlp_chunks
    layers = [LayerSpec(Layer, args.seed + n, config, spec, n, rotary, *more) for n in numbers]
    return [first, *layers, LayerSpec(FinalNorm, config, norm), last]


def megatron_layer(impl: str, config: TransformerConfig) -> tuple[ModuleSpec, ModuleSpec | type]:
    """megatron-core's layer of a ``--transformer-impl``, and the norm after the last layer."""
    if impl == transformer_impl.LOCAL:
        layer = get_gpt_layer_local_spec(normalization=config.normalization)
        return layer, layer.submodules.input_layernorm
    from megatron.core.extensions.transformer_engine import TENorm

    return get_gpt_layer_with_transformer_engine_spec(), TENorm


def transformer_config(args: Namespace) -> TransformerConfig:
    """megatron-core's configuration of the layers; one stage, since the pipeline is DeepSpeed's."""
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_key_value_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.ds_sequence_parallel_size,
        normalization={"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[args.normalization],
        layernorm_epsilon=args.layernorm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=nn.functional.silu if args.swiglu else nn.functional.gelu,
        add_bias_linear=not args.disable_bias_linear,
        init_method_std=args.init_method_std,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        window_size=(args.window_size, 0) if args.window_size else None,
        bf16=args.bf16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def padded_vocab_size(args: Namespace, vocab_size: int) -> int:
    """Rows of the embedding: rounded up, and the same for every tensor-parallel degree that
    divides ``--make-vocab-size-divisible-by``, so that these train the same model."""
    step = math.lcm(args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)
    return math.ceil(vocab_size / step) * step
