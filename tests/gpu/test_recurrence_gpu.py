"""Layers with a state on GPUs, in bf16: outputs and gradients over two ranks against fp64, token by
token; the error is at most 1.5 x that of the same kernel on one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import tokens_by_document
from gpu_ranks import needs_two, run_on_gpus
from packaging.version import Version

from ds_usp import MaskSpec, SequenceMesh
from ds_usp.recurrence import kernels
from ds_usp.recurrence.recurrences import delta_rule, lightning, mamba2

pytestmark = [needs_two, pytest.mark.several_gpus]

TOKENS = 714  # in no layout a multiple of the chunks of a kernel
_TREE = [
    (0, 300, None),
    (300, 301, 0),
    (301, 500, 0),
    (500, 520, 2),
    (520, 700, 2),
    (700, 714, None),
]
DOCUMENTS: tuple[Any, ...] = ((), (0, 1, 130, 131, 300, 700, TOKENS), MaskSpec.tree(_TREE))
# As in scripts/bench/bench_recurrence.py, whose compiled kernels serve here. With keys of 64 Triton
# 3.4 to 3.7.0 miscompile fla's on Hopper.
KEY_HEADS, HEADS, DIM = 16, 32, 128
SUMS = 1e-5  # gradients of fp32 parameters: sums of all tokens, in another order
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """A recurrence.

    Attributes:
        make: random tensors, tokens along ``dim``; those behind ``sharded`` are parameters, and the
            output has the shape of number ``like``.
        exact: outputs of one document, token by token.
        alone: of one document, by a kernel.
        over: on a mesh, by the same kernel.
    """

    make: Callable[[], list[torch.Tensor]]
    exact: Callable[[Tensors], torch.Tensor]
    alone: Callable[..., torch.Tensor]
    over: Callable[..., torch.Tensor]
    kernels: Callable[[], dict[str, Any]]
    dim: int = 1
    sharded: int = 5
    like: int = 2


# ------------------------------------------------------------------ delta rules


def delta_tensors(per_channel: bool) -> list[torch.Tensor]:
    q, k = (torch.randn(1, TOKENS, KEY_HEADS, DIM) for _ in "qk")
    if per_channel:
        q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (q, k))
    decay = torch.rand(1, TOKENS, HEADS, *[DIM] * per_channel)
    beta = torch.randn(1, TOKENS, HEADS).sigmoid()
    return [q, k, torch.randn(1, TOKENS, HEADS, DIM), -0.02 * decay, beta]


def delta_exact(tensors: Tensors) -> torch.Tensor:
    q, k, v, g, beta = tensors
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state, outs = v.new_zeros(*v.shape[:1], *v.shape[2:3], DIM, DIM), []
    decay = g.exp() if g.ndim == 4 else g.exp()[..., None]
    for t in range(v.shape[1]):
        state = state * decay[:, t, ..., None]
        change = (v[:, t] - (k[:, t, :, None] @ state).squeeze(2)) * beta[:, t, :, None]
        state = state + k[:, t, ..., None] * change[:, :, None]
        outs.append((q[:, t, :, None] @ state).squeeze(2))
    return torch.stack(outs, 1) * DIM**-0.5


def delta_alone(kernel: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
    return kernel(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def delta_over(kernel: Any, *tensors: Any, **where: Any) -> torch.Tensor:
    return delta_rule(kernel, *tensors, use_qk_l2norm_in_kernel=True, **where)


def gated_kernels() -> dict[str, Any]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    of_layer = qwen.torch_chunk_gated_delta_rule
    by_name = {"fla": chunk_gated_delta_rule, "the layer's": of_layer}
    return {**by_name, "torch": of_layer.__wrapped__}


def kimi_kernels() -> dict[str, Any]:
    from fla.ops.kda import chunk_kda
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    return {"fla": chunk_kda, "torch": kimi.chunk_kimi_delta_attention.__wrapped__}


# ------------------------------------------------------------------ Mamba-2


def mamba_tensors() -> list[torch.Tensor]:
    x, dt = torch.randn(1, TOKENS, HEADS, 64), torch.randn(1, TOKENS, HEADS) * 0.3
    B, C = (torch.randn(1, TOKENS, KEY_HEADS, DIM) for _ in "BC")
    return [x, dt, B, C, -0.05 - torch.rand(HEADS), torch.randn(HEADS), torch.full((HEADS,), -4.0)]


def mamba_exact(tensors: Tensors) -> torch.Tensor:
    x, dt, B, C, A, D, bias = tensors
    B, C = (y.repeat_interleave(HEADS // KEY_HEADS, 2) for y in (B, C))
    step = F.softplus(dt + bias)
    state, outs = x.new_zeros(*x.shape[:1], *x.shape[2:], DIM), []
    for t in range(x.shape[1]):
        arriving = (x[:, t] * step[:, t, :, None])[..., None] * B[:, t, :, None]
        state = state * (step[:, t] * A).exp()[..., None, None] + arriving
        outs.append((state @ C[:, t, ..., None]).squeeze(-1) + D[:, None] * x[:, t])
    return torch.stack(outs, 1)


def mamba_alone(kernel: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, D: Any, bias: Any) -> Any:
    options = {"chunk_size": 128, "D": D, "dt_bias": bias, "dt_softplus": True}
    return kernel(x, dt, A, B, C, **options)


def mamba_over(
    kernel: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, D: Any, bias: Any, **where: Any
) -> torch.Tensor:
    options = {"chunk_size": 128, "D": D, "dt_bias": bias, "dt_softplus": True}
    return mamba2(kernel, x, dt, A, B, C, **options, **where)


def mamba_kernels() -> dict[str, Any]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

    return {"mamba_ssm": mamba_chunk_scan_combined, "torch": mamba2_chunk_scan.__wrapped__}


# ------------------------------------------------------------------ lightning attention

SLOPE = torch.logspace(-3, 0, HEADS)


def lightning_tensors() -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, TOKENS, DIM) * DIM**-0.25 for _ in "qkv"]


def lightning_exact(tensors: Tensors) -> torch.Tensor:
    q, k, v = tensors
    decay = torch.exp(-SLOPE.to(q))[:, None, None]
    state, outs = q.new_zeros(1, HEADS, DIM, DIM), []
    for t in range(q.shape[2]):
        state = state * decay + k[:, :, t, :, None] * v[:, :, t, None]
        outs.append(q[:, :, t, None] @ state)
    return torch.cat(outs, 2)


def lightning_alone(kernel: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
    rate = -SLOPE.to(q.device)
    out = kernel(*(x.transpose(1, 2) for x in (q, k, v)), g_gamma=rate, scale=1.0)[0]
    return out.transpose(1, 2)


def lightning_over(kernel: Any, *tensors: Any, **where: Any) -> torch.Tensor:
    return lightning(kernel, *tensors, SLOPE.to(tensors[0].device), **where)


def lightning_kernels() -> dict[str, Any]:
    from fla.ops.simple_gla import chunk_simple_gla

    return {"fla": chunk_simple_gla}


KINDS = {
    "gated delta rule": Kind(
        partial(delta_tensors, False), delta_exact, delta_alone, delta_over, gated_kernels
    ),
    "Kimi delta attention": Kind(
        partial(delta_tensors, True), delta_exact, delta_alone, delta_over, kimi_kernels
    ),
    "Mamba-2": Kind(
        mamba_tensors, mamba_exact, mamba_alone, mamba_over, mamba_kernels, sharded=4, like=0
    ),
    "lightning attention": Kind(
        lightning_tensors, lightning_exact, lightning_alone, lightning_over, lightning_kernels, 2, 3
    ),
}


def skip_where_fla_refuses_triton() -> None:
    """Its gated kernels raise in backward passes on Hopper, where these compile them wrongly."""
    triton = pytest.importorskip("triton")
    is_refused = Version("3.4") <= Version(triton.__version__) < Version("3.7.1")
    if is_refused and torch.cuda.get_device_capability()[0] == 9:
        pytest.skip(f"fla refuses Triton {triton.__version__} on Hopper")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_round_as_one_device_does(kind: str) -> None:
    pytest.importorskip("fla")
    if kind == "gated delta rule":
        skip_where_fla_refuses_triton()
    if kind == "Mamba-2":
        pytest.importorskip("mamba_ssm")
    run_on_gpus(_compare, 2, kind)


def _compare(rank: int, world: int, name: str) -> None:
    from triton.runtime.autotuner import Autotuner

    with mock.patch.object(Autotuner, "prune_configs", _one_config):
        _compare_kernels(rank, name)


def _one_config(tuner: Any, kwargs: Any) -> list[Any]:
    """Rounding needs no tuned kernels, and each configuration takes seconds to compile."""
    configs = tuner.configs
    if tuner.early_config_prune:
        configs = tuner.early_config_prune(configs, tuner.nargs, **kwargs)

    def distance(config: Any) -> Any:
        blocks = sum(v for v in config.kwargs.values() if isinstance(v, int))
        return max(config.num_warps / 4, 4 / config.num_warps), abs(config.num_stages - 2), blocks

    return [min(configs, key=distance)]


def _compare_kernels(rank: int, name: str) -> None:
    kind = KINDS[name]
    device = torch.device("cuda", rank)
    mesh = SequenceMesh.from_group(dist.group.WORLD, ulysses_degree=1)
    failures = []
    for documents in DOCUMENTS:
        torch.manual_seed(0)
        given = [x.bfloat16().to(device) for x in kind.make()]
        given[kind.sharded :] = [x.float() for x in given[kind.sharded :]]
        dout = torch.randn_like(given[kind.like])
        (paths,) = tokens_by_document(documents, 1, TOKENS)
        exact = partial(_each_document, kind, kind.exact, paths)
        truth = _grads(exact, [x.double() for x in given], dout.double())
        for label, kernel in kind.kernels().items():
            by_kernel = partial(kind.alone, kernel)
            alone = partial(_each_document, kind, lambda x, f=by_kernel: f(*x), paths)
            allowed = _errors(_grads(alone, given, dout), truth)
            for layout_kind in ("contiguous", "zigzag"):
                layout = mesh.layout(layout_kind, TOKENS)

                def shard(x: torch.Tensor, layout: Any = layout) -> torch.Tensor:
                    return layout.shard(x, kind.dim, rank)

                where = {"mesh": mesh, "layout": layout, "documents": documents}
                own = [shard(x) if i < kind.sharded else x for i, x in enumerate(given)]
                over = partial(kind.over, kernel, **where)
                got = _grads(lambda x, f=over: f(*x), own, shard(dout))
                for grad in got[kind.sharded + 1 :]:
                    dist.all_reduce(grad)
                parts = [shard(x) if i <= kind.sharded else x for i, x in enumerate(truth)]
                errors = _errors(got, parts)
                for what, (error, limit) in enumerate(zip(errors, allowed, strict=True)):
                    parts = "segments" if isinstance(documents, MaskSpec) else "documents"
                    case = f"{name}, {label}, {layout_kind}, {len(paths)} {parts}"
                    line = f"{case}, {what}: error {error:.2e}, one device {limit:.2e}"
                    if not (error <= 1.5 * max(limit, SUMS) and limit < 0.1):
                        failures.append(line)
                if rank == 0:
                    worst = max(e / max(a, SUMS) for e, a in zip(errors, allowed, strict=True))
                    line = f"{case}: {worst:.2f} x one device ({max(allowed):.1e})"
                    print(line, flush=True)  # noqa: T201 - seen with -s
    assert not failures, "\n".join(failures)


def _each_document(
    kind: Kind,
    run: Callable[[Tensors], torch.Tensor],
    paths: Sequence[tuple[list[int], int]],
    tensors: Tensors,
) -> torch.Tensor:
    """By itself behind its ancestors."""
    outs = []
    for path, own in paths:
        index = torch.tensor(path, device=tensors[0].device)
        sharded = [x.index_select(kind.dim, index) for x in tensors[: kind.sharded]]
        out = run([*sharded, *tensors[kind.sharded :]])
        outs.append(out.narrow(kind.dim, len(path) - own, own))
    return torch.cat(outs, kind.dim)


def _grads(
    run: Callable[[Tensors], torch.Tensor], tensors: Tensors, dout: torch.Tensor
) -> list[torch.Tensor]:
    """The output, and the gradient of every tensor."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = run(leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def _errors(got: Tensors, truth: Tensors) -> list[float]:
    """Relative errors of tensors of which each rank has a part, or all have the whole."""
    squares = [
        [(a.double() - b).square().sum(), b.square().sum()] for a, b in zip(got, truth, strict=True)
    ]
    sums = torch.stack([x for pair in squares for x in pair])
    dist.all_reduce(sums)
    return (sums[::2] / sums[1::2]).sqrt().tolist()


