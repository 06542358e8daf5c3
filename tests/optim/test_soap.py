"""SOAP against a reference in float64, and against Adam where it must be Adam."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optim.soap import SOAP
from tests.optim.stepping import ODD_SHAPES, FailingSolver, assert_independent_of_batch, close, gradients, run


def reference(
    gradients: list[Any], every: int, beta: float = 0.95, eps: float = 1e-8, sides: tuple[bool, bool] = (True, True)
) -> list[Any]:
    """The updates of one matrix, written down from the paper: all betas equal, a basis on the sides that are true."""
    bases = [np.eye(size) for size in gradients[0].shape]
    factors = [np.zeros_like(basis) for basis in bases]
    first = second = np.zeros_like(gradients[0])
    updates = []
    for t, g in enumerate(gradients, 1):
        if t == 1:
            bases = [np.linalg.svd(a)[0] if side else q for side, a, q in zip(sides, (g, g.T), bases, strict=True)]
        first = beta * first + (1 - beta) * g  # never turned: it is the same in any basis
        turned = bases[0].T @ g @ bases[1]
        second = beta * second + (1 - beta) * turned**2
        ratio = bases[0].T @ first @ bases[1] / (1 - beta**t) / (np.sqrt(second / (1 - beta**t)) + eps)
        updates.append(bases[0] @ ratio @ bases[1].T)
        factors = [beta * a + (1 - beta) * b for a, b in zip(factors, (g @ g.T, g.T @ g), strict=True)]
        if t > 1 and t % every == 0:
            for axis in (axis for axis in (0, 1) if sides[axis]):
                weights = [column @ factors[axis] @ column for column in bases[axis].T]
                order = np.argsort(weights)[::-1]
                second = np.take(second, order, axis)
                bases[axis], _ = np.linalg.qr(factors[axis] @ bases[axis][:, order])
    return updates


@pytest.mark.parametrize("every", [1, 2, 10])
@pytest.mark.parametrize(
    ("shape", "max_dim", "sides"),
    [((6, 6), 6, (True, True)), ((5, 8), 5, (True, False)), ((8, 5), 7, (False, True)), ((5, 8), 4, (False, False))],
)
def test_equals_reference_across_refreshes(
    shape: tuple[int, int], max_dim: int, sides: tuple[bool, bool], every: int
) -> None:
    given = gradients((2, *shape), 7)
    updates, _ = run(SOAP(precondition_every=every, max_dim=max_dim), given)
    for b in range(2):
        expected = reference([g[b].numpy() for g in given], every, sides=sides)
        for step, (update_BMN, update) in enumerate(zip(updates, expected, strict=True)):
            # The reference leaves rounding where the first gradient, between its singular vectors, is zero.
            assert close(update_BMN[b], torch.from_numpy(update), 1e-10 if step else 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("shape", [(33, 64), (40, 40), (20, 6)])
def test_first_step_is_orthogonal_factor(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    """And not what rounding leaves off the diagonal, which Adam would make as large as what is on it."""
    u, _, vh = torch.linalg.svd(gradients((2, *shape), 1)[0], full_matrices=False)
    gradient_BMN = (u * torch.linspace(1.0, 2.0, min(shape), dtype=torch.float64)) @ vh
    updates, state = run(SOAP(), [gradient_BMN.to(dtype)])
    assert close(updates[0].double(), u @ vh, tolerance)
    assert int((state["exp_avg_sq"] > 0.0).sum()) == 2 * min(shape)


def turned_solver(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Eigenvectors as another library might give them: just as right."""

    def eigh(a_NN: Tensor) -> tuple[Tensor, Tensor]:
        values_N, vectors_NN = torch.linalg.eigh(a_NN)
        return change(values_N, vectors_NN)

    patch.setattr("optim.roots.eigh", eigh)


def test_signs_of_eigenvectors_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    given = gradients((2, 6, 6), 7)
    plain, state = run(SOAP(precondition_every=2), given)
    signs_N = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    turned_solver(monkeypatch, lambda values_N, vectors_NN: (values_N, vectors_NN * signs_N))
    turned, state_turned = run(SOAP(precondition_every=2), given)
    assert not close(state["left_basis"], state_turned["left_basis"], 0.1)
    for a, b in zip(plain, turned, strict=True):
        assert close(a, b, 1e-10)


