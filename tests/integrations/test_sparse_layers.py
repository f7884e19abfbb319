"""Attention whose indexer picks the keys: exact with gathered keys, on any layout and batch, and
what is planted is seen."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import hf_trainer_runs
import peft
import pytest
import rl_runs
import torch
import torch.distributed as dist
from cases import mesh_of
from harness import RankContext
from hf_trainer_runs import Split
from model_runs import (
    BOUND,
    judged,
    on_the_mesh,
    packed_batch,
    padded_batch,
    plain_batch,
    reference,
    reference_in_double,
    take_gradients,
    whole_model,
)
from programs import losses_of_first_program
from tiny_models import build
from tiny_towers import TOWERS, build_with_tower
from torch import Tensor, is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GlmMoeDsaConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

import ds_usp
from ds_usp import MeshError
from ds_usp import UnsupportedAttentionError as Unsupported
from ds_usp.integrations.transformers import (
    enable,
    query_chunks,
    recurrent_functions,
    sparse_layers,
)

PAGE = Path(ds_usp.__file__).parents[1] / "docs" / "usage" / "sparse-models.md"
OF_HEADS = "minimax_m3_vl_text"  # each head has blocks of keys of its own
COMPARING = (OF_HEADS, "deepseek_v4")  # positions with counts of a document's tokens
BATCHES: Mapping[str, Callable[[], dict[str, Tensor]]] = {
    "odd": lambda: plain_batch(3, 53),
    "packed": packed_batch,
    "others in each row": lambda: packed_batch((1, 9, 20, 11), (30, 11)),
    "short": lambda: packed_batch((3, 1, 2, 11)),  # nothing is compressed on some ranks
    "right": lambda: padded_batch("right"),
    "left": lambda: padded_batch("left"),
    "left, counted": lambda: counted(padded_batch("left")),
}


def counted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Positions that count from the first real token."""
    return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def sparse_model(model_type: str) -> Any:
    return (build_with_tower if model_type in TOWERS else build)(model_type)


def of_batches(ctx: RankContext, model_type: str) -> dict[str, float]:
    """Errors by layout, mesh, attention, chunks and batch; each rank has the reference of some
    batches."""
    model, errors = sparse_model(model_type), {}
    alone = copy.deepcopy(model)
    names = [x for x in BATCHES if x != ("left" if model_type in COMPARING else "left, counted")]
    share = [name for i, name in enumerate(names) if i % ctx.world == ctx.rank]
    want = {name: reference(model, BATCHES[name]()) for name in share}
    runs = [("zigzag", 1, "eager", "auto"), ("contiguous", 1, "eager", 3)]
    runs += [("balanced", 1, "eager", 1)]
    runs += [("zigzag", 2, "eager", 4)] if ctx.world % 2 == 0 else []
    chunks = 2 if model_type == OF_HEADS else 1  # others attend to latents in chunks
    runs += [("zigzag", 1, "sdpa", chunks)] if type(model)._supports_sdpa else []
    for layout, ulysses, implementation, chunks in runs:
        model.set_attn_implementation(implementation)
        mesh = mesh_of(ulysses)
        with enable(model, mesh, layout=layout, logits="whole", query_chunks=chunks):
            for name in names if layout != "balanced" else set(names) & {"packed"}:
                have = on_the_mesh(model, mesh, BATCHES[name]())
                if name in want:
                    key = f"{layout}, ulysses {ulysses}, {implementation}, {chunks}, {name}"
                    errors[key] = judged(have, want[name], alone, BATCHES[name]())
    return errors


