"""Shampoo against a reference in float64, and what its options promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from optim.shampoo import Shampoo, _norms
from tests.optim.stepping import ODD_SHAPES, FailingSolver, assert_independent_of_batch, close, gradients, run

GRAFTS = ("adam", "sgd", "rmsprop", "adagrad", "none")
PLAIN: dict[str, Any] = {"betas": (0.0, 0.95), "factor_beta": 1.0, "grafting": "none", "ridge": 0.0}


def reference(
    gradients: list[Any],
    grafting: str,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    factor_beta: float = 0.95,
    exponent: float = 0.25,
    every: int = 10,
    start: int = 1,
    ridge: float = 1e-4,
) -> list[Any]:
    """The updates of one matrix, written down from the papers; roots are scipy's."""
    m, n = gradients[0].shape
    left, right, first, second, updates = np.zeros((m, m)), np.zeros((n, n)), np.zeros((m, n)), np.zeros((m, n)), []
    for t, g in enumerate(gradients, 1):
        first = betas[0] * first + (1 - betas[0]) * g
        average = first / (1 - betas[0] ** t)
        second = second + g**2 if grafting == "adagrad" else betas[1] * second + (1 - betas[1]) * g**2
        graft = average
        if grafting == "adam":
            graft = average / (np.sqrt(second / (1 - betas[1] ** t)) + eps)
        elif grafting in ("rmsprop", "adagrad"):
            graft = average / (np.sqrt(second) + eps)
        new = 1.0 if factor_beta == 1.0 else 1 - factor_beta
        left, right = factor_beta * left + new * g @ g.T, factor_beta * right + new * g.T @ g
        if t >= start and (t - start) % every == 0:
            bias = 1.0 if factor_beta == 1.0 else 1 - factor_beta**t
            x, y = (a / bias + ridge * np.linalg.norm(a / bias, 2) * np.eye(len(a)) for a in (left, right))
            x, y = (scipy.linalg.fractional_matrix_power(a, -exponent) for a in (x, y))
        update = graft if t < start else x @ average @ y
        if grafting != "none" and t >= start:
            update = update * np.linalg.norm(graft) / np.linalg.norm(update)
        updates.append(update)
    return updates


