"""A GPT in megatron-core's training loop, whose layers change their core attention between steps.

``GPTModel`` in ``DistributedDataParallel``, the distributed optimizer with gradient reduction and
parameter gathering overlapped, and ``get_forward_backward_func``: what Megatron-LM's
``pretrain_gpt.py`` runs for one step, without its data, logging and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from baselines import load_cudnn
from bench_harness import Session

import ds_usp
import megatron_patches.megatron_core as megatron_core
from ds_usp.planner import ModelShape, load_model

TINY = ModelShape(
    "tiny", 2, 64, 128, 4, 2, 256, rope_theta=10000.0
)  # layers, hidden, ffn, heads, KV heads, vocabulary
SEED = 1234
LAYERS = {"te": "TransformerEngine's layers", "local": "local layers"}


@dataclass(frozen=True)
class Workload:
    """A model and the tokens of a step.

    Args:
        seq_len: tokens of a sequence.
        sequences: of a step, over all ranks, in micro batches of one.
    """

    model: ModelShape
    seq_len: int
    sequences: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """``MODEL[/LAYERS]:TOKENS[:SEQUENCES]``: a model of the planner, or ``tiny``; its first
        layers; tokens, perhaps with K; sequences of a step, by default one."""
        name, tokens, *sequences = text.split(":")
        name, _, layers = name.partition("/")
        model = TINY if name == "tiny" else load_model(name)
        model = replace(model, layers=int(layers)) if layers else model
        seq_len = int(tokens[:-1]) * 1024 if tokens.endswith("K") else int(tokens)
        return cls(model, seq_len, *map(int, sequences or [1]))

    def __str__(self) -> str:
        tokens = f"{self.seq_len // 1024}K" if self.seq_len % 1024 == 0 else f"{self.seq_len}"
        return f"{self.model.name} {self.model.layers} layers {tokens} x {self.sequences}"

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        """Random tokens of all sequences ``[b, s]``, and the labels that follow them."""
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(
            self.model.vocab, (self.sequences, self.seq_len + 1), generator=generator
        )
        return {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(self.sequences, self.seq_len),
            "position_ids": torch.arange(self.seq_len).repeat(self.sequences, 1),
        }


class Training:
    """One model with its optimizer, and the batch that every step trains, in the groups of
    :func:`create_groups`.

    Args:
        layers: a key of :data:`LAYERS`.
        kernels: attention kernels of ds_usp.
        backend: TransformerEngine's: fused, flash or auto.

    The learning rate is 0, which keeps the weights, so that steps can be compared.
    """

    def __init__(
        self,
        session: Session,
        workload: Workload,
        *,
        layers: str,
        kernels: Sequence[str] = ("auto",),
        backend: str = "fused",
        bf16: bool = True,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.session, self.workload = session, workload
        context = parallel_state.get_context_parallel_world_size()
        model_parallel_cuda_manual_seed(SEED)
        torch.manual_seed(SEED)
        self.config = transformer_config(
            workload.model, context, backend, bf16=bf16, on_gpu=session.on_gpu, fused=layers == "te"
        )
        self._meshes = {
            ulysses: ds_usp.SequenceMesh.shared(
                parallel_state.get_context_parallel_group(), ulysses, "ulysses-ring"
            )
            for ulysses in range(context, 0, -1)
            if context > 1 and context % ulysses == 0
        }
        self._model = self._build(layers, kernels)
        self._optimizer = self._wrap(bf16)
        self._attentions: dict[str, list[torch.nn.Module]] = {}
        self._batches = self._shards()
        self.grad_norm = float("nan")

    def _build(self, layers: str, kernels: Sequence[str]) -> Any:
        """The model on this rank's device, in the weights' dtype."""
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt import gpt_layer_specs as specs
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.spec_utils import ModuleSpec

        model, options = self.workload.model, {}
        if layers == "te":
            load_cudnn()
            spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
        else:
            spec = specs.get_gpt_layer_local_spec(
                qk_layernorm=model.qk_norm, normalization=self.config.normalization
            )
        if self._meshes:  # the local layers' own attention refuses context parallelism
            attention, params = self._usp(next(iter(self._meshes)), kernels[0])
            core = ModuleSpec(attention, params=params)
            spec.submodules.self_attention.submodules.core_attention = core
        if not model.learned_positions:
            options = {"position_embedding_type": "rope", "rotary_base": int(model.rope_theta)}
        gpt = GPTModel(
            self.config,
            spec,
            vocab_size=model.padded_vocab(1),
            max_sequence_length=self.workload.seq_len,
            share_embeddings_and_output_weights=model.tied,
            **options,
        ).to(self.session.device)
        return Float16Module(self.config, gpt) if self.config.bf16 else gpt

    def _wrap(self, bf16: bool) -> Any:
        """Wrap the model for data parallelism; the distributed optimizer of it."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            align_param_gather=True,
            use_distributed_optimizer=True,
        )
        self._gpt = self._model.module if bf16 else self._model
        self._model = DistributedDataParallel(self.config, wrapping, self._model)
        options = {"lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0, "clip_grad": 1.0, "bf16": bf16}
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=True,
                overlap_param_gather=True,
                **options,
            ),
            [self._model],
        )
        self.config.grad_scale_func = optimizer.scale_loss
        self.config.no_sync_func = self._model.no_sync
        self.config.param_sync_func = self._model.start_param_sync
        self.config.finalize_model_grads_func = finalize_model_grads
        return optimizer

    def _shards(self) -> list[dict[str, torch.Tensor]]:
        """This rank's tokens of its replica's micro batches, by megatron-core's own slicing."""
        from megatron.core import parallel_state
        from megatron.core.utils import get_batch_on_this_cp_rank

        replicas = parallel_state.get_data_parallel_world_size()
        if self.workload.sequences % replicas:
            raise ValueError(f"{self.workload.sequences} sequences do not divide by {replicas}")
        full = self.workload.batch(SEED)
        rows = range(parallel_state.get_data_parallel_rank(), self.workload.sequences, replicas)
        batches = []
        for row in rows:
            batch = {name: value[row : row + 1] for name, value in full.items()}
            shards = get_batch_on_this_cp_rank(batch)
            batches.append({k: x.to(self.session.device) for k, x in shards.items()})
        return batches

    def _usp(self, ulysses: int, kernel: str) -> tuple[type, dict[str, Any]]:
        """ds_usp's core attention and its parameters in a layer spec."""
        from megatron_patches.megatron_core.core_attention import USPCoreAttention

        mesh = self._meshes[ulysses]
        params = {"mesh": mesh, "layout": "context_parallel", "kernel": kernel}
        return USPCoreAttention, params

    def attend_by(self, name: str) -> None:
        """Give every layer a core attention: ``ds_usp UxR KERNEL``, ``TE p2p``, ``TE a2a``, or
        ``stock``, what the layers have at context-parallel size 1."""
        if name == "stock":
            return
        if name not in self._attentions:
            self._attentions[name] = [self._core(name, i + 1) for i in range(len(self._layers))]
        for layer, core in zip(self._layers, self._attentions[name], strict=True):
            layer.self_attention.core_attention = core

    @property
    def _layers(self) -> Sequence[Any]:
        return self._gpt.decoder.layers

    def _core(self, name: str, number: int) -> torch.nn.Module:
        from megatron.core.transformer.enums import AttnMaskType

        options = {
            "config": self.config,
            "layer_number": number,
            "attn_mask_type": AttnMaskType.causal,
            "attention_type": "self",
        }
        program, kind, *kernel = name.split()
        if program == "TE":
            from megatron.core.extensions.transformer_engine import TEDotProductAttention

            return TEDotProductAttention(**options, cp_comm_type=kind)
        attention, params = self._usp(int(kind.partition("x")[0]), *kernel)
        return attention(**options, **params).to(self.session.device)

    def step(self) -> None:
        """One training step."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        reported = _forward_backward()(
            forward_step_func=_forward_step,
            data_iterator=iter(self._batches),
            model=[self._model],
            num_microbatches=len(self._batches),
            seq_length=self.workload.seq_len,
            micro_batch_size=1,
            forward_only=False,
        )
        _, self.grad_norm, _ = self._optimizer.step()
        self._reported = reported

    def loss(self) -> float:
        """Mean loss of the last step over all tokens of all ranks. Collective."""
        sums = [float(sum(loss for loss, _ in self._reported)), float(len(self._reported))]
        losses, batches = self.session.all_reduced(sums)
        return losses / batches

    def release(self) -> None:
        """Give the meshes' staging buffers back. Collective."""
        for mesh in self._meshes.values():
            mesh.release()

    def reserved_bytes(self) -> int:
        """Bytes of staging buffers that the meshes hold."""
        return sum(mesh.reserved_bytes for mesh in self._meshes.values())