@pytest.mark.parametrize(
    ("model_type", "ranks"),
    [
        ("glm_moe_dsa", 3),
        ("dots3_note_text", 3),
        (OF_HEADS, 3),
        ("deepseek_v4", 3),
        ("qwen4_exp_text", 3),
        ("glm5_next", 4),
        ("hy_v4", 4),
        ("mistral_large4", 4),
        pytest.param("qwen4_exp", 3, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", 3, marks=pytest.mark.slow),
        pytest.param("axk2", 3, marks=pytest.mark.slow),
        pytest.param("hy_v4", 3, marks=pytest.mark.slow),
        pytest.param("mistral_large4", 3, marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", 4, marks=pytest.mark.slow),
    ],
)
def test_every_batch_is_exact(pool, model_type, ranks):
    found = [errors for errors in pool.run(of_batches, ranks, model_type=model_type) if errors]
    wrong = {name: x for errors in found for name, x in errors.items() if not x <= BOUND}
    assert found and not wrong, wrong


# ------------------------------------------------------------------ checkpoints, options


def with_options(ctx: RankContext, model_type: str) -> dict[str, float]:
    """The largest difference of gradients from those without checkpoints and chunks."""
    model, batch, found = sparse_model(model_type), BATCHES["odd"](), {}
    text = model.get_decoder()
    weights = torch.randn(
        1, 53, text.config.hidden_size, generator=torch.Generator().manual_seed(2)
    )

    def train_text(**options: Any) -> dict[str, Tensor]:
        """Its layers are given the tokens, which a model of images makes embeddings of before."""
        with enable(text, mesh_of(1), **options):
            (text(input_ids=batch["input_ids"]).last_hidden_state * weights).sum().backward()
        return take_gradients(text)

    def train(**options: Any) -> dict[str, Tensor]:
        with enable(model, mesh_of(1), **options):
            model(**batch).loss.backward()
        return take_gradients(model)

    def note(name: str, have: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        scale = max(float(g.norm()) for g in want.values())
        found[name] = max(float((have[n] - want[n]).norm()) for n in want) / scale

    note("the text model alone", train_text(query_chunks=3), train_text())
    plain = train()
    note("attention", train(recompute="attention", offload_ratio=0.5, query_chunks=2), plain)
    with mock.patch.object(query_chunks, "LOW_PRECISION", (torch.float32,)):  # summed as of bf16
        note("full", train(recompute="full", query_chunks=3), plain)
    if model_type != "mistral_large4":
        note("loss in chunks", train(loss_chunks=3), plain)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        if reentrant and model_type == "mistral_large4":  # wrong in one process too
            with pytest.raises(Unsupported, match="which a reentrant checkpoint has made"):
                train(query_chunks=2)
        else:
            note(f"reentrant={reentrant}", train(), plain)
            note(f"reentrant={reentrant}, queries in chunks", train(query_chunks=2), plain)
        model.disable_input_require_grads()
        model.gradient_checkpointing_disable()
    assert not [m for m in model.modules() if "forward" in vars(m)]
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {
        "eager"
    }
    return found


@pytest.mark.parametrize("model_type", ["hy_v4", "glm5_next", "mistral_large4", "deepseek_v4"])
def test_checkpoints_and_chunks_change_nothing(pool, model_type):
    for found in pool.run(with_options, 2, model_type=model_type):
        assert max(found.values()) <= BOUND, found


# ------------------------------------------------------------------ what is picked, and sent


def picked_and_sent(ctx: RankContext) -> list[tuple[int, int, int]]:
    """Queries whose keys are not those of one process; bytes sent, and what they should be: all
    queries at once, and in chunks."""
    model, batch, mesh = build("deepseek_v32"), plain_batch(2, 41), mesh_of(1)
    indexers = [m for m in model.modules() if type(m).__name__.endswith("Indexer")]
    picked: dict[int, list[Tensor]] = {id(m): [] for m in indexers}
    for module in indexers:
        module.register_forward_hook(
            lambda m, _, out: picked[id(m)].append(out.long()) if out.numel() else None
        )

    def visible(indices: Tensor, at: Tensor) -> Tensor:
        """What a query picks of what it may see; -1 for the rest, which its mask takes away."""
        return indices.where(indices <= at[None, :, None], -1).sort(-1).values

    whole_model(model, batch)
    alone = {key: visible(x.pop(), torch.arange(41)) for key, x in picked.items()}
    layout = mesh.layout("zigzag", 41)
    places, found = torch.tensor(layout.positions(ctx.rank)), []
    local, latent, index_key = len(places), 16 + 8, 16
    forward = local * (latent + index_key) * (ctx.world - 1)
    backward = (41 - local) * latent  # an index key has no gradient
    for chunks in (1, 3):
        mesh.ledger.bytes.clear()
        with enable(model, mesh, logits="whole", query_chunks=chunks):
            on_the_mesh(model, mesh, batch)
        # Of a chunk, backward is given what forward has picked: the same once more.
        have = {key: visible(torch.cat(x[:chunks], 1), places) for key, x in picked.items()}
        for x in picked.values():
            x.clear()
        other = sum(int((have[k] != alone[k][:, places]).any(-1).sum()) for k in have)
        sent = mesh.ledger.bytes["kv_gather"]
        found.append((other, sent, 2 * 2 * 4 * (forward + backward)))
    # A key and what is compressed of each layer, and of one what is compressed for its indexer.
    of_layers = (16 + 64) + (16 + 32)
    mesh.ledger.bytes.clear()
    with enable(build("deepseek_v4"), mesh) as enabled:
        enabled.model(**batch).loss.backward()
    expected = local * (of_layers + 64) * (ctx.world - 1) + (41 - local) * of_layers
    return [*found, (0, mesh.ledger.bytes["kv_gather"], 2 * 4 * expected)]


def test_picked_keys_are_those_of_one_process_and_latents_are_sent(pool):
    for other, sent, expected in chain(*pool.run(picked_and_sent, 3)):
        assert other == 0
        assert sent == expected


class Largest(TorchDispatchMode):
    """Notes the largest tensor of scores or masks that an operator returns: its last dim has all
    keys."""

    keys, elements = 211, 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x for x in tree_leaves(out) if is_tensor(x) and x.shape[-1:] == (self.keys,)]
        self.elements = max(self.elements, *(x.numel() for x in found), 0)
        return out


def largest_tensors(ctx: RankContext) -> dict[str, list[int]]:
    """Of a training pass: all queries at once, in 10 chunks, in as many as a bound gives."""
    found: dict[str, list[int]] = {}
    for model_type in ("glm_moe_dsa", OF_HEADS):
        model, found[model_type] = build(model_type), []
        for chunks in (1, 10, "auto"):
            with (
                enable(model, mesh_of(1), query_chunks=chunks),
                mock.patch.object(query_chunks, "BYTES_OF_CHUNK", 2**16),
                Largest() as largest,
            ):
                model(**plain_batch(1, Largest.keys)).loss.backward()
            found[model_type].append(largest.elements)
    return found


def test_no_tensor_has_all_queries_and_all_keys(pool):
    first, second = pool.run(largest_tensors, 2)
    for found in zip(first.values(), second.values(), strict=True):
        whole, in_chunks, bounded = map(max, *found)
        assert whole >= 52 * 211 * 4  # scores of each head
        assert in_chunks <= max(64 * 211, whole / 6)  # keys have 64 channels
        assert bounded <= 2**16 / 4


def test_chunks_count_the_latents_that_are_picked():
    with torch.device("meta"):
        layer = GlmMoeDsaAttention(GlmMoeDsaConfig(), 0)
    assert query_chunks.bytes_of_query(layer, 8192, 2) == 2048 * (512 + 64) * 2
    assert query_chunks.bytes_of_query(layer, 2**20, 2) == 2**20 * 32 * 4  # scores


# ------------------------------------------------------------------ what is planted is seen


@contextmanager
def planted(fault: str) -> Iterator[None]:
    gather, seen = sparse_layers.gather_tokens, sparse_layers.seen_keys

    def without_backward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return gather(x.detach(), *args, **kwargs)

    def by_offsets(spec: Any, shard: Any, device: Any, start: int, stop: int) -> Tensor:
        rank, places = shard.call.mesh.rank, torch.arange(shard.layout.seq_len)
        offset = sum(shard.layout.length(r) for r in range(rank))
        return (places <= places[start:stop, None] + offset)[None, None]

    def of_first_chunk(*args: Any) -> Tensor:
        return seen(*args[:-2], 0, args[-1] - args[-2])

    def own_keys(x: Tensor, dim: int, *, mesh: Any, layout: Any) -> Tensor:
        whole = gather(x, dim, mesh=mesh, layout=layout)
        if x.ndim == 4:  # latents
            return whole
        out = torch.full_like(whole, 0.0)
        out[:, layout.positions(mesh.rank)] = whole[:, layout.positions(mesh.rank)]
        return out

    patches = {
        "a gather without its backward": ("gather_tokens", without_backward),
        "offsets for places": ("seen_keys", by_offsets),
        "top-k of a rank's own keys": ("gather_tokens", own_keys),
        "the mask of the first chunk": ("seen_keys", of_first_chunk),
        "": ("seen_keys", seen),
    }
    name, instead = patches[fault]
    with mock.patch(f"{sparse_layers.__name__}.{name}", instead):
        yield


FAULTS = ("", "a gather without its backward", "offsets for places", "top-k of a rank's own keys")
FAULTS = (*FAULTS, "the mask of the first chunk")


def of_rows(chains: Any, rank: int, chunks: int) -> Any:
    """Parts whose keys begin with the row, and not with their document."""
    right = query_chunks.parts_of_documents(chains, rank, chunks)
    return [part._replace(first=0) for part in right]


def own_angles(usp: Any, angles: Any, _: Any) -> Any:
    return tuple(torch.cat([x] * 2, 1)[:, : usp.layout.seq_len] for x in angles)


def without_halo(conv: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return conv(x)


# By class: patches of a module, each of which makes one type's numbers wrong on packed documents.
COUNTED_FAULTS = {
    "glm5_next": [(sparse_layers, "parts_of_documents", of_rows)],
    "deepseek_v4": [
        (sparse_layers, "parts_of_documents", of_rows),
        (sparse_layers, "_counts", lambda usp, *_: torch.arange(usp.length)[None]),
    ],
    "qwen4_exp_text": [
        (sparse_layers, "_angles_of_keys", own_angles),
        (recurrent_functions, "causal_conv", without_halo),
    ],
}


def errors_of_counted(ctx: RankContext) -> dict[str, list[float]]:
    """Of each type, without a fault and with each."""
    found = {}
    for model_type, faults in COUNTED_FAULTS.items():
        model, batch = sparse_model(model_type), packed_batch((9, 21))
        want = reference(model, batch), reference_in_double(model, batch)  # as `judged` has them
        with enable(model, mesh_of(1), logits="whole"):
            found[model_type] = [on_the_mesh(model, mesh_of(1), batch).error(*want)]
            for fault in faults:
                with mock.patch.object(*fault):
                    error = on_the_mesh(model, mesh_of(1), batch).error(*want)
                    found[model_type].append(error)
    return found


def test_wrong_counts_of_documents_are_seen(pool):
    for right, *wrong in pool.run(errors_of_counted, 2)[0].values():
        assert right <= BOUND and min(wrong) > 100 * BOUND


def errors_of_planted(ctx: RankContext) -> list[float]:
    model, batch, errors = build("glm_moe_dsa"), plain_batch(), []
    want = reference(model, batch), reference_in_double(model, batch)
    with enable(model, mesh_of(1), logits="whole", query_chunks=2):
        for fault in FAULTS:
            with planted(fault):
                errors.append(on_the_mesh(model, mesh_of(1), batch).error(*want))
    return errors


def test_what_is_planted_is_seen(pool):
    right, *wrong = pool.run(errors_of_planted, 2)[0]
    assert right <= BOUND
    assert min(wrong) > 100 * BOUND, dict(zip(FAULTS[1:], wrong, strict=True))


# ------------------------------------------------------------------ refusals


class _OwnKeys:
    """A cache whose keys of an indexer are this rank's, as many as there are of all ranks."""

    def update_indexer(self, keys: Tensor, _: int) -> Tensor:
        return torch.cat([keys] * 3, 1)[:, :41]


def refused(ctx: RankContext) -> list[str]:
    found, mesh = [], mesh_of(1)

    def note(error: type[Exception], model: Any, batch: Any, **options: Any) -> None:
        with pytest.raises(error) as caught, enable(model, mesh, **options):
            model(**batch)
        found.append(str(caught.value))

    batch = packed_batch()
    note(Unsupported, build("deepseek_v32", attention_dropout=0.1), batch)
    note(Unsupported, build("deepseek_v32"), batch, share_prefixes=True)
    note(ds_usp.LayoutError, build("deepseek_v32"), batch, layout="striped")
    note(ds_usp.LayoutError, build("deepseek_v32"), batch, query_chunks=21)
    note(ds_usp.ConfigError, build("llama"), batch, query_chunks=2)
    replaced = build("deepseek_v32")
    attention = replaced.model.layers[0].self_attn
    attention.forward = partial(type(attention).forward, attention)
    note(Unsupported, replaced, batch)
    note(ds_usp.DataError, build(OF_HEADS), padded_batch("left"))
    alone = build("deepseek_v32")
    alone.model.layers[0].self_attn.indexer.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "past_key_values": _OwnKeys()}),
        with_kwargs=True,
    )
    note(Unsupported, alone, plain_batch())
    failing = build("deepseek_v32")

    def fail(*_: Any) -> None:  # after the first gather: the other rank waits for the second
        if ctx.rank:
            raise OSError("full")

    failing.model.layers[0].self_attn.indexer.register_forward_pre_hook(fail)
    # Of a group of its own: it fails for good, and other tests have the mesh of all ranks.
    mesh = ds_usp.SequenceMesh.from_group(dist.new_group(), 1)
    note(OSError if ctx.rank else MeshError, failing, plain_batch())
    return found