def test_an_enabled_hybrid_model_runs_the_kernels_of_the_library() -> None:
    pytest.importorskip("fla")
    skip_where_fla_refuses_triton()
    run_on_gpus(_enabled, 2)


def _enabled(rank: int, world: int) -> None:
    """Qwen3-Next in bf16, fla's kernels: loss and all gradients on two ranks against fp64."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen
    from triton.runtime.autotuner import Autotuner

    from ds_usp.integrations.transformers import enable

    config = qwen.Qwen3NextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=2,
        num_experts_per_tok=2,  # all: a choice by rounded scores would be another one in fp64
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=DIM,
        linear_value_head_dim=DIM,
        use_cache=False,
        experts_implementation="eager",  # the others have no fp64
    )
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    model = qwen.Qwen3NextForCausalLM(config).bfloat16().to(device)
    tokens = torch.randint(512, (1, TOKENS), device=device)
    wide = qwen.Qwen3NextForCausalLM(config)
    wide.load_state_dict(model.state_dict())
    wide = wide.double().to(device)
    in_torch = {
        name: getattr(qwen, name).__wrapped__
        for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    }
    with mock.patch.multiple(qwen, **in_torch):
        truth = _loss_and_grads(wide, tokens)
    with mock.patch.object(Autotuner, "prune_configs", _one_config):
        allowed = _errors(_loss_and_grads(model, tokens), truth)
        for degree in (1, world):
            mesh = SequenceMesh.from_group(dist.group.WORLD, ulysses_degree=degree)
            enabled = enable(model, mesh)
            with mock.patch.object(kernels, "_states", wraps=kernels._states) as states:
                got = _loss_and_grads(model, tokens)
            ran = torch.tensor(states.call_count, device=device)
            dist.all_reduce(ran)
            assert ran > 0  # of fla, pieces in one call
            for grad in got[1:]:
                dist.all_reduce(grad)
                grad /= world
            for (error, limit), what in zip(
                zip(_errors(got, truth), allowed, strict=True), ("loss", "gradients"), strict=True
            ):
                assert error <= 1.5 * max(limit, 1e-3) and limit < 0.1, (degree, what, error, limit)
                if rank == 0:
                    print(f"Qwen3-Next, ulysses {degree}, {what}: {error:.1e}, one GPU {limit:.1e}")  # noqa: T201
            enabled.disable()


def _loss_and_grads(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    grads = [x.grad.double().flatten() for x in model.parameters() if x.grad is not None]
    return [loss.detach().double()[None], torch.cat(grads)]
