"""Other projects' own sequence parallelism, with ds_usp's attention behind it as the page shows:
what ranks run in test_other_trainers.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from flash_forward_runs import (
    IGNORED,
    TOKENS,
    alone,
    batch_of,
    build,
    error_of,
    loss_of,
    numbers_of,
    runs_of,
    use_flash,
)
from harness import RankContext
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ds_usp import testing as oracle
from ds_usp.compat import flash_attention_forward as compat
from ds_usp.compat import ring_flash_attn
from ds_usp.compat.flash_attention_forward import patch_flash_attention
from ds_usp.compat.ring_flash_attn import Installed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "usage" / "other-trainers.md"


INSTALLED = "OpenRLHF, axolotl, prime-rl"


def block_of(heading: str) -> str:
    """The page's block of a section."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    return section.partition("```python\n")[2].partition("```")[0]


@contextmanager
def shown(heading: str, **changes: str) -> Iterator[None]:
    """The block has run, with other constants; what it patches is restored in the end."""
    text = block_of(heading)
    for name, value in changes.items():
        text, found = re.subn(rf"^{name} = \S+", f"{name} = {value}", text, flags=re.MULTILINE)
        assert found == 1
    patches = []

    def recorded(*args: Any) -> Any:
        patches.append(patch_flash_attention(*args))
        return patches[-1]

    with mock.patch.object(compat, "patch_flash_attention", recorded):
        exec(compile(text, str(PAGE), "exec"), {"__name__": heading})
        yield
    for patch in patches:
        patch.restore()
    assert len(patches) == 1


