"""Roots and bases by what they are defined by, measured in float64, and what happens where there are none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optim import roots
from optim.products import product
from optim.roots import eigenbasis, inverse_root, orthogonal_iteration
from tests.optim.stepping import FailingSolver, close

RIDGE = 1e-4


def basis(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + n)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]


def semidefinite(n: int, condition: float = 1e6, rank: int | None = None, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Far from diagonal, eigenvalues from `scale` down by `condition`, those beyond `rank` zero; float64."""
    values_N = torch.logspace(0.0, -math.log10(condition), n, dtype=torch.float64) * scale
    values_N[rank if rank is not None else n :] = 0.0
    q_NN = basis(n, seed)
    return (q_NN * values_N) @ q_NN.T


def shifted(a_NN: Tensor) -> Tensor:
    """A + ridge lambda_max I, in float64."""
    a_NN = a_NN.double()
    return a_NN + RIDGE * torch.linalg.eigvalsh(a_NN)[-1] * torch.eye(len(a_NN), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "scale"), [(1, 1.0), (5, 1e-18), (33, 1.0), (64, 1e18)])
def test_fourth_power_of_the_root_inverts(n: int, scale: float, dtype: torch.dtype) -> None:
    a_NN = semidefinite(n, scale=scale).to(dtype)
    given_NN = a_NN.clone()
    root_BNN, ok_B = inverse_root(a_NN[None], 0.25)
    identity_NN = torch.eye(n, dtype=torch.float64)
    assert ok_B.all()
    assert torch.equal(given_NN, a_NN)
    assert root_BNN.dtype == dtype
    fourth_NN = torch.linalg.matrix_power(root_BNN[0].double(), 4)
    assert close(fourth_NN @ shifted(a_NN), identity_NN, 1e-4)