def test_second_moment_follows_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that begin in another order are the same after the first refresh; their second moments must be, too."""
    given = gradients((2, 6, 6), 7)
    plain, state = run(SOAP(precondition_every=3), given)
    turned_solver(monkeypatch, lambda values_N, vectors_NN: (values_N, vectors_NN[:, torch.tensor([4, 0, 5, 2, 1, 3])]))
    turned, state_turned = run(SOAP(precondition_every=3), given)
    for a, b in zip(plain, turned, strict=True):
        assert close(a, b, 1e-9)
    assert close(state["exp_avg_sq"], state_turned["exp_avg_sq"], 1e-9)
    assert close(state["exp_avg"].abs(), state_turned["exp_avg"].abs(), 1e-9)


def test_bases_stay_orthogonal_and_find_the_eigenvectors() -> None:
    """Gradients Q_L S Q_R^T of one pair of bases: there SOAP's average of G G^T is diagonal."""
    generator = torch.Generator().manual_seed(0)
    q_MM, q_NN = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0] for n in (5, 5))
    scales_M = torch.logspace(0.0, -1.0, 5, dtype=torch.float64)
    given = [(q_MM * (scales_M * (1.0 + 0.1 * t))) @ q_NN.T for t in range(6)]
    _, state = run(SOAP(precondition_every=2), [g[None] for g in given])
    basis_MM = state["left_basis"][0]
    assert close(basis_MM.T @ basis_MM, torch.eye(5, dtype=torch.float64), 1e-12)
    assert close((basis_MM.T @ q_MM).abs(), torch.eye(5, dtype=torch.float64), 1e-8)


def test_eigenvectors_once_and_only_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    solver = FailingSolver(monkeypatch)
    run(SOAP(precondition_every=1), gradients((3, 4, 5), 4))
    assert solver.calls == 6


def test_failed_first_basis_is_adam_until_it_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = gradients((2, 5, 6), 4)
    plain, _ = run(SOAP(precondition_every=3), given)
    adam, _ = run(SOAP(max_dim=0), given)
    FailingSolver(monkeypatch, 1, 3)  # both sides of the second matrix
    rule = SOAP(precondition_every=3)
    state = {name: torch.zeros(2, *shape, dtype=torch.float64) for name, shape in rule.state(5, 6).items()}
    failures = []
    for step, gradient_BMN in enumerate(given, 1):
        update_BMN = rule.update(gradient_BMN, state, step)
        failures.append(state["failures"].tolist())
        assert torch.equal(update_BMN[0], plain[step - 1][0])
        assert close(update_BMN[1], adam[step - 1][1], 1e-12) == (step < 4)
    assert failures == [[0, 1], [0, 1], [0, 0], [0, 0]]


def test_renewal_that_is_not_finite_keeps_the_basis() -> None:
    rule, given = SOAP(precondition_every=2), gradients((2, 5, 5), 2)
    state = {name: torch.zeros(2, *shape, dtype=torch.float64) for name, shape in rule.state(5, 5).items()}
    rule.update(given[0], state, 1)
    before = {name: tensor.clone() for name, tensor in state.items()}
    state["right"][1] = math.inf
    update_BMN = rule.update(given[1], state, 2)
    assert update_BMN.isfinite().all()
    assert state["failures"].tolist() == [0, 1]
    assert torch.equal(state["right_basis"][1], before["right_basis"][1])
    assert not torch.equal(state["left_basis"][1], before["left_basis"][1])
    assert not torch.equal(state["right_basis"][0], before["right_basis"][0])


@pytest.mark.parametrize("shape", ODD_SHAPES)
@pytest.mark.parametrize("max_dim", [10000, 20])
def test_same_bits_alone_and_in_batches(shape: tuple[int, int], max_dim: int) -> None:
    assert_independent_of_batch(SOAP(precondition_every=2, max_dim=max_dim), shape)


def test_without_bases_is_torchs_adam_and_has_its_state() -> None:
    given = gradients((1, 5, 7), 4)
    weight = torch.nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=1.0, betas=(0.95, 0.95), eps=1e-8)
    for gradient_BMN in given:
        weight.grad = gradient_BMN[0].clone()
        adam.step()
    updates, state = run(SOAP(max_dim=4), given)
    assert close(torch.stack(updates).sum(0)[0], -weight.detach(), 1e-12)
    assert set(state) == {"exp_avg", "exp_avg_sq"}
    assert set(SOAP(max_dim=6).state(5, 7)) == {"exp_avg", "exp_avg_sq", "left", "left_basis", "failures"}
