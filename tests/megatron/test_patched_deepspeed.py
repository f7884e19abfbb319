"""DeepSpeed's DistributedAttention is ours; its own sequence-parallel settings that are refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from golden_curves import STEPS
from harness import RankContext, fork_world

import ds_usp
import ds_usp.training
import megatron_patches
from ds_usp import ConfigError, LayoutError, MaskSpec, PatchError, UnsupportedAttentionError
from ds_usp import testing as oracle

WORLD, B, S = 4, 2, 32
LIMIT = 1e-5
MODULE = "deepspeed_model:DistributedAttention"  # which has imported the class by name
PATCHED = {"also_in": (MODULE,), "mask": MaskSpec.causal(), "dropout_p": 0.0}

Results = list[torch.Tensor]


def results(ctx: RankContext) -> Results:
    """This rank's output and input gradient, and the summed gradients of the weights."""
    import deepspeed_model

    model = deepspeed_model.distributed_model(ctx.group)
    tensors = run(model, shard(ctx.rank), shard(ctx.rank, seed=4))
    for gradient in tensors[2:]:
        dist.all_reduce(gradient)
    return tensors


def run(model: torch.nn.Module, x: torch.Tensor, dout: torch.Tensor) -> Results:
    x.requires_grad_()
    out = model(x)
    out.backward(dout)
    return [out.detach(), x.grad, *(weight.grad for weight in model.parameters())]


def shard(rank: int | None = None, seed: int = 3) -> torch.Tensor:
    """One rank's tokens as batches are cut for DeepSpeed: one piece each, in order; None: all."""
    full = torch.randn(B, S, 32, generator=torch.Generator().manual_seed(seed))
    return full if rank is None else full.chunk(WORLD, dim=1)[rank].clone()


def reference() -> Results:
    """The same model on one device, in fp64."""
    import deepspeed_model

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int) -> torch.Tensor:
        allowed = oracle.causal(range(S), range(S))
        return oracle.dense_attention(q, k, v, allowed, q.shape[3] ** -0.5)[0]

    return run(deepspeed_model.Model(attention).double(), shard().double(), shard(seed=4).double())


