"""Samples dealt to groups of ranks of several sizes: trained as one rank trains the same steps."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import RankContext
from torch import Tensor, nn

from ds_usp import (
    ConfigError,
    DataError,
    MaskSpec,
    MeshError,
    RankGrid,
    SequenceMesh,
    usp_attention,
)
from ds_usp.experimental.dealt_batches import DealtBatches
from ds_usp.training import (
    ParallelGroups,
    initialize_deepspeed,
    loss_token_weight,
    mean_loss,
    prepare_deepspeed,
)

WORLD, STEPS, MAX_TOKENS, MICRO_BATCHES = 4, 20, 16, 3
VOCAB, HIDDEN, HEADS = 32, 16, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, attention: Any) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).unbind(2)
        return x + self.out(attention(q, k, v).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Any) -> Tensor:
        x = self.embedding(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, attention)
        return self.head(x).flatten(0, 1)


def steps_of(seed: int = 0, steps: int = STEPS) -> list[list[dict[str, Any]]]:
    """Few long samples and many short ones; a prompt without loss."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for step in range(steps):
        longest = (64, 40, 30, 14)[step % 4]
        lengths = [longest, *torch.randint(2, 15, (step % 7,), generator=draw).tolist()]
        samples = []
        for length in lengths:
            tokens = torch.randint(VOCAB, (length,), generator=draw)
            labels = torch.where(torch.arange(length) < length // 3, -100, tokens)
            samples.append({"input_ids": tokens, "labels": labels})
        made.append(samples)
    return made


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def one_rank(steps: list[list[dict[str, Any]]]) -> tuple[list[float], list[Tensor]]:
    """Losses and the last weights of plain torch in fp64, sample by sample."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5), []
    for samples in steps:
        labels = [sample["labels"][1:] for sample in samples]
        count = sum(int((x != -100).sum()) for x in labels)
        total = 0.0
        for sample, targets in zip(samples, labels, strict=True):
            tokens = sample["input_ids"][None]
            logits = model(tokens, torch.arange(tokens.shape[1])[None], dense)[:-1]
            loss = F.cross_entropy(logits, targets, reduction="sum") / count
            loss.backward()
            total += loss.item()
        optimizer.step(), optimizer.zero_grad()
        losses.append(total)
    return losses, [x.detach() for x in model.parameters()]


class Wrapped:
    """A model under one of the wrappers, with the loop's calls of each."""

    def __init__(self, wrapper: str) -> None:
        torch.manual_seed(0)
        self.model, self.scale, self.wrapper = Model(), float(WORLD), wrapper
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.5)
        if wrapper == "ddp":
            self.call: Any = nn.parallel.DistributedDataParallel(self.model)
        elif wrapper == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for module in (*self.model.layers, self.model):
                fully_shard(module)
            self.call = self.model
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.5)
        else:
            prepare_deepspeed()
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": MICRO_BATCHES,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": int(wrapper[-1])},
                "zero_allow_untested_optimizer": True,
            }
            # Every rank is a replica: groups that share a row change from step to step.
            groups = ParallelGroups.from_mesh(SequenceMesh.build(RankGrid({"dp": WORLD})))
            self.call, rule = initialize_deepspeed(self.model, optimizer, config, groups)
            self.scale = rule.loss_scale(MICRO_BATCHES)
        self.optimizer = optimizer

    def backward(self, loss: Tensor, is_last: bool) -> None:
        if self.wrapper.startswith("zero"):
            self.call.backward(loss)
            self.call.step()
            return
        if self.wrapper == "ddp":
            self.call.require_backward_grad_sync = is_last
        else:
            self.call.set_requires_gradient_sync(is_last)
        loss.backward()
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        if self.wrapper == "zero3":
            from deepspeed.utils import safe_get_full_fp32_param

            return [safe_get_full_fp32_param(x).clone() for x in self.model.parameters()]
        return [
            (x.full_tensor() if self.wrapper == "fsdp2" else x).detach().clone()
            for x in self.model.parameters()
        ]


def no_faster_in_groups(tokens: int, ranks: int) -> float:
    """So that all sizes are dealt: those that memory asks for."""
    return tokens