def with_labels(rows: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """A batch with each token's own label, as trainers give them."""
    batch = batch_of(rows)
    labels = batch["ids"].masked_fill(batch["real"] == 0, IGNORED)
    for row, (start, _, _) in runs_of(rows):
        labels[row, start] = IGNORED
    return {**batch, "labels": labels}


def llama_factory(
    ctx: RankContext, *, kind: str, rows: tuple[tuple[int, ...], ...], ulysses: int
) -> float:
    """The error of its loss and gradients against one process."""
    from llamafactory.v1.accelerator import interface
    from llamafactory.v1.plugins.model_plugins.parallelization import sequence_parallel

    config = {"cp_size": ctx.world, "cp_mode": "usp", "ulysses_degree": ulysses}
    with mock.patch.object(interface, "init_process_group"):
        interface.DistributedInterface(config)
    model, batch = use_flash(build(kind)), with_labels(rows)
    inputs = {
        "input_ids": batch["ids"],
        "labels": batch["labels"],
        "attention_mask": batch["real"],
        "position_ids": batch["positions"],
        "loss_weights": (batch["labels"] != IGNORED).float(),
    }
    # Its loss moves the batch to the GPU of this rank's number.
    on_cpu = SimpleNamespace(get_rank=lambda: "cpu", all_gather=dist.all_gather, nn=dist.nn)
    with shown("LLaMA-Factory"), mock.patch.object(sequence_parallel, "dist", on_cpu):
        sequence_parallel.SequenceParallelModelPlugin("usp")(model, config)
        loss = sequence_parallel.SequenceParallelLossPlugin("sequence_parallel_loss")(model, inputs)
        have = numbers_of(model, loss)
    for value in have.values():  # every rank has the whole loss, and its trainer takes the mean
        dist.all_reduce(value.div_(ctx.world), group=ctx.group)
    return error_of(have, alone(kind, rows))


def swift(ctx: RankContext, *, kind: str, rows: tuple[tuple[int, ...], ...], ulysses: int) -> float:
    """The error of a loss over its shards, and of the gradients, against one process."""
    from swift.sequence_parallel import SequenceParallel

    model, batch = use_flash(build(kind)), with_labels(rows)
    model.model_info = SimpleNamespace(is_moe_model=False)
    model.model_meta = SimpleNamespace(model_arch=None)
    parallel = SequenceParallel()
    replaced = ("_init_device_mesh", "_prepare_flash_attn")
    own = {name: getattr(SequenceParallel, name) for name in replaced}
    with (
        mock.patch.multiple(SequenceParallel, **own, _global_inited=False),
        shown("ms-swift", ULYSSES_DEGREE=str(ulysses)),
    ):
        parallel.prepare(ctx.world, model, SimpleNamespace(pad_token_id=0), padding_free=True)
        inputs = {
            "input_ids": batch["ids"],
            "labels": batch["labels"],
            "position_ids": batch["positions"],
        }
        parallel.prepare_inputs(inputs)
        labels = inputs.pop("labels")
        logits = model(**inputs, use_cache=False).logits
        count = (batch["labels"] != IGNORED).sum()
        have = numbers_of(model, loss_of(logits, labels) / count)
    for value in have.values():
        dist.all_reduce(value, group=ctx.group)
    return error_of(have, alone(kind, rows))


# ------------------------------------------------------------------ importers of ring_flash_attn


@contextmanager
def installed(ulysses: int) -> Iterator[None]:
    """The page's file is what an import of ring_flash_attn finds first."""
    text, found = re.subn("ulysses_degree=[0-9]+", f"ulysses_degree={ulysses}", block_of(INSTALLED))
    assert found == 1
    before = set(sys.modules)
    with TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
        Path(folder, "ring_flash_attn.py").write_text(text, encoding="utf-8")
        made = []
        with mock.patch.object(
            ring_flash_attn, "install", lambda **given: made.append(Installed(**given))
        ):
            yield
    assert len(made) == 1
    made[0].restore()
    assert "ring_flash_attn" not in sys.modules
    for name in set(sys.modules) - before:  # they hold its functions
        if name.partition(".")[0] in ("openrlhf", "axolotl", "prime_rl"):
            del sys.modules[name]


@contextmanager
def without_init(*names: str) -> Iterator[None]:
    """Packages whose own ``__init__`` is not run, and whose other files are."""
    for name in names:
        parent = sys.modules[name.rpartition(".")[0]].__path__ if "." in name else None
        sys.modules[name] = module_from_spec(PathFinder.find_spec(name, parent))
    yield
    for name in names:
        sys.modules.pop(name, None)


def openrlhf(
    ctx: RankContext, *, kind: str, rows: tuple[tuple[int, ...], ...], ulysses: int
) -> float:
    """The error of a loss of its actor's log-probs, and of the gradients, against one process.

    flash-attn's ``__init__`` loads a CUDA extension; its files that OpenRLHF imports are Python.
    """
    with installed(ulysses), without_init("flash_attn"):
        from openrlhf.models.actor import Actor
        from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy

        strategy = object.__new__(DeepspeedStrategy)
        strategy.ring_attn_size = ctx.world
        strategy.args = SimpleNamespace(ds=SimpleNamespace(ring_attn_head_stride=1))
        names = ("dp", "sp", "tp")
        strategy.setup_ring_attn(init_device_mesh("cpu", (1, ctx.world, 1), mesh_dim_names=names))
        model, batch = use_flash(build(kind)), batch_of(rows)
        actor = Actor(model)
        actor.packing_samples = True
        log_probs = actor(
            batch["ids"],
            attention_mask=batch["real"],
            return_logprobs=True,
            ring_attn_group=strategy.ring_attn_group,
        )
        counts = batch["labels"][:, :-1] != IGNORED
        have = numbers_of(model, -(log_probs * counts).sum() / counts.sum())
    for value in have.values():  # each rank has the whole loss, and its gather sums gradients
        dist.all_reduce(value.div_(ctx.world), group=ctx.group)
    return error_of(have, alone(kind, rows))


def axolotl(
    ctx: RankContext, *, kind: str, rows: tuple[tuple[int, ...], ...], ulysses: int
) -> float:
    """The error of a loss over the shards that its hook makes, and of the gradients."""
    with installed(ulysses), mock.patch.object(torch.cuda, "current_device", lambda: "cpu"):
        from axolotl.utils.ctx_managers.sequence_parallel import SequenceParallelContextManager
        from axolotl.utils.schemas.enums import RingAttnFunc

        model, batch = use_flash(build(kind)), batch_of(rows)
        context = SequenceParallelContextManager(
            models=[model],
            context_parallel_size=ctx.world,
            gradient_accumulation_steps=1,
            ring_attn_func=RingAttnFunc.VARLEN_LLAMA3,
            heads_k_stride=1,
            gather_outputs=False,
            device_mesh=init_device_mesh("cpu", (ctx.world,), mesh_dim_names=("cp",)),
        )
        with context:
            given = {"input_ids": batch["ids"], "position_ids": batch["positions"]}
            logits = model(**given, use_cache=False).logits
        return error_of_shard(ctx, model, logits, kind, rows)


def prime_rl(
    ctx: RankContext, *, kind: str, rows: tuple[tuple[int, ...], ...], ulysses: int
) -> float:
    """The error of a model of transformers under its setup; of its own attention layer too.

    ``__init__`` of two of its packages import its models, which ask for kernels of GPUs.
    """
    with (
        installed(ulysses),
        without_init("prime_rl", "prime_rl.trainer", "prime_rl.trainer.models"),
    ):
        from prime_rl.trainer.models.layers.attn import (
            AttentionConfig,
            FlashAttention,
            substitute_ring_attn,
        )
        from prime_rl.utils.cp import setup_cp_params
        from ring_flash_attn import substitute_hf_flash_attn

        substitute_hf_flash_attn(ctx.group, heads_k_stride=1)
        substitute_ring_attn(ctx.group, heads_k_stride=1, attn_impl="flash_attention_2")
        model, batch = use_flash(build(kind)), batch_of(rows)
        ids, positions = setup_cp_params(
            batch["ids"],
            batch["positions"],
            ctx.rank,
            ctx.world,
            ctx.group,
            seq_lens=torch.tensor(rows[0]),
        )
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        error = error_of_shard(ctx, model, logits, kind, rows)

        torch.manual_seed(2)
        config = AttentionConfig(32, 8, 4, 2, True, False, False, 1e-6)
        layer, whole = FlashAttention(config), torch.randn(1, TOKENS, 32)
        layer.sliding_window = 11
        own, _ = layer(whole.chunk(ctx.world, dim=1)[ctx.rank])
        q, k, v = layer.attn_projections(whole)
        near = oracle.window(range(TOKENS), range(TOKENS), 10, 0)
        near &= oracle.same_document(range(TOKENS), range(TOKENS), rows[0])
        out, _ = oracle.dense_attention(q, k, v, near)
        expected = out.flatten(2).float() @ layer.o_proj.weight.T
        return max(error, oracle.relative_error(own, expected.chunk(ctx.world, dim=1)[ctx.rank]))


def error_of_shard(
    ctx: RankContext, model: Any, logits: Tensor, kind: str, rows: tuple[tuple[int, ...], ...]
) -> float:
    """Of a loss over contiguous shards."""
    labels = batch_of(rows)["labels"]
    loss = loss_of(logits, labels.chunk(ctx.world, dim=1)[ctx.rank]) / (labels != IGNORED).sum()
    have = numbers_of(model, loss)
    for value in have.values():
        dist.all_reduce(value, group=ctx.group)
    return error_of(have, alone(kind, rows))