def create_groups(context: int) -> None:
    """Create megatron-core's groups: a context-parallel size, the other ranks data parallel.
    Collective. Every call leaves communicators behind, so models share groups."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=context)


def destroy_groups() -> None:
    """Destroy megatron-core's groups, so that others can be created. Collective."""
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()


def transformer_config(
    model: ModelShape, context: int, backend: str, *, bf16: bool, on_gpu: bool, fused: bool
) -> Any:
    """megatron-core's configuration of a model, as Megatron-LM's training script makes it.

    Args:
        fused: with the kernels that TransformerEngine has.
    """
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if bf16 else torch.float32
    normalization = "LayerNorm" if model.biases else "RMSNorm"
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        context_parallel_size=context,
        normalization=normalization,
        layernorm_epsilon=model.norm_epsilon,
        add_bias_linear=model.biases,
        add_qkv_bias=model.qkv_bias or model.biases,
        gated_linear_unit=model.gated,
        activation_func=torch.nn.functional.silu if model.gated else torch.nn.functional.gelu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=fused,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # The output layer is megatron-core's own, whose fusion is apex's.
        gradient_accumulation_fusion=bool(find_spec("fused_weight_gradient_mlp_cuda")),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_backend=AttnBackend[backend],
        use_cpu_initialization=not on_gpu,
        cp_comm_type="p2p",
    )


@lru_cache(maxsize=1)
def without_gpu() -> None:
    """Replace megatron-core's calls that name CUDA, on machines without a GPU."""
    megatron_core.cpu_fallbacks_patch_set().apply()


def _forward_backward() -> Any:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    """The losses of this rank's tokens, and what makes a loss of them (pretrain_gpt.py)."""
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(_loss, batch["loss_mask"])


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
    """Sum of the losses, tokens, and what is reported: mean loss and tokens."""
    tokens = loss_mask.sum()
    loss = (losses.float().view(-1) * loss_mask.view(-1)).sum()
    return loss, tokens.to(torch.int), (loss.detach() / tokens, tokens)