def test_exponents_are_told_apart() -> None:
    a_NN = semidefinite(33, condition=1e3)
    identity_NN = torch.eye(33, dtype=torch.float64)
    for exponent, power, other in ((0.5, 2, 4), (0.25, 4, 2), (1.0, 1, 2)):
        root_NN = inverse_root(a_NN[None], exponent)[0][0]
        assert close(torch.linalg.matrix_power(root_NN, power) @ shifted(a_NN), identity_NN, 1e-9)
        assert not close(torch.linalg.matrix_power(root_NN, other) @ shifted(a_NN), identity_NN, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rank_deficient_matrix_has_bounded_roots(scale: float, dtype: torch.dtype) -> None:
    a_NN = semidefinite(64, condition=10.0, rank=8, scale=scale).to(dtype)
    root_NN = inverse_root(a_NN[None], 0.25)[0][0]
    bound = (RIDGE * scale) ** -0.25
    assert torch.linalg.matrix_norm(root_NN.double(), 2) <= bound * 1.01
    assert torch.linalg.matrix_norm(root_NN.double(), 2) >= bound * 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_ridge_null_space_is_left_out(dtype: torch.dtype) -> None:
    a_NN = semidefinite(64, condition=100.0, rank=20).to(dtype)
    root_NN = inverse_root(a_NN[None], 0.25, 0.0)[0][0].double()
    q_NR = basis(64)[:, :20]
    projector_NN = q_NR @ q_NR.T
    assert close(torch.linalg.matrix_power(root_NN, 4) @ a_NN.double(), projector_NN, 1e-5)
    assert close(root_NN @ projector_NN, root_NN, 1e-5)


@pytest.mark.parametrize("ridge", [0.0, RIDGE])
def test_zero_has_the_identity_as_root(ridge: float) -> None:
    root_BNN, ok_B = inverse_root(torch.zeros(2, 5, 5), 0.25, ridge)
    assert ok_B.all()
    assert torch.equal(root_BNN, torch.eye(5).expand(2, 5, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 7, 33, 64])
def test_same_bits_alone_and_in_batches(n: int, dtype: torch.dtype) -> None:
    a_BNN = torch.stack([semidefinite(n, seed=b) for b in range(5)]).to(dtype)
    q_BNN = torch.stack([basis(n, seed=9 + b) for b in range(5)]).to(dtype)
    calls: list[tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]] = [
        (lambda x: inverse_root(x, 0.25), [a_BNN]),
        (eigenbasis, [a_BNN]),
        (orthogonal_iteration, [a_BNN, q_BNN]),
        (lambda x, y: (product(x, y),), [a_BNN[:, : n // 2 + 1], q_BNN.mT]),
    ]
    for function, arguments in calls:
        together = function(*arguments)
        for b in range(5):
            alone = function(*(x[b : b + 1].clone() for x in arguments))
            for x, y in zip(together, alone, strict=True):
                assert torch.equal(x[b], y[0])


@pytest.mark.parametrize(
    "broken", [torch.full((6, 6), math.nan), torch.full((6, 6), math.inf), torch.diag(torch.tensor([1.0] * 5 + [-0.1]))]
)
def test_what_has_no_root_fails_alone(broken: Tensor) -> None:
    good_NN = semidefinite(6).float()
    root_BNN, ok_B = inverse_root(torch.stack([good_NN, broken, good_NN]), 0.25)
    assert ok_B.tolist() == [True, False, True]
    assert torch.equal(root_BNN[0], inverse_root(good_NN[None], 0.25)[0][0])
    assert torch.equal(root_BNN[1], torch.eye(6))
    assert torch.equal(root_BNN[2], root_BNN[0])
    values_BN, vectors_BNN, ok_B = eigenbasis(torch.stack([broken, good_NN]))
    assert ok_B.tolist() == [False, True]
    assert torch.equal(vectors_BNN[0], torch.eye(6, dtype=torch.float64))
    assert close((vectors_BNN[1] * values_BN[1]) @ vectors_BNN[1].T, good_NN.double(), 1e-6)


def test_failed_decomposition_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    solver = FailingSolver(monkeypatch, 1)
    a_BNN = torch.stack([semidefinite(6, seed=b) for b in range(3)])
    assert inverse_root(a_BNN, 0.25)[1].tolist() == [True, False, True]
    assert solver.calls == 3


def test_rounding_below_zero_is_no_failure() -> None:
    a_NN = semidefinite(6, rank=3) - 1e-6 * torch.eye(6, dtype=torch.float64)
    root_BNN, ok_B = inverse_root(a_NN[None], 0.25)
    assert ok_B.all()
    assert root_BNN.isfinite().all()


def test_iteration_sorts_columns_and_stays_where_it_is() -> None:
    """From eigenvectors in another order: these, sorted, with their signs; and where each one was."""
    q_NN, order_N = basis(7), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    a_NN = semidefinite(7, condition=100.0)
    new_BNN, order_BN, ok_B = orthogonal_iteration(a_NN[None], q_NN[:, order_N][None])
    assert ok_B.all()
    assert torch.equal(order_N[order_BN[0]], torch.arange(7))
    assert close(new_BNN[0], q_NN, 1e-10)


def test_iteration_is_power_step_and_qr_and_converges() -> None:
    a_NN, q_NN = semidefinite(7, condition=1e3), basis(7, seed=5)
    new_BNN, order_BN, _ = orthogonal_iteration(a_NN[None], q_NN[None])
    r_NN = new_BNN[0].T @ a_NN @ q_NN[:, order_BN[0]]
    assert close(r_NN.triu(), r_NN, 1e-12)
    assert (r_NN.diagonal() > 0.0).all()
    q_BNN = new_BNN
    for _ in range(50):
        q_BNN, _, _ = orthogonal_iteration(a_NN[None], q_BNN)
    turned_NN = q_BNN[0].T @ a_NN @ q_BNN[0]
    assert close(turned_NN, torch.logspace(0.0, -3.0, 7, dtype=torch.float64).diag(), 1e-10)


def test_iteration_keeps_basis_and_order_where_it_is_not_finite() -> None:
    a_BNN = torch.stack([semidefinite(5), torch.full((5, 5), math.inf, dtype=torch.float64)])
    q_BNN = torch.stack([basis(5, seed=1), basis(5, seed=2)])
    new_BNN, order_BN, ok_B = orthogonal_iteration(a_BNN, q_BNN)
    assert ok_B.tolist() == [True, False]
    assert torch.equal(new_BNN[1], q_BNN[1])
    assert order_BN[1].tolist() == [0, 1, 2, 3, 4]
    assert new_BNN[0].isfinite().all()


def test_symmetric_part_is_taken() -> None:
    a_NN = semidefinite(6)
    skew_NN = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uneven_NN = a_NN + 0.1 * (skew_NN - skew_NN.T)
    assert close(inverse_root(uneven_NN[None], 0.25)[0], inverse_root(a_NN[None], 0.25)[0], 1e-9)


def test_one_decomposition_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    solver = FailingSolver(monkeypatch)
    inverse_root(torch.stack([semidefinite(4)] * 3), 0.25)
    assert solver.calls == 3
    assert roots.eigh is solver
