"""verl's own FSDP engines on a tiny model, and recorded ones where verl is missing: what ranks run
in test_verl.py. On GPUs, with what CPUs cannot run: ``torchrun --nproc-per-node 2
tests/compat/verl_runs.py``."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from flash_forward_runs import SIZES, VOCAB, set_weights
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers.integrations import flash_attention

import ds_usp.compat.verl  # noqa: F401  # as verl's entry point does
from ds_usp.compat import flash_attention_forward as replaced

HAS_VERL = find_spec("verl") is not None
ON_GPU = torch.cuda.is_available()

ALIKE = 18  # tokens with which the prompts of each three samples begin
LENGTHS = ((21, 8), (23, 14), (22, 1), (20, 11), (25, 9), (24, 12)) * 2  # prompts and responses
TRAINED = {**SIZES, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
FP32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
OUTPUTS = ("log_probs", "entropy", "values")
LEARNING_RATE = 8.0  # changes of weights are not lost in the weights
Numbers = dict[str, Tensor]


def config_of(kind: str, **sizes: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**{**TRAINED, "num_labels": 1, **sizes})


def save_model(folder: Path, kind: str = "Qwen3", head: str = "CausalLM", **sizes: Any) -> None:
    config = config_of(kind, **sizes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}For{head}")(config)
    set_weights(model)
    model.save_pretrained(folder)


# ------------------------------------------------------------------ verl's engines

if HAS_VERL:
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # the only engines that it registers
    if find_spec("ray") is None:  # 240 MB, of which engines call nothing
        sys.modules["ray"] = mock.MagicMock()
    if not ON_GPU:
        # By verl's interface for platforms, before its modules ask for the device.
        from verl.plugin.platform import set_platform
        from verl.plugin.platform.platform_cuda import PlatformCUDA

        class _Platform(PlatformCUDA):
            device_name, device_module = "cpu", torch.cpu

            def current_device(self) -> str:
                return "cpu"

            def communication_backend_name(self) -> str:
                return "gloo"

        set_platform(_Platform())
    import verl
    from tensordict import TensorDict
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPCriticConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
    )
    from verl.workers.engine import EngineRegistry
    from verl.workers.utils.losses import ppo_loss, value_loss

    VERL = Path(verl.__file__).parent


def engine_of(
    folder: Path,
    role: str,
    sp: int,
    model: dict[str, Any] | None = None,
    strategy: str = "fsdp2",
    **fields: Any,
) -> Any:
    """An engine as verl's workers make it. With ``sp`` 1 padded rows and torch's attention, which
    need nothing of what is tested."""
    kind = "value_model" if role == "critic" else "language_model"
    attention = "sdpa" if sp == 1 else "flash_attention_2"
    model_config = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        model_type=kind,
        use_remove_padding=sp > 1,
        **{"override_config": {"attn_implementation": attention}, **(model or {})},
    )
    config = FSDPEngineConfig(
        strategy=strategy,
        ulysses_sequence_parallel_size=sp,
        forward_only=role == "ref",
        model_dtype="fp32",
        use_torch_compile=False,
        **{"mixed_precision": FP32, **fields},
    )
    optimizer = FSDPOptimizerConfig(
        optimizer="SGD",
        optimizer_impl="torch.optim",
        lr=LEARNING_RATE,
        weight_decay=0.0,
        clip_grad=1e9,
        total_training_steps=4,
        lr_warmup_steps=0,
    )
    engine = EngineRegistry.new(
        model_type=kind,
        backend=strategy,
        model_config=model_config,
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    with ExitStack() as stack:
        _pretend_flash_attn(stack)
        if not ON_GPU:  # verl pins the memory of a reference
            policy = CPUOffloadPolicy(pin_memory=False)
            name = "verl.workers.engine.fsdp.transformer_impl.CPUOffloadPolicy"
            stack.enter_context(mock.patch(name, lambda **_: policy))
        engine.initialize()
    if sp == 1:  # verl asks for flash attention in a critic whatever the config says
        engine.module.set_attn_implementation("sdpa")
    return engine


def _pretend_flash_attn(stack: ExitStack) -> None:
    """transformers looks for flash-attn before it makes a model, and nothing here calls it."""
    can = mock.patch.object(transformers.PreTrainedModel, "_flash_attn_can_dispatch", _can)
    stack.enter_context(can)
    for name in ("lazy_import_flash_attention", "lazy_import_paged_flash_attention"):
        name = f"transformers.modeling_utils.{name}"
        stack.enter_context(mock.patch(name, create=True))  # of several versions


def _can(*_: Any, **__: Any) -> bool:
    return True


def batch_of(engine: Any, role: str) -> Any:
    """This data-parallel rank's samples, as the driver sends them to workers."""
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    each = len(LENGTHS) // size

    def nested(make: Any) -> Tensor:
        rows = [
            make(torch.Generator().manual_seed(n), *LENGTHS[n])
            for n in range(rank * each, (rank + 1) * each)
        ]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def ids(g: torch.Generator, prompt: int, response: int) -> Tensor:
        group = torch.Generator().manual_seed(1000 + g.initial_seed() // 3)
        begin = torch.randint(3, VOCAB, (ALIKE,), generator=group)
        rest = torch.randint(3, VOCAB, (prompt + response - ALIKE,), generator=g)
        return torch.cat([begin, rest])

    def numbers(g: torch.Generator, _: int, response: int) -> Tensor:
        return torch.randn(response, generator=g)

    fields = {
        "input_ids": nested(ids),
        "position_ids": nested(lambda _, p, r: torch.arange(p + r)),
        "loss_mask": nested(lambda _, p, r: torch.cat([torch.zeros(p), torch.ones(r)])),
        "prompts": nested(lambda g, p, r: ids(g, p, r)[:p]),
        "responses": nested(lambda g, p, r: ids(g, p, r)[p:]),
        "response_mask": nested(lambda _, p, r: torch.ones(r, dtype=torch.int64)),
        "old_log_probs": nested(lambda g, p, r: numbers(g, p, r) * 0.1 - 4),
        "ref_log_prob": nested(lambda g, p, r: numbers(g, p, r) * 0.1 - 4),
        "advantages": nested(numbers),
        "values": nested(lambda g, p, r: numbers(g, p, r) * 0.1),
        "returns": nested(numbers),
    }
    data = TensorDict(fields, batch_size=[each])
    tensordict_utils.assign_non_tensor(
        data,
        temperature=0.7,
        use_remove_padding=engine.use_remove_padding,
        use_fused_kernels=engine.model_config.use_fused_kernels,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=each if each % 2 else each // 2,  # two micro batches
        global_batch_size=len(LENGTHS),
        calculate_entropy=role == "actor",
        pad_token_id=0,
    )
    return data


def loss_of(role: str) -> Any:
    """verl's own PPO loss of the actor, with entropy and KL, or of the critic."""
    sizes = {"ppo_micro_batch_size_per_gpu": 1, "strategy": "fsdp2"}
    optim = FSDPOptimizerConfig(lr=LEARNING_RATE)
    if role == "critic":
        return partial(value_loss, config=FSDPCriticConfig(optim=optim, **sizes))
    more = {"rollout_n": 1, "use_kl_loss": True, "entropy_coeff": 0.01}
    return partial(ppo_loss, config=FSDPActorConfig(optim=optim, **more, **sizes))


def numbers_of(engine: Any, role: str) -> Numbers:
    """Outputs for every token of every sample, of all data-parallel ranks; then of one update the
    loss, the gradient's norm, and what each weight changed by."""
    with engine.eval_mode():
        outputs = engine.infer_batch(batch_of(engine, role))["model_output"]
    # The label of a sample's last token is the first of whatever is packed behind it.
    numbers = {
        name: _of_all_samples(engine, value, unused=int(name == "log_probs"))
        for name, value in outputs.items()
    }
    if role == "ref":
        return numbers
    before = _weights(engine)
    with engine.train_mode():
        result = engine.train_batch(batch_of(engine, role), loss_of(role))
        norm = result["metrics"].get("grad_norm")
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, sum(result["loss"]))
    numbers["loss"] = torch.tensor(sum(losses) / len(losses))
    if norm is not None:
        numbers["grad_norm"] = torch.tensor(norm)
    return numbers | {name: weight - before[name] for name, weight in _weights(engine).items()}