def test_what_is_not_served_is_refused_on_every_rank(pool):
    for texts in pool.run(refused, 2):
        dropout, tree, striped, many, dense, replaced, blocks, alone, failed = texts
        assert "query_chunks=21, and a rank has 20 of the 41 tokens" in many
        assert "query_chunks=2" in dense and "no layers whose indexer" in dense
        assert "layout='striped'" in striped
        assert "or those of its indexer" in alone
        assert "full" in failed
        assert "attention_dropout=0.1" in dropout
        assert "picks keys by an indexer" in tree and "share_prefixes" in tree
        assert "its forward is not transformers' own" in replaced
        assert "token 13 of row 1 has positions 13 to 40 for 28 tokens" in blocks


# ------------------------------------------------------------------ trainers


def trained(
    ctx: RankContext, run: str, split: Split, model_type: str = "glm_moe_dsa", **options: Any
) -> tuple[Any, ...]:
    """Losses, weights of a few steps of a trainer, all but one rank's with queries in chunks."""
    model, attach = build(model_type), rl_runs.attach
    model.generation_config.update(eos_token_id=2, pad_token_id=0)
    lora = partial(peft.LoraConfig, target_modules="all-linear")  # PEFT knows none of this model

    def in_chunks(trainer: Any, mesh: Any, **_: Any) -> None:
        attach(trainer, mesh, query_chunks=2)

    modules = hf_trainer_runs, rl_runs
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "tiny_model", lambda *_, **__: model))
            patches.enter_context(mock.patch.object(module, "attach", in_chunks))
        patches.enter_context(mock.patch.object(peft, "LoraConfig", lora))
        module = rl_runs if run == "run_rl" else hf_trainer_runs
        done = getattr(module, run)(ctx, split=split, max_steps=2, **options)
    unset_hf_deepspeed_config()  # models of the next case are whole
    losses = [x["loss"] for x in done.logs] if run == "run_rl" else done.losses
    return losses, done.weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "engine", "options"),
    [
        ("run_trainer", "ddp", {}),
        ("run_sft", "zero3", {"packing": True}),
        ("run_sft", "fsdp2", {"packing": True, "lora": True}),
        ("run_rl", "zero3", {"seed": 3}),
        ("run_rl", "fsdp2", {"seed": 3}),
        # Packed, these count blocks and windows across documents in one process.
        ("run_sft", "fsdp2", {"model_type": "qwen4_exp_text"}),
        ("run_sft", "zero3", {"model_type": "qwen4_exp_text"}),
        ("run_sft", "zero3", {"model_type": "minimax_m3_vl_text"}),
    ],
)
def test_trainers_train_as_on_one_rank(pool, run, engine, options):
    if run == "run_sft":  # indexers have no gradient
        options = {**options, "ddp_find_unused_parameters": True}
    losses, weights = pool.run(trained, 1, run=run, split=Split(), **options)[0]
    have, moved = pool.run(trained, 2, run=run, split=Split(1, 2, engine), **options)[0]
    assert have == pytest.approx(losses, rel=1e-5)
    for want, x in zip(weights, moved, strict=True):
        assert float((x - want).norm()) <= 1e-5 * float(want.norm()) + 1e-7


@pytest.mark.slow
def test_engines_train_deepseek_v4_alike(pool):
    """Not as one process, which packs across documents: ranks have other pieces of them."""
    run = partial(pool.run, trained, 2, run="run_trainer", model_type="deepseek_v4")
    (losses, weights), *_ = run(split=Split(1, 2, "ddp"))
    for engine in ("fsdp2", "zero3"):
        (have, moved), *_ = run(split=Split(1, 2, engine))
        assert have == pytest.approx(losses, rel=1e-5)
        for want, x in zip(weights, moved, strict=True):
            assert float((x - want).norm()) <= 1e-5 * float(want.norm()) + 1e-7


# ------------------------------------------------------------------ the page


def test_the_first_program_trains_on_three_ranks_as_on_one(pool):
    (one,) = pool.run(losses_of_first_program, 1, page=PAGE)
    assert one[-1] < one[0] - 0.1
    for losses in pool.run(losses_of_first_program, 3, page=PAGE):
        assert losses == pytest.approx(one, rel=1e-5)