def train(
    wrapper: str, heads: tuple[int, int] | None, steps: int = STEPS, planted: float = 1.0
) -> tuple[list[float], list[Tensor], list[Any]]:
    """Losses, weights and what was dealt. ``planted``: on the loss of groups of two ranks."""
    run = Wrapped(wrapper)
    micro_batches = MICRO_BATCHES if wrapper.startswith("zero") else 0
    loader = DealtBatches(
        steps_of(steps=steps),
        None,
        MAX_TOKENS,
        heads=heads,
        cost=no_faster_in_groups,
        micro_batches=micro_batches,
    )
    losses, dealt = [], []
    for step in loader:
        of_step = []
        for batch in step:
            mask = MaskSpec.causal(batch.documents)
            if wrapper == "ddp":  # before forward, as no_sync
                run.call.require_backward_grad_sync = batch.is_last

            def attention(q: Tensor, k: Tensor, v: Tensor, batch=batch, mask=mask) -> Tensor:
                return usp_attention(q, k, v, mesh=batch.mesh, layout=batch.layout, mask=mask)

            logits = run.call(batch.tokens, batch.positions, attention)
            loss = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
            loss = loss * loss_token_weight(batch.loss_tokens, run.scale)
            if batch.mesh.sp_degree == 2:
                loss = loss * planted
            run.backward(loss, batch.is_last)
            of_step.append(loss.detach())
            dealt.append((batch.mesh.sp_degree, batch.samples))
        losses.append(mean_loss(of_step, run.scale, dist.group.WORLD))
    assert loader.state_dict() == {"steps": steps}
    return losses, run.weights(), dealt


def trained(ctx: RankContext, *, cases: list[tuple[Any, ...]]) -> list[Any]:
    return [train(*case) for case in cases]


CASES = [
    ("ddp", (HEADS, HEADS)),  # Ulysses, where its ranks divide the heads: not in groups of 3
    ("fsdp2", None),  # rings
]
STAGES = [(f"zero{stage}", (HEADS, 2)) for stage in range(4)]


def largest_difference(got: tuple[Any, ...], want: tuple[Any, ...]) -> float:
    pairs = zip([torch.tensor(got[0]), *got[1]], [torch.tensor(want[0]), *want[1]], strict=True)
    return max(float((x.double() - y).abs().max() / y.abs().max()) for x, y in pairs)


@pytest.mark.parametrize("cases", [CASES, STAGES], ids=["torch", "deepspeed"])
def test_dealt_steps_train_as_one_rank(cases, pool):
    want = one_rank(steps_of())
    # A loss of one kind of groups that is off by a thousandth.
    planted = (*cases[-1], 4, 1.001)
    ranks = pool.run(trained, WORLD, cases=[*cases, planted])
    for number, case in enumerate(cases):
        for rank in ranks:
            assert largest_difference(rank[number], want) <= 1e-5, case
        assert len({len(rank[number][2]) for rank in ranks}) == 1, case
    dealt = [x for rank in ranks for run in rank for x in run[2]]
    assert {size for size, _ in dealt} == {1, 2, 3, 4} and (1, ()) in dealt
    assert largest_difference(ranks[0][-1], one_rank(steps_of(steps=4))) > 1e-4


def resumed(ctx: RankContext) -> list[Any]:
    """Tokens and groups of all steps, of the last ones after a resume, and of a DataLoader's."""
    runs = []
    for skip in (0, STEPS - 3):
        loader = DealtBatches(steps_of(), None, MAX_TOKENS)
        loader.load_state_dict({"steps": skip})
        runs.append([[(x.samples, x.mesh, x.tokens.tolist()) for x in step] for step in loader])
    (first, again), meshes = runs, DealtBatches(steps_of(), None, MAX_TOKENS).meshes
    assert all(
        meshes[size] is mesh
        for step in first
        for _, mesh, _ in step
        for size in [mesh.sp_degree]
        if size > 1
    )  # made once
    return [[x[::2] for x in step] for run in (first[skip:], again) for step in run]


def test_a_resume_deals_the_same(pool):
    for steps in pool.run(resumed, WORLD):
        assert len(steps) == 6 and steps[:3] == steps[3:]


def rows(ctx: RankContext) -> list[Any]:
    """What the ranks hold of one step, with padding, positions and other entries."""
    step = [
        {
            "input_ids": torch.tensor([[1, 2, 3, 4, 5, 6, 0, 0]]),
            "attention_mask": torch.tensor([[1] * 6 + [0] * 2]),
            "weights": torch.arange(8.0)[None],
            "name": "padded",
        },
        {"input_ids": [7, 8, 9, 10], "weights": [0.5] * 4, "name": "list"},
    ]
    step[1]["weights"] = torch.tensor(step[1]["weights"])
    step[0]["image"], step[1]["image"] = torch.zeros(2, 3), torch.ones(4)
    loader = DealtBatches([step], None, 4, sizes=(1, 2), whole=("image",))
    batches = [x for step in loader for x in step]
    return [
        (x.samples, x.tokens, x.labels, x.positions, x.others, x.loss_tokens, x.is_last)
        for x in batches
    ]


