"""Rotary position embedding, beside complex numbers in fp64; on a GPU too, if there is one."""

import pytest
import torch

from ds_usp import testing as oracle
from ds_usp.errors import ConfigError
from ds_usp.kernels import rotary as rotary_kernels
from ds_usp.kernels.rotary import apply_rotary
from ds_usp.training import RotaryPositions, rotary_frequencies, rotate_projected

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 3e-3}
POSITIONS = [*range(5), *range(20, 33)]  # low: angles are in fp32


def table(dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    angles = rotary_frequencies(torch.tensor(POSITIONS, device=device), dim, 1e4)[:, 0, 0]
    return angles.cos(), angles.sin()


def heads(count: int, token_dim: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Slices of a projection, so that they are not contiguous."""
    s, b = len(POSITIONS), 2
    shape = (s, b, count + 3, 24) if token_dim == 0 else (b, s, count + 3, 24)
    return torch.randn(shape, device=device).to(dtype)[:, :, 1 : count + 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("token_dim", [0, 1])
@pytest.mark.parametrize("dim", [24, 8, 2])
def test_queries_and_keys_are_rotated_as_complex_numbers(dim, token_dim, dtype, device):
    q, k = (heads(n, token_dim, device, dtype).requires_grad_() for n in (5, 2))
    dq, dk = (torch.randn_like(x).transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
    actual = apply_rotary((q, k), *table(dim, device), token_dim=token_dim)
    gradients = torch.autograd.grad(actual, (q, k), (dq, dk))
    for x, dx, y, gradient in zip((q, k), (dq, dk), actual, gradients, strict=True):
        assert y.dtype == gradient.dtype == dtype
        wide = x.detach().double().requires_grad_()
        want = oracle.rotated(wide, POSITIONS, dim, 1e4, token_dim)
        (want_back,) = torch.autograd.grad(want, wide, dx.double())
        assert oracle.relative_error(y.detach(), want.detach()) < LIMITS[dtype]
        assert oracle.relative_error(gradient, want_back) < LIMITS[dtype]
        assert torch.equal(y[..., dim:], x[..., dim:]) and torch.equal(
            gradient[..., dim:], dx[..., dim:]
        )


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_of_any_numbers_and_one_tensor(device):
    """Halves of the table that differ, as some models have them, and its gradient's transpose."""
    x = torch.randn(2, 18, 3, 8, device=device).requires_grad_()
    cos, sin = torch.randn(2, 18, 6, device=device)
    (y,) = apply_rotary([x], cos, sin, token_dim=1)
    front, back = x[..., :3], x[..., 3:6]
    c, s = cos[:, None], sin[:, None]
    want = torch.cat(
        (
            front * c[..., :3] - back * s[..., :3],
            back * c[..., 3:] + front * s[..., 3:],
            x[..., 6:],
        ),
        dim=-1,
    )
    dy = torch.randn_like(y)
    assert oracle.relative_error(y.detach(), want.detach().double()) < 1e-6
    (got,), (wanted,) = (torch.autograd.grad(out, x, dy) for out in (y, want))
    assert oracle.relative_error(got, wanted.double()) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_gradients_are_rotated_too(device):
    cos, sin = table(24, device)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y, _ = apply_rotary((x, x), cos.to(x.dtype), sin.to(x.dtype), token_dim=1)
        return y.pow(3).sum()

    gradients = []
    for wide in (False, True):
        x = torch.linspace(-1, 1, 2 * 18 * 24, device=device).view(2, 18, 1, 24)
        x = (x.double() if wide else x).requires_grad_()
        (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
        gradients += torch.autograd.grad(dx.square().sum(), x)
    assert oracle.relative_error(gradients[0], gradients[1]) < 1e-5


@pytest.mark.parametrize(
    ("shape", "cos", "sin", "token_dim", "message"),
    [
        ((1, 18, 3, 24), (17, 24), (17, 24), 1, "18 tokens"),
        ((1, 18, 3, 24), (1, 24), (1, 24), 1, "18 tokens"),
        ((18, 1, 3, 24), (18, 24), (18, 24), 1, "1 tokens"),
        ((1, 18, 3, 24), (18, 24), (18, 12), 1, "sin"),
        ((1, 18, 3, 24), (18, 26), (18, 26), 1, "24 features"),
        ((1, 18, 3, 24), (18, 7), (18, 7), 1, "even"),
        ((1, 18, 3, 24), (18, 0), (18, 0), 1, "even"),
        ((1, 18, 72), (18, 24), (18, 24), 1, "token_dim"),
        ((1, 18, 3, 24), (18, 24), (18, 24), 2, "token_dim"),
    ],
    ids=str,
)
def test_a_table_that_does_not_fit_is_refused(shape, cos, sin, token_dim, message):
    fits = torch.zeros(1, 18, 2, 24)
    with pytest.raises(ConfigError, match=message):
        apply_rotary((fits, torch.zeros(shape)), torch.zeros(cos), torch.zeros(sin), token_dim)


def test_fp64_and_a_trainable_table_are_torchs():
    x = torch.randn(1, 18, 3, 24, dtype=torch.float64)
    cos, sin = (x.requires_grad_() for x in table(24, "cpu"))
    (y,) = apply_rotary([x], cos, sin, token_dim=1)
    assert y.dtype == torch.float64
    assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(y.sum(), (cos, sin)))


def grouped(x: torch.Tensor, kv_heads: int, dim: int) -> torch.Tensor:
    return x.view(*x.shape[:2], kv_heads, -1, dim)


def megatrons(x: torch.Tensor, positions: list[int], kv_heads: int, dim: int) -> torch.Tensor:
    """megatron-core's unfused rotation (rope_utils.py of 0.16) of all heads but a group's last."""
    angles = rotary_frequencies(torch.tensor(positions, device=x.device), dim, 1e4)[:, :, :, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    heads = grouped(x, kv_heads, dim)
    qk, v = heads[..., :-1, :], heads[..., -1:, :]
    front, back = qk.chunk(2, dim=-1)
    qk = qk * cos + torch.cat((-back, front), dim=-1) * sin
    return torch.cat((qk, v), dim=3).flatten(2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_positions_rotate_in_place_to_the_bits_of_megatron_core(dtype, device, monkeypatch):
    monkeypatch.setattr(rotary_kernels, "_TABLE_ELEMENTS", 16 * 5)  # 5 tokens at a time
    positions = [*range(5), *range(1_000_003, 1_000_016)]
    rotary = RotaryPositions.of(torch.tensor(positions, device=device), 16, 1e4, seq_len=2**20)
    weight = torch.randn(18, 2, 3 * 4 * 16, device=device).to(dtype)
    grads = []
    for rotate in (lambda x: rotate_projected(x, rotary, 3, 16), None):
        x = weight.clone().requires_grad_()
        qkv = x * 1  # a result, as of a projection
        out = megatrons(qkv, positions, 3, 16) if rotate is None else rotate(qkv)
        assert rotate is None or out.data_ptr() == qkv.data_ptr()
        (grad,) = torch.autograd.grad(out, x, weight.flip(0))
        grads.append((out.detach(), grad))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(grads[0][0], weight)


def test_positions_that_fp32_lacks_are_rotated_by_angles_in_fp64():
    positions = torch.tensor([2**24 + 1, 2**25 + 3])
    x = torch.randn(1, 2, 3, 24, dtype=torch.float64)
    for seq_len, limit in ((2**24, None), (2**24 + 1, 1e-12)):
        rotary = RotaryPositions.of(positions, 24, 1e4, seq_len=seq_len)
        y = x.clone()
        rotary.rotate_in_place([y], 1)
        error = oracle.relative_error(y, oracle.rotated(x, positions.tolist(), 24, 1e4, 1))
        assert error > 1e-2 if limit is None else error < limit


def test_a_projection_of_other_sizes_is_refused():
    rotary = RotaryPositions.of(torch.arange(4), 16, seq_len=4)
    with pytest.raises(ConfigError, match="g=3"):
        rotate_projected(torch.zeros(4, 1, 100), rotary, 3, 16)
    with pytest.raises(ConfigError, match="4 tokens"):
        rotary.rotate_in_place([torch.zeros(1, 4, 2, 8)], 1)
    for tokens in (2, 6):  # else those beyond the last position would keep their direction
        with pytest.raises(ConfigError, match=f"{tokens} tokens .* but 4 rotary positions"):
            rotate_projected(torch.zeros(tokens, 1, 96), rotary, 2, 16)


def test_inverse_frequencies_that_are_trained_are_refused():
    x, rotary = torch.zeros(4, 1, 96), RotaryPositions.of(torch.arange(4), 16, seq_len=4)
    trained = rotary._replace(inverse_frequencies=rotary.inverse_frequencies.requires_grad_())
    with pytest.raises(ConfigError, match="detach"):
        rotate_projected(x, trained, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_of_a_rotation_by_positions_has_the_same_bits(dtype):
    rotary = RotaryPositions.of(torch.tensor(POSITIONS), 16, 1e4, seq_len=33)
    qkv, results = torch.randn(18, 2, 3 * 4 * 16).to(dtype), []

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return rotate_projected(x * 1, rotary, 3, 16)

    for run in (rotate, torch.compile(rotate, backend="aot_eager", fullgraph=True)):
        x = qkv.clone().requires_grad_()
        y = run(x)
        results += [(y, *torch.autograd.grad(y, x, qkv.flip(0)))]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(results[0][0], qkv)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8)], ids=str)
def test_nothing_is_rotated_to_nothing(shape):
    x, tokens = torch.zeros(shape), shape[1]
    by_positions = RotaryPositions.of(torch.arange(tokens), 4, seq_len=4)
    (by_table,) = apply_rotary([x], *by_positions.table(0, tokens, x.dtype), token_dim=1)
    assert by_table.shape == shape
    by_positions.rotate_in_place([x], 1)
    qkv = torch.zeros(tokens, shape[0], 3 * 8)
    assert rotate_projected(qkv, by_positions, 1, 8).shape == qkv.shape


def test_a_rotation_of_no_features_is_refused():
    rotary = RotaryPositions(torch.arange(4), torch.ones(0))
    with pytest.raises(ConfigError, match="of at least 2 rotated features"):
        rotate_projected(torch.zeros(4, 1, 96), rotary, 2, 16)