@pytest.mark.parametrize("shape", [(6, 9), (9, 4)])
@pytest.mark.parametrize("factor_beta", [1.0, 0.8])
@pytest.mark.parametrize("grafting", GRAFTS)
def test_equals_reference_across_refreshes(grafting: str, factor_beta: float, shape: tuple[int, int]) -> None:
    given = gradients((1, *shape), 6)
    for options in ({"every": 2}, {"every": 2, "start": 3, "betas": (0.0, 0.9)}, {"exponent": 0.5, "ridge": 1e-2}):
        expected = reference([g[0].numpy() for g in given], grafting, factor_beta=factor_beta, **options)  # type: ignore[arg-type]
        names = {"every": "precondition_every", "start": "start_step"}
        ours = {names.get(key, key): value for key, value in options.items()}
        updates, _ = run(Shampoo(grafting=grafting, factor_beta=factor_beta, **ours), given)  # type: ignore[arg-type]
        for update_BMN, update in zip(updates, expected, strict=True):
            assert close(update_BMN[0], torch.from_numpy(update), 1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_first_step_without_ridge_is_orthogonal_factor(
    shape: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    """L = G G^T and R = G^T G: L^-1/4 G R^-1/4 = U V^T; with 1/2 on either side the pseudo-inverse's transpose."""
    (gradient_BMN,) = gradients((2, *shape), 1, dtype)
    u, s, vh = torch.linalg.svd(gradient_BMN.double(), full_matrices=False)
    updates, _ = run(Shampoo(**PLAIN), [gradient_BMN])
    assert close(updates[0].double(), u @ vh, tolerance)
    updates, _ = run(Shampoo(**PLAIN, exponent=0.5), [gradient_BMN])
    assert close(updates[0].double(), u @ (vh / s[..., None]), 10 * tolerance)


def test_before_start_step_is_adam() -> None:
    given = gradients((1, 5, 7), 4)
    weight = torch.nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    for gradient_BMN in given:
        weight.grad = gradient_BMN[0].clone()
        adam.step()
    updates, state = run(Shampoo(start_step=10), given)
    assert close(torch.stack(updates).sum(0)[0], -weight.detach(), 1e-12)
    assert not state["left_root"].any()
    assert state["left"].any()


def test_norms_are_summed_in_double_precision() -> None:
    assert abs(_norms(torch.full((1, 2000, 2000), 0.1)).item() / (2000 * torch.tensor(0.1).item()) - 1.0) < 1e-9


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("grafting", ["adam", "sgd", "rmsprop", "adagrad"])
def test_norm_is_the_grafted_one_of_the_whole_matrix(grafting: str, block_size: int | None) -> None:
    given = gradients((2, 9, 10), 3)
    updates, _ = run(Shampoo(grafting=grafting, block_size=block_size), given)
    alone, _ = run(Shampoo(grafting=grafting, start_step=100), given)
    for update_BMN, grafted_BMN in zip(updates, alone, strict=True):
        norms_B, expected_B = (torch.linalg.matrix_norm(x) for x in (update_BMN, grafted_BMN))
        assert torch.allclose(norms_B, expected_B, rtol=1e-12)
        assert not close(update_BMN, grafted_BMN, 0.1)


@pytest.mark.parametrize("grafting", ["adam", "none"])
def test_one_block_is_unblocked_bit_for_bit(grafting: str) -> None:
    given = gradients((3, 7, 33), 3, torch.float32)
    plain, state = run(Shampoo(grafting=grafting, precondition_every=2), given)
    for block_size in (33, 100):
        blocked, state_blocked = run(Shampoo(grafting=grafting, precondition_every=2, block_size=block_size), given)
        assert all(torch.equal(a, b) for a, b in zip(plain, blocked, strict=True))
        assert all(torch.equal(state[name], state_blocked[name]) for name in state)


@pytest.mark.parametrize("block_size", [4, 5])
def test_uneven_blocks_are_a_loop_over_blocks(block_size: int) -> None:
    """10 x 9 in blocks of up to 4: rows 4, 4, 2 and columns 3, 3, 3; of up to 5: rows 5, 5 and columns 5, 4."""
    given = gradients((2, 10, 9), 5)
    rows, columns = {4: ((4, 4, 2), (3, 3, 3)), 5: ((5, 5), (5, 4))}[block_size]
    whole, state = run(Shampoo(grafting="none", precondition_every=2, block_size=block_size), given)
    assert state["left"].shape[:3] == (2, len(rows) * len(columns), rows[0])
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            at = (
                slice(None),
                slice(sum(rows[:i]), sum(rows[:i]) + row),
                slice(sum(columns[:j]), sum(columns[:j]) + column),
            )
            alone, _ = run(Shampoo(grafting="none", precondition_every=2), [g[at] for g in given])
            for update_BMN, block_BMN in zip(whole, alone, strict=True):
                assert close(update_BMN[at], block_BMN, 1e-9)


def test_failure_keeps_the_last_root_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots at steps 1, 3, 5, 7 take four calls each; R of the second matrix fails at 3 and 5."""
    given = gradients((2, 5, 6), 8)
    rule = Shampoo(precondition_every=2)
    plain, _ = run(rule, given)
    state = {name: torch.zeros(2, *shape, dtype=torch.float64) for name, shape in rule.state(5, 6).items()}
    solver = FailingSolver(monkeypatch, 4 + 3, 8 + 3)
    failures, roots = [], []
    for step, gradient_BMN in enumerate(given, 1):
        update_BMN = rule.update(gradient_BMN, state, step)
        failures.append(state["failures"].tolist())
        roots.append(state["right_root"].clone())
        assert torch.equal(update_BMN[0], plain[step - 1][0])
        assert torch.equal(update_BMN[1], plain[step - 1][1]) == (step not in (3, 4, 5, 6))
    assert failures == [[0, 0], [0, 0], [0, 1], [0, 1], [0, 2], [0, 2], [0, 0], [0, 0]]
    assert all(torch.equal(root[1], roots[0][1]) for root in roots[:6])
    assert not torch.equal(roots[6][1], roots[5][1])
    assert solver.calls == 16


def test_failure_at_once_leaves_the_gradients_average_as_long_as_the_graft(monkeypatch: pytest.MonkeyPatch) -> None:
    given = gradients((1, 5, 6), 3)
    grafted, _ = run(Shampoo(start_step=100), given)
    average, _ = run(Shampoo(start_step=100, grafting="sgd"), given)
    FailingSolver(monkeypatch, 0, 1)
    updates, state = run(Shampoo(start_step=2), given)
    assert state["failures"].tolist() == [1]
    assert torch.equal(updates[0], grafted[0])
    for step in (1, 2):
        expected = average[step] * grafted[step].norm() / average[step].norm()
        assert close(updates[step], expected, 1e-12)


def test_non_finite_gradient_does_not_raise() -> None:
    updates, state = run(Shampoo(), [torch.full((1, 3, 4), math.inf)])
    assert not updates[0].isfinite().any()
    assert state["failures"].tolist() == [1]


def test_zero_gradients_give_zero() -> None:
    for grafting in GRAFTS:
        for ridge in (0.0, 1e-4):
            updates, state = run(Shampoo(grafting=grafting, ridge=ridge), [torch.zeros(2, 3, 4)] * 2)
            assert not torch.stack(updates).any()
            assert not state["failures"].any()


@pytest.mark.parametrize("shape", ODD_SHAPES)
@pytest.mark.parametrize("options", [{"block_size": 8}, {}, {"grafting": "adagrad", "ridge": 0.0, "factor_beta": 1.0}])
def test_same_bits_alone_and_in_batches(shape: tuple[int, int], options: dict[str, Any]) -> None:
    assert_independent_of_batch(Shampoo(precondition_every=2, **options), shape)


def test_state_is_what_the_options_need() -> None:
    factors = {"left", "left_root", "right", "right_root", "failures"}
    assert set(Shampoo(**PLAIN).state(3, 4)) == factors
    assert set(Shampoo().state(3, 4)) == factors | {"exp_avg", "exp_avg_sq"}
    assert set(Shampoo(grafting="sgd").state(3, 4)) == factors | {"exp_avg"}
    # 16 bytes a parameter, in fp32, whatever the size of a block.
    state = Shampoo(block_size=1024, grafting="sgd", betas=(0.0, 0.9)).state(4096, 2048)
    assert (
        sum(Tensor.new_empty(torch.empty(0, device="meta"), s).numel() for s in state.values()) == 4 * 4096 * 2048 + 1
    )