def test_rows_are_the_samples_without_padding(pool):
    ranks = [rank[0] for rank in pool.run(rows, WORLD)]
    assert [x[0] for x in ranks] == [(0,), (0,), (1,), ()]
    tokens = torch.cat([x[1] for x in ranks[:2]], 1)[0].tolist()
    labels = torch.cat([x[2] for x in ranks[:2]], 1)[0].tolist()
    assert sorted(zip(tokens, labels, strict=True)) == [
        *((i, i + 1) for i in range(1, 6)),
        (6, -100),
    ]
    assert ranks[2][1].tolist() == [[7, 8, 9, 10]] and ranks[2][3].tolist() == [[0, 1, 2, 3]]
    assert ranks[2][2].tolist() == [[8, 9, 10, -100]] and ranks[2][4]["name"] == ["list"]
    assert ranks[0][4]["name"] == ["padded"] and ranks[2][4]["weights"].tolist() == [[0.5] * 4]
    assert [x.shape for x in ranks[0][4]["image"]] == [(2, 3)]
    assert ranks[3][2].tolist() == [[-100]]
    assert all(x[5] == 5 + 3 and x[6] for x in ranks)


def deal_case(rank: int, case: str) -> None:
    steps, arguments = steps_of(steps=2), {"max_tokens": MAX_TOKENS}
    match case:
        case "seed":
            steps[0] = steps_of(seed=rank // 2)[1]
        case "end":
            steps = steps[: 1 + (rank != 2)]
        case "long":
            steps[0][0] = {"input_ids": torch.arange(65) % VOCAB}
        case "read" if rank == 1:
            steps[0] = [{"input_ids": torch.zeros(3)}]
        case "rows":
            steps[0] = [{"input_ids": torch.ones(2, 3, dtype=torch.int64)}]
        case "entries":
            steps[0] = [*steps[1][:1], {**steps[1][0], "weights": torch.ones(40)}]
        case "dict":
            steps[0] = steps[0][0]
        case "cost":
            arguments["cost"] = lambda tokens, ranks: tokens / ranks + rank
        case "heads":
            arguments["heads"] = (4, 3)
        case "max_tokens" if rank == 3:
            arguments["max_tokens"] = 0
    for _ in DealtBatches(steps, None, **arguments):
        pass


def refusals(ctx: RankContext) -> list[Exception]:
    errors = []
    for case, *_ in REFUSED:
        with pytest.raises((ConfigError, DataError, MeshError)) as raised:
            deal_case(ctx.rank, case)
        errors.append(raised.value)
    return errors


# On ranks that have something wrong, and on the others.
REFUSED = [
    ("seed", "(?s)ranks 0-1: 2 .*ranks 2-3: 2 .* as .*Give every rank the same data", ""),
    ("end", "(?s)ranks .*: 2 samples of 52 tokens.*rank 2: no step left", ""),
    ("long", "sample 0 of the step has 65 tokens: 4 ranks, .* hold 64 .*max_tokens=17", ""),
    (
        "read",
        "sample 0 of the step: input_ids are torch.float32",
        "(?s)rank 1: sample 0 .*Give every rank the same",
    ),
    ("rows", "sample 0 of the step has 2 rows", ""),
    ("entries", "sample 1 of the step has .*'weights'", ""),
    ("dict", "the loader's step is a dict", ""),
    ("cost", r"costs: \[0.0, 0.25, 16.0\] on rank 0, \[1.0, 1.25", ""),
    ("heads", "4 query heads cannot share 3", ""),
    ("max_tokens", "max_tokens=0 must be", "max_tokens=0 must be"),
]


def test_what_cannot_be_dealt_is_refused_on_every_rank(pool):
    for rank, errors in enumerate(pool.run(refusals, WORLD)):
        for (case, own, others), error in zip(REFUSED, errors, strict=True):
            wrong = {"read": 1, "max_tokens": 3}.get(case, rank)
            assert re.search(own if rank == wrong else others, str(error)), (case, error)