def _weights(engine: Any) -> Numbers:
    weights, _ = engine.get_per_tensor_param()
    return {name: weight.detach().cpu().clone() for name, weight in weights}


def _of_all_samples(engine: Any, value: Tensor, unused: int) -> Tensor:
    pieces: list[Any] = [None] * engine.get_data_parallel_size()
    local = torch.cat([row[: len(row) - unused] for row in value.detach().cpu().unbind()])
    dist.all_gather_object(pieces, local, group=engine.get_data_parallel_group())
    return torch.cat(pieces)


def run_engines(_: Any, cases: list[tuple[Path, dict[str, Any]]]) -> list[Numbers | str]:
    """Of each case its numbers, or the refusal. Engines stay alive, as those of one worker do."""
    results: list[Numbers | str] = []
    engines = []
    for folder, settings in cases:
        try:
            engines.append(engine_of(folder, **settings))
            results.append(numbers_of(engines[-1], settings["role"]))
            if settings.get("share_prefixes"):
                assert engines[-1]._ds_usp_tree is not None, "no prefix was shared"
        except (ValueError, TypeError, AssertionError) as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


# ------------------------------------------------------------------ recorded engines

RECORDED = Path(__file__).with_name("recorded_verl")
DOCUMENTS = (7, 5)


def run_recorded(ctx: Any, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Of sizes and settings the errors of logits and gradients against each document alone, or the
    refusal."""
    sys.path.insert(0, str(RECORDED))
    sys.modules.pop("verl", None)
    results: list[Any] = []
    with ExitStack() as stack:
        _pretend_flash_attn(stack)
        for sizes, settings in cases:
            try:
                config = config_of(**{"kind": "Qwen3"} | sizes)
                results.append(_recorded_errors(ctx, config, settings))
            except (ValueError, TypeError, RuntimeError, AssertionError) as error:
                results.append(f"{type(error).__name__}: {error}")
    return results


def _recorded_errors(ctx: Any, config: Any, settings: dict[str, Any]) -> list[float]:
    from verl.workers.config.engine import FSDPEngineConfig
    from verl.workers.engine.fsdp.transformer_impl import EngineTrainModeCtx, FSDPEngine

    config._attn_implementation = settings.pop("attention", "flash_attention_2")
    # As models of the hub may be.
    stateful, bare_call = settings.pop("stateful", False), settings.pop("bare_call", "")
    documents = settings.pop("documents", DOCUMENTS)
    sp = settings.get("ulysses_sequence_parallel_size", ctx.world)
    engine_config = FSDPEngineConfig(**{"ulysses_sequence_parallel_size": sp} | settings)
    engine = FSDPEngine(SimpleNamespace(hf_config=config), engine_config, None, None)
    with mock.patch.object(transformers.Qwen3PreTrainedModel, "_is_stateful", stateful):
        model = engine._build_module()
    set_weights(model)
    ids = torch.randint(3, VOCAB, (1, sum(documents)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in documents])[None]
    alone = type(model)(type(config)(**config.to_dict()))
    alone.load_state_dict(model.state_dict())
    alone.set_attn_implementation("eager")
    expected = torch.cat([alone(i).logits for i in ids.split(documents, 1)], 1)
    expected.square().sum().backward()
    shard = [x.chunk(sp, 1)[ctx.rank % sp] for x in (ids, positions)]
    with EngineTrainModeCtx(engine):
        if bare_call == "inside":
            _call_without_positions()
        logits = model(input_ids=shard[0], position_ids=shard[1], use_cache=False).logits
        logits.square().sum().backward()
    if bare_call == "outside":
        _call_without_positions()
    errors = [_error(logits, expected.chunk(sp, 1)[ctx.rank % sp])]
    for weight, other in zip(model.parameters(), alone.parameters(), strict=True):
        if sp > 1:
            dist.all_reduce(weight.grad, group=engine.ulysses_parallel_group)
        errors.append(_error(weight.grad, other.grad))
    return errors


def _call_without_positions() -> None:
    qkv = torch.ones(3, 1, 6, 4, 8).unbind()
    flash_attention._flash_attention_forward(*qkv, None, 6, is_causal=True)


def _error(ours: Tensor, other: Tensor) -> float:
    return ((ours - other).abs().max() / other.abs().max()).item()


# ------------------------------------------------------------------ on GPUs


def main() -> None:
    """Both strategies, every role, every ring degree over all ranks, against padded rows on each
    rank; in fp32, then in verl's bf16. Exits with 1 if fp32 is off by more than 1e-5, or if
    attention was not sharded."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    rank = dist.get_rank()
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    if rank == 0:
        save_model(folder / "actor")
        save_model(folder / "critic", head="TokenClassification")
    dist.barrier()
    worst = 0.0
    for strategy in ("fsdp2", "fsdp") if ON_GPU else ("fsdp2",):
        for role in ("actor", "critic", "ref", "actor in bf16"):
            error = compare(folder, strategy, *role.split(" in "))
            worst = max(worst, 0.0 if "bf16" in role and error < float("inf") else error)
    if rank == 0:
        print("worst in fp32", worst, "on", torch.cuda.get_device_name() if ON_GPU else "CPUs")  # noqa: T201
    dist.destroy_process_group()
    sys.exit(worst > 1e-5)


def compare(folder: Path, strategy: str, role: str, precision: str = "fp32") -> float:
    """The largest error of any ring degree; infinite where attention did not see shards."""
    world, worst = dist.get_world_size(), 0.0
    rings = [ring for ring in range(1, world + 1) if world % ring == 0]
    given: dict[str, Any] = {"role": role, "strategy": strategy}
    given["mixed_precision"] = FP32 | {"param_dtype": precision}
    settings = [{"sp": 1}, *({"sp": world, "ring_degree": ring} for ring in rings)]
    # Of each call of a ring degree: tokens here, and of the whole sequence.
    shards: dict[int, set[tuple[int, int]]] = {ring: set() for ring in rings}
    attend = replaced.usp_attention

    def seen(q: Tensor, *args: Any, mesh: Any, mask: Any, **kw: Any) -> Any:
        shards[mesh.ring_degree].add((q.shape[1], mask.documents[0][-1]))
        return attend(q, *args, mesh=mesh, mask=mask, **kw)

    model = folder / ("critic" if role == "critic" else "actor")
    with mock.patch.object(replaced, "usp_attention", seen):
        results = run_engines(None, [(model, given | more) for more in settings])
    reference = results[0]
    for more, numbers in zip(settings, results, strict=True):
        told = [strategy, role, precision, more]
        if isinstance(numbers, str) or isinstance(reference, str):
            worst = float("inf")
            told.append(numbers)
        else:
            errors = {name: _error(x, reference[name]) for name, x in numbers.items()}
            worst = max(worst, *errors.values())
            outputs = [f"{name} {errors[name]:.1e}" for name in OUTPUTS if name in errors]
            told += [*outputs, f"worst {max((x, name) for name, x in errors.items())}"]
        if ring := more.get("ring_degree"):
            told.append(f"attention saw (tokens here, of all) {sorted(shards[ring])}")
            if not shards[ring] or any(here * world != whole for here, whole in shards[ring]):
                worst = float("inf")
                told.append("NOT SHARDED")
        if dist.get_rank() == 0 or "NOT SHARDED" in told:
            print(*told, flush=True)  # noqa: T201
    return worst


if __name__ == "__main__":
    main()
