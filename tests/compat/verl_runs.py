"""verl's own FSDP engines on a tiny model: what ranks run in test_verl.py, and on two GPUs
scripts/check_verl.py."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from ds_usp.compat.verl import install

LENGTHS = ((3, 8), (5, 14), (4, 1), (2, 11), (7, 9), (6, 12))  # prompts and responses
VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
}
LEARNING_RATE = 1e-2

os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # verl registers no engines for CPUs; these run


def use_cpu() -> None:
    """Give verl CPUs by its interface for platforms; it has none for them."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Platform(PlatformCUDA):
        device_name, device_module = "cpu", torch.cpu

        def current_device(self) -> str:
            return "cpu"

        def communication_backend_name(self) -> str:
            return "gloo"

    set_platform(Platform())


def save_model(folder: Path, kind: str = "Qwen3", head: str = "CausalLM", **sizes: Any) -> None:
    """Write a tiny model with weights of order one."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "num_labels": 1, **sizes})
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}For{head}")(config)
    for index, weight in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(index)
        spread = 0.3 if weight.ndim > 1 else 0.5
        weight.data = spread * torch.randn(weight.shape, generator=generator) + (weight.ndim == 1)
    model.save_pretrained(folder)


def engine_of(
    folder: Path, sp: int, ring: int | None, role: str = "actor", strategy: str = "fsdp2", **more: Any
) -> Any:
    """An engine as verl's workers make it. ``sp`` 1: padded rows and torch's attention, which needs
    none of what is tested."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    kind = "value_model" if role == "critic" else "language_model"
    model = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        model_type=kind,
        override_config={"attn_implementation": "sdpa" if sp == 1 else "flash_attention_2"},
        use_remove_padding=sp > 1,
        **more,
    )
    given = {} if ring is None else {"ring_degree": ring}
    config = FSDPEngineConfig(
        strategy=strategy,
        ulysses_sequence_parallel_size=sp,
        forward_only=role == "ref",
        mixed_precision=dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"),
        model_dtype="fp32",
        use_torch_compile=False,
        use_dynamic_bsz=False,
        **given,
    )
    optimizer = FSDPOptimizerConfig(
        lr=LEARNING_RATE, total_training_steps=4, lr_warmup_steps=0, clip_grad=1e9, weight_decay=0.0,
        optimizer="SGD", optimizer_impl="torch.optim",
    )
    engine = EngineRegistry.new(
        model_type=kind,
        backend=strategy,
        model_config=model,
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    # flash-attn is not there on CPUs; what is tested calls no function of it.
    allowed = mock.patch.object(
        transformers.PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True
    )
    with allowed, mock.patch.multiple(
        "transformers.modeling_utils",
        lazy_import_flash_attention=mock.DEFAULT,
        lazy_import_paged_flash_attention=mock.DEFAULT,
    ):
        engine.initialize()
    return engine


def batch_of(engine: Any, role: str) -> Any:
    """This data-parallel rank's samples, as the driver sends them to workers."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    each = len(LENGTHS) // size
    chosen = range(rank * each, (rank + 1) * each)

    def nested(make: Any) -> Tensor:
        rows = [make(torch.Generator().manual_seed(n), *LENGTHS[n]) for n in chosen]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def numbers(g: torch.Generator, _: int, response: int) -> Tensor:
        return torch.randn(response, generator=g)

    def ids(g: torch.Generator, prompt: int, response: int) -> Tensor:
        return torch.randint(3, VOCAB, (prompt + response,), generator=g)

    def mask(_: torch.Generator, prompt: int, response: int) -> Tensor:
        return torch.cat([torch.zeros(prompt), torch.ones(response)])

    fields = {
        "input_ids": nested(ids),
        "position_ids": nested(lambda _, p, r: torch.arange(p + r)),
        "prompts": nested(lambda g, p, r: ids(g, p, r)[:p]),
        "responses": nested(lambda g, p, r: ids(g, p, r)[p:]),
        "response_mask": nested(lambda _, p, r: torch.ones(r, dtype=torch.int64)),
        "loss_mask": nested(mask),
        "old_log_probs": nested(lambda g, p, r: numbers(g, p, r) * 0.1 - 4),
        "ref_log_prob": nested(lambda g, p, r: numbers(g, p, r) * 0.1 - 4),
        "advantages": nested(numbers),
        "values": nested(lambda g, p, r: numbers(g, p, r) * 0.1),
        "returns": nested(numbers),
    }
    data = TensorDict(fields, batch_size=[each])
    tu.assign_non_tensor(
        data,
        temperature=0.7,
        use_remove_padding=engine.use_remove_padding,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=each,
        global_batch_size=len(LENGTHS),
        use_fused_kernels=engine.model_config.use_fused_kernels,
        calculate_entropy=role == "actor",
        pad_token_id=0,
    )
    return data


def loss_of(role: str) -> Any:
    """verl's own PPO loss of the actor, with entropy and KL, or of the critic."""
    from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, FSDPOptimizerConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    sizes = {"ppo_micro_batch_size_per_gpu": 1, "strategy": "fsdp2"}
    optim = FSDPOptimizerConfig(lr=LEARNING_RATE)
    if role == "critic":
        return partial(value_loss, config=FSDPCriticConfig(optim=optim, **sizes))
    config = FSDPActorConfig(
        optim=optim, rollout_n=1, use_kl_loss=True, entropy_coeff=0.01, **sizes
    )
    return partial(ppo_loss, config=config)


def numbers_of(engine: Any, role: str) -> dict[str, Tensor]:
    """Outputs for every token of every sample, of all data-parallel ranks, then one update: loss,
    norm of the gradient, and the weights after it."""
    device = next(engine.module.parameters()).device
    with engine.eval_mode():
        outputs = engine.infer_batch(batch_of(engine, role))["model_output"]
    # The label of a sample's last token is the first of whatever is packed behind it.
    numbers = {
        name: _of_all_samples(engine, value, unused=1 if name == "log_probs" else 0)
        for name, value in outputs.items()
    }
    if role == "ref":
        return numbers
    with engine.train_mode():
        result = engine.train_batch(batch_of(engine, role), loss_of(role))
        loss = torch.tensor(sum(result["loss"]), device=device)
        dist.all_reduce(loss, dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM)
        numbers["loss"] = loss.cpu() / (1 if device.type == "cuda" else dist.get_world_size())
    norm = result["metrics"].get("grad_norm")
    if norm is not None:
        numbers["grad_norm"] = torch.tensor(norm)
    weights, _ = engine.get_per_tensor_param()
    return numbers | {name: weight.detach().cpu() for name, weight in weights}


def _of_all_samples(engine: Any, value: Tensor, unused: int) -> Tensor:
    pieces: list[Any] = [None] * engine.get_data_parallel_size()
    local = torch.cat([row[: len(row) - unused] for row in value.detach().cpu().unbind()])
    dist.all_gather_object(pieces, local, group=engine.get_data_parallel_group())
    return torch.cat(pieces)


def run(ctx: Any, folder: Path, role: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    install()
    if not torch.cuda.is_available():
        use_cpu()
    return numbers_of(engine_of(folder, role=role, **settings), role)