def before_and_after(ctx: RankContext, degrees: list[int]) -> tuple[Results, dict[int, Results]]:
    """With DeepSpeed's class, and with ours for each degree."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute
    deepspeed.init_distributed("gloo", verbose=False)
    stock, patched = results(ctx), {}
    for degree in degrees:
        megatron_patches.apply("deepspeed", ulysses_degree=degree, **PATCHED)
        patched[degree] = results(ctx)
        megatron_patches.restore()
    return stock, patched


def test_a_model_gives_deepspeeds_result_at_ring_1_and_the_oracles_with_a_ring():
    expected = reference()
    ranks = fork_world(before_and_after, WORLD, degrees=[4, 2, 1])
    for rank, (stock, patched) in enumerate(ranks):
        for a, b in zip(patched[4], stock, strict=True):
            assert torch.equal(a, b)
        local = [x.chunk(WORLD, dim=1)[rank] for x in expected[:2]]
        for degree, tensors in patched.items():
            for a, b in zip(tensors, [*local, *expected[2:]], strict=True):
                assert oracle.relative_error(a, b) < LIMIT, degree


def shared_meshes(ctx: RankContext) -> bool:
    import deepspeed_model

    megatron_patches.apply("deepspeed", ulysses_degree=2, **PATCHED)
    first, second = (deepspeed_model.distributed_model(ctx.group) for _ in range(2))
    return first.attention.mesh is second.attention.mesh


def test_layers_over_one_group_share_one_mesh():
    assert fork_world(shared_meshes, WORLD) == [True] * WORLD


def errors(ctx: RankContext, *, cases: dict[str, dict[str, Any]]) -> dict[str, Exception | None]:
    raised: dict[str, Exception | None] = {}
    for name, settings in cases.items():
        try:
            megatron_patches.apply("deepspeed", **{"also_in": (MODULE,), **settings})
            raised[name] = results(ctx) and None
        except ValueError as error:
            raised[name] = error
        megatron_patches.restore()
    return raised


REFUSED = {
    "a degree that does not divide": ({"ulysses_degree": 3}, ConfigError, "4 (ring 1)"),
    "no degree": ({"ulysses_degree": "2"}, ConfigError, "ulysses_degree='2' must be"),
    "no layout": ({"layout": "zigzig"}, LayoutError, "unknown token layout"),
    "no setting": ({"degree": 2}, ConfigError, "unknown setting 'degree' of deepspeed"),
    "a ring around an attention that nobody knows": (
        {"ulysses_degree": 2},
        UnsupportedAttentionError,
        "CausalAttention must be known",
    ),
}


def test_bad_input_raises_on_every_rank():
    cases = {name: settings for name, (settings, *_) in REFUSED.items()}
    for raised in fork_world(errors, WORLD, cases=cases):
        for name, error in raised.items():
            _, kind, message = REFUSED[name]
            assert isinstance(error, kind), (name, error)
            assert message in str(error), (name, error)


class TestApplying:
    @pytest.fixture(autouse=True)
    def restored(self) -> Any:
        import deepspeed_model

        before = deepspeed_model.DistributedAttention
        yield
        megatron_patches.restore()
        assert deepspeed_model.DistributedAttention is before

    def test_modules_that_imported_the_class_already_are_reported(self):
        assert MODULE in megatron_patches.apply("deepspeed", ulysses_degree=2).stale()

    def test_named_modules_are_patched_too(self):
        import deepspeed_model
        from deepspeed.sequence import layer

        before = layer.DistributedAttention
        assert megatron_patches.apply("deepspeed", also_in=(MODULE,)).stale() == ()
        assert layer.DistributedAttention is deepspeed_model.DistributedAttention is not before
        megatron_patches.restore()
        assert layer.DistributedAttention is before

    def test_an_unknown_body_is_refused_by_name(self, monkeypatch):
        from deepspeed.sequence import layer

        class Other(torch.nn.Module):
            pass

        monkeypatch.setattr(layer, "DistributedAttention", Other)
        with pytest.raises(PatchError, match="DistributedAttention: its source is another"):
            megatron_patches.apply("deepspeed")


TOKENS, HEADS, DIM = 16, 2, 4


class Layer(torch.nn.Module):
    def __init__(self, mesh: ds_usp.SequenceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.qkv = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, DIM)).unbind(2)
        layout = self.mesh.layout("contiguous", TOKENS)
        mask = ds_usp.MaskSpec.causal()
        out = ds_usp.usp_attention(q, k, v, mesh=self.mesh, layout=layout, mask=mask)
        return out.square().sum()


def engine_of(model: torch.nn.Module, stage: int, mesh_param: Any, **more: Any) -> Any:
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0, **more}
    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config=config,
        mesh_param=mesh_param,
        dist_init_required=False,
    )[0]


def train(ctx: RankContext, stage: int, setting: str, ulysses: int) -> tuple[str, float]:
    """The error of the first backward pass, and the relative error of one SGD step, which DeepSpeed
    divides by the number of ranks, against one process."""
    import deepspeed

    from ds_usp.training.deepspeed import prepare_deepspeed

    prepare_deepspeed()
    torch.manual_seed(1)
    x = torch.randn(1, TOKENS, HEADS * DIM)
    reference = Layer(ds_usp.SequenceMesh.single())
    layer = Layer(ds_usp.SequenceMesh.from_group(None, ulysses))
    layer.load_state_dict(reference.state_dict())
    reference(x).backward()
    expected = [p.grad / ctx.world for p in reference.parameters() if p.grad is not None]
    sizes = {"data_parallel_size": 1, "sequence_parallel_size": ctx.world}
    mesh_param = (1, ctx.world) if setting == "mesh_param" else None
    engine = engine_of(layer, stage, mesh_param, **sizes if setting == "config" else {})
    shard = layer.mesh.layout("contiguous", TOKENS).shard(x, 1, layer.mesh.rank)
    try:
        engine.backward(engine(shard))
        engine.step()
    except ds_usp.USPError as error:
        return str(error), 0.0
    with deepspeed.zero.GatheredParameters(list(layer.parameters()), enabled=stage == 3):
        pairs = zip(reference.parameters(), layer.parameters(), strict=True)
        steps = [(before - after).detach() for before, after in pairs]
    return "", max(float((a - b).norm() / b.norm()) for a, b in zip(steps, expected, strict=True))


def train_late(ctx: RankContext) -> str:
    """The error of the backward pass of an engine without a device mesh, which is created after
    another engine had one, and after a backward pass without DeepSpeed."""
    from ds_usp.training.deepspeed import prepare_deepspeed

    prepare_deepspeed()
    layer = Layer(ds_usp.SequenceMesh.from_group(None, 1))
    shard = layer.mesh.layout("contiguous", TOKENS).shard(
        torch.randn(1, TOKENS, HEADS * DIM), 1, layer.mesh.rank
    )
    layer(shard).backward()
    other = engine_of(torch.nn.Linear(2, 2), 3, (1, ctx.world))
    engine = engine_of(layer, 1, None)
    assert other is not engine
    try:
        engine.backward(engine(shard))
    except ds_usp.USPError as error:
        return str(error)
    return ""


def recorded_steps(ctx: RankContext) -> tuple[list[float], list[float]]:
    """SGD at ZeRO-1 towards random outputs, over our class where the model has DeepSpeed's."""
    from deepspeed_model import CausalAttention, Model

    ds_usp.training.prepare_deepspeed()
    mesh = ds_usp.SequenceMesh.from_group(None, ulysses_degree=1)
    known = {"mask": MaskSpec.causal(), "dropout_p": 0.0}
    attention = ds_usp.USPAttention(CausalAttention(), mesh=mesh, gather_idx=1, **known)
    model, groups = Model(attention), ds_usp.training.ParallelGroups.from_mesh(mesh)
    config = {"train_micro_batch_size_per_gpu": B, "zero_optimization": {"stage": 1}}
    config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, rule = ds_usp.training.initialize_deepspeed(model, optimizer, config, groups)
    scale = rule.loss_scale(micro_batches=1)
    losses, norms = [], []
    for step in range(STEPS):
        x, wanted = (
            torch.randn(B, S, 32, generator=torch.Generator().manual_seed(seed))
            for seed in (step, STEPS)
        )
        x, wanted = (mesh.layout("contiguous", S).shard(each, 1, mesh.rank) for each in (x, wanted))
        loss = (engine(x) - wanted).square().sum() / (B * S * 32) * scale
        engine.backward(loss)
        losses.append(ds_usp.training.mean_loss([loss], scale, groups.sp_dp))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def test_twenty_steps_are_the_recorded_ones(golden):
    golden.check("DeepSpeed engine, USPAttention, 1x2, ZeRO-1", *fork_world(recorded_steps, 2)[0])


def test_the_engine_that_runs_is_the_one_that_is_checked():
    for text in fork_world(train_late, 2):
        assert "ZeRO-1 sums gradients over" in text


CASES = [(stage, "mesh_param", 1) for stage in range(4)]
CASES += [(1, "config", 2), (1, "neither", 2), (2, "neither", 1)]


@pytest.mark.parametrize(("stage", "setting", "ulysses"), CASES)
def test_gradients_that_would_not_be_summed_are_refused(stage, setting, ulysses):
    for text, error in fork_world(train, 2, stage=stage, setting=setting, ulysses=ulysses):
        if setting != "neither" and stage < 3:
            assert f"ZeRO-{stage} sums gradients over" in text
            assert "initialize_deepspeed" in text and "mpu" in text
        else:
            assert not text and error <= 1e-5
