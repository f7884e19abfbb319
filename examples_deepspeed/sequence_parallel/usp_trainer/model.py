"""The GPT, once, as a list of layers: run in a row by DeepSpeed's engine, or cut into stages."""

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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
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
    chunked_weighted_loss,
    local_positions,
    rotary_frequencies,
    weighted_loss,
)
from megatron_patches.megatron_core.gemm_last import recompute_gemm_last
from usp_trainer.memory import layer_memory


class Packing:
    """What is packed in the batch that is computed, where all layers of this rank look it up.

    Attributes:
        params: the documents, as megatron-core's layers take them; None: one a sequence.
        positions: ``[s_local]``, or ``[b, s_local]`` where they start anew with each document.
    """

    def __init__(self, positions: Tensor) -> None:
        self._plain = positions
        self.positions, self.params = positions, None

    def begin(self, positions: Tensor | None, documents: list[list[int]] | None) -> None:
        """A batch: its positions and the borders of each sample's documents."""
        self.positions = self._plain if positions is None else positions
        self.params = None
        if documents is not None:
            longest = max(map(len, documents))
            rows = [[*each, *each[-1:] * (longest - len(each))] for each in documents]
            self.params = PackedSeqParams("sbhd", torch.tensor(rows, dtype=torch.int32))


class Embedding(nn.Module):
    """Token ids ``[b, s_local]`` to hidden states ``[s_local, b, h]``."""

    def __init__(
        self, seed: int, config: TransformerConfig, args: Namespace, packing: Packing
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
            self.output = output_matrix(config, args, own_weight=False)
        self.packing = packing

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens, self.packing.positions.expand_as(tokens))


class Layer(nn.Module):
    """One transformer layer, hidden states in and out."""

    def __init__(
        self,
        seed: int,
        config: TransformerConfig,
        spec: ModuleSpec,
        number: int,
        rotary: Tensor | None,
        memory: LayerMemory,
        packing: Packing,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = TransformerLayer(config, spec.submodules, layer_number=number)
        self.number, self.rotary, self.memory, self.packing = number, rotary, memory, packing
        if memory.recompute == "gemm-last":
            recompute_gemm_last(self.layer)

    def forward(self, hidden: Tensor) -> Tensor:
        # Taken now: when it is computed again, the next batch's documents may be there.
        run = partial(self._run, self.packing.params)
        return self.memory.run(self.number, run, hidden)

    def _run(self, documents: PackedSeqParams | None, hidden: Tensor) -> Tensor:
        hidden, _ = self.layer(
            hidden,
            attention_mask=None,
            rotary_pos_emb=self.rotary,
            packed_seq_params=documents,
        )
        return hidden


class FinalNorm(nn.Module):
    """The norm before the output."""

    def __init__(self, config: TransformerConfig, norm: ModuleSpec | type) -> None:
        super().__init__()
        self.norm = build_module(
            norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Output(nn.Module):
    """Hidden states to what the loss is computed from, with a matrix of its own."""

    def __init__(self, seed: int, config: TransformerConfig, args: Namespace, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.output = output_matrix(config, args, own_weight=True)
        self.loss = loss

    def forward(self, hidden: Tensor, *targets: Tensor) -> Tensor:
        return self.loss.of_output(self.output, hidden, self.output.weight, *targets)


def tied_output(loss: Loss, embedding: Embedding, hidden: Tensor, *targets: Tensor) -> Tensor:
    """The same with the matrix of the embedding."""
    weight = embedding.embedding.word_embeddings.weight
    return loss.of_output(embedding.output, hidden, weight, *targets)


def output_matrix(
    config: TransformerConfig, args: Namespace, *, own_weight: bool
) -> ColumnParallelLinear:
    """The map from hidden states to logits; the tied one is handed its weight at each call."""
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
    """Cross entropy of every token.

    Shapes:
        logits: ``[s_local, b, vocab / tp]``; labels and result: ``[b, s_local]``.
    """
    return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()


class Loss:
    """This rank's part of the loss: from the logits, or in chunks of tokens that never have them.

    Args:
        chunks: how many; 0: all logits at once.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self._weight: Tensor | None = None

    def of_output(
        self, output: nn.Module, hidden: Tensor, weight: Tensor, *targets: Tensor
    ) -> Tensor:
        """The last layer. With labels and loss weights ``[b, s_local]`` the loss; without them (the
        pipeline hands them to :meth:`of_stage`) logits ``[s_local, b, vocab / tp]``, or in chunks
        the hidden states."""
        if self.chunks:
            self._weight = None if targets else weight
            return self._chunked(hidden, weight, *targets) if targets else hidden
        logits = output(hidden, weight=weight)[0]
        return self.of_stage(logits, targets) if targets else logits

    def of_stage(self, given: Tensor, labels_and_weights: Sequence[Tensor]) -> Tensor:
        """The loss of the last stage, from what stands in the label slot of a pipeline's batch."""
        if self.chunks:
            return self._chunked(given, self._weight, *labels_and_weights)
        labels, weights = labels_and_weights
        return weighted_loss(token_losses(given, labels), weights)

    def _chunked(self, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        group = get_tensor_model_parallel_group()
        return chunked_weighted_loss(
            hidden, weight, labels.t(), weights.t(), chunks=self.chunks, tp_group=group
        )


class GPT(nn.Module):
    """All layers in a row; returns this rank's part of the loss."""

    def __init__(self, specs: Sequence[LayerSpec], packing: Packing) -> None:
        super().__init__()
        self.packing = packing
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
        self.packing.begin(positions, documents)
        *calls, output = self.calls
        hidden = tokens
        for call in calls:
            hidden = call(hidden)
        return output(hidden, labels, weights)


def build_model(
    args: Namespace,
    mesh: SequenceMesh,
    layout: TokenLayout,
    groups: ParallelGroups,
    device: torch.device,
) -> nn.Module:
    """This rank's part of the model: all layers, or its pipeline stage."""
    loss = Loss(args.usp_loss_chunks)
    packing = Packing(local_positions(layout, mesh.rank, device))
    specs = layer_specs(args, packing, loss)
    if groups.stages == 1:
        return GPT(specs, packing)
    deepspeed.init_distributed(
        dist.get_backend(), verbose=False
    )  # PipelineModule asks it for ranks
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its partition on rank 0
        return PipelineModule(
            layers=specs,
            topology=PipeModelDataParallelTopology(
                num_pp=groups.stages,
                num_mp=dist.get_world_size(groups.tp),
                num_dp=dist.get_world_size(groups.sp_dp),
            ),
            loss_fn=loss.of_stage,
            partition_method="type:^layer$",
        )


def layer_specs(args: Namespace, packing: Packing, loss: Loss) -> list[LayerSpec]:
    """The model, layer by layer. Weights follow from the seed and the layer alone, not from the
    degrees: megatron-core draws the whole matrix on every rank and keeps its part of it."""
    config = transformer_config(args)
    rotary = None
    if args.use_rotary_position_embeddings:  # relative: the same from any first position
        rotary = rotary_frequencies(packing.positions, config.kv_channels, args.rotary_base)
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    embedding = [Embedding, args.seed, config, args, packing]
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
    memory = layer_memory(args, packing.positions.device)
    return [
        first,
        *(
            LayerSpec(Layer, args.seed + n, config, spec, n, rotary, memory, packing)
            for n in numbers
        ),
        LayerSpec(FinalNorm, config, spec.submodules.input_layernorm),
        last,
    ]


def transformer_config(args: Namespace) -> TransformerConfig:
    """megatron-core's description of the layers. Pipeline stages are DeepSpeed's, so it says 1."""
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
