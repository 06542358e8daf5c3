"""Newton-Schulz against singular value decompositions in float64, and that a batch changes no bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from optim import products
from optim.newton_schulz import TABLES, flops, newton_schulz, steps_of

# Wide, tall, square, one row, one column, one entry, batches.
SHAPES = [(24, 64), (64, 24), (33, 33), (1, 16), (7, 1), (1, 1), (5, 24, 16), (2, 3, 7, 33)]


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def oracle(x_BMN: Tensor, coefficients: str, steps: int | None = None) -> Tensor:
    """U p(S / (safety |S|)) V^T in float64."""
    table = steps_of(coefficients, steps)
    u_BMS, s_BS, v_BSN = torch.linalg.svd(x_BMN.double(), full_matrices=False)
    s_BS = s_BS / (s_BS.norm(dim=-1, keepdim=True) * table.safety)
    for a, b, c in table.steps:
        s_BS = a * s_BS + b * s_BS**3 + c * s_BS**5
    return (u_BMS * s_BS.unsqueeze(-2)) @ v_BSN


def relative_error(result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.fixture
def split_early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Symmetric products of small matrices in blocks, several levels deep, as those of large ones are computed."""
    monkeypatch.setattr(products, "_WORTH_SPLITTING", 8)
    products._is_exact_in_batches.cache_clear()  # which is of other products
    yield
    products._is_exact_in_batches.cache_clear()


@pytest.mark.parametrize("gram", [False, True, None])
@pytest.mark.parametrize("coefficients", TABLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_polynomial_of_singular_values(shape: tuple[int, ...], coefficients: str, gram: bool | None) -> None:
    x = gaussian(*shape)
    before = x.clone()
    expected = oracle(x, coefficients)
    for scale in (1.0, 1e-30, 1e30):
        scaled = x * scale
        result = newton_schulz(scaled, coefficients, gram=gram)
        assert result.shape == x.shape
        assert result.is_contiguous()
        assert relative_error(result, expected) < 1e-5, scale
        assert torch.equal(scaled, before * scale)


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (33, 33), (5, 24, 16)], ids=str)
@pytest.mark.usefixtures("split_early")
def test_split_products_are_the_whole_ones(shape: tuple[int, ...], gram: bool) -> None:
    x = gaussian(*shape)
    assert relative_error(newton_schulz(x, gram=gram), oracle(x, "polar_express")) < 1e-5
    x = x.double()
    assert relative_error(newton_schulz(x, gram=gram), oracle(x, "polar_express")) < 1e-13


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("condition", [1e2, 1e3])
def test_large_and_ill_conditioned(condition: float, gram: bool) -> None:
    """Large enough to be split. Rounding in the direction of the smallest values is what both iterations amplify."""
    u, _, v = torch.linalg.svd(gaussian(256, 384), full_matrices=False)
    x = (u * torch.logspace(0, -1, 256, base=condition)) @ v
    assert relative_error(newton_schulz(x, gram=gram), oracle(x, "polar_express")) < 2e-5


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 4, 7])
def test_fewer_and_more_steps_than_the_table(steps: int, gram: bool) -> None:
    table = TABLES["polar_express"].steps
    assert steps_of("polar_express", steps).steps == (*table[:steps], *[table[4]] * (steps - 5))
    x = gaussian(24, 64, dtype=torch.float64)
    assert relative_error(newton_schulz(x, steps=steps, gram=gram), oracle(x, "polar_express", steps)) < 1e-12


def test_eight_steps_orthogonalise() -> None:
    result = newton_schulz(gaussian(24, 64), "polar_express_8")
    torch.testing.assert_close(result @ result.mT, torch.eye(24), rtol=0, atol=1e-5)


@pytest.mark.parametrize("gram", [False, True])
def test_zero_gives_zero(gram: bool) -> None:
    x = gaussian(3, 5, 8)
    x[1] = 0
    result = newton_schulz(x, gram=gram)
    assert not result[1].any()
    assert relative_error(result[0], oracle(x[0], "polar_express")) < 1e-5
    assert newton_schulz(torch.zeros(0, 4, 6)).shape == (0, 4, 6)


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (16, 16), (1, 1)], ids=str)
def test_is_no_view_of_the_input(shape: tuple[int, int]) -> None:
    x = gaussian(*shape)
    result = newton_schulz(x)
    before = result.clone()
    x.zero_()
    assert torch.equal(result, before)


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize(
    "shape", [(33, 64), (7, 33), (33, 7), (1, 16), (2, 40), (5, 3), (24, 16), (64, 48), (100, 300)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("split_early")
def test_a_batch_changes_no_bit(shape: tuple[int, int], dtype: torch.dtype, gram: bool) -> None:
    """Alone, in batches of any size, at any place in them, and wherever they lie in memory."""
    x = gaussian(5, *shape, dtype=dtype)
    alone = torch.stack([newton_schulz(matrix.clone(), gram=gram) for matrix in x])
    for start, stop in ((0, 1), (0, 2), (1, 3), (1, 5), (3, 4), (0, 5)):
        assert torch.equal(newton_schulz(x[start:stop], gram=gram), alone[start:stop]), (start, stop)
    memory = torch.zeros(x.numel() + 1, dtype=dtype)
    memory[1:] = x.flatten()
    assert torch.equal(newton_schulz(memory[1:].view_as(x), gram=gram), alone)
    assert torch.equal(newton_schulz(x.mT.contiguous(), gram=gram), alone.mT)


def test_bfloat16() -> None:
    """Products in bfloat16, of the normalised matrix; the rest in float32, and so is the result."""
    x = gaussian(8, 16) * 1e-30
    result = newton_schulz(x, dtype=torch.bfloat16)
    assert result.dtype == torch.float32
    assert 1e-4 < relative_error(result, oracle(x, "polar_express")) < 3e-2
    rounded = newton_schulz(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert relative_error(rounded, oracle(x, "polar_express")) < 3e-2


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("steps", [2, 5, 8])
@pytest.mark.parametrize(("m", "n"), [(24, 64), (64, 24), (33, 33), (1, 16)])
@pytest.mark.parametrize("split", [8, 1000])
def test_flops_are_those_counted(
    m: int, n: int, steps: int, gram: bool, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_WORTH_SPLITTING", split)
    x = gaussian(3, m, n)
    newton_schulz(x, steps=steps, gram=gram)  # the first of its kind also tries whether batches are exact
    with FlopCounterMode(display=False) as counter:
        newton_schulz(x, steps=steps, gram=gram)
    assert counter.get_total_flops() == 3 * flops(m, n, steps, gram)


@pytest.mark.parametrize(("m", "n", "at_most"), [(256, 256, 0.84), (256, 768, 0.6), (64, 64, 1.0), (768, 256, 0.6)])
def test_fewer_flops_than_three_products_a_step(m: int, n: int, at_most: float) -> None:
    """What the default does: half of large symmetric products, and Gram matrices alone if much longer than wide."""
    with FlopCounterMode(display=False) as counter:
        newton_schulz(gaussian(m, n))
    s, long = min(m, n), max(m, n)
    plain = 5 * (4 * s * s * long + 2 * s**3)
    assert counter.get_total_flops() == flops(m, n, 5) <= at_most * plain


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="no table of coefficients 'kellner'; there are keller, polar_express"):
        newton_schulz(gaussian(2, 3), "kellner")
    with pytest.raises(ValueError, match="at least one step"):
        newton_schulz(gaussian(2, 3), steps=0)
