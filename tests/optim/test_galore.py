"""GaLore against a reference in float64; ranks of updates; sizes of its state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optim.galore import GaLore
from tests.optim.stepping import ODD_SHAPES, FailingSolver, assert_independent_of_batch, close, gradients, run


def reference(gradients: list[Any], rank: int, every: int, scale: float) -> list[Any]:
    """The updates of one matrix with m <= n, written down from the paper."""
    first = second = np.zeros((rank, gradients[0].shape[1]))
    updates = []
    for t, g in enumerate(gradients, 1):
        if (t - 1) % every == 0:
            p = np.linalg.svd(g)[0][:, :rank]
            p = p * [np.sign(column[np.argmax(np.abs(column))]) for column in p.T]
        low = p.T @ g
        first, second = 0.9 * first + 0.1 * low, 0.95 * second + 0.05 * low**2
        updates.append(scale * p @ (first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.95**t)) + 1e-8)))
    return updates


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(("shape", "rank"), [((6, 9), 2), ((5, 5), 3), ((4, 7), 100), ((1, 16), 1)])
def test_equals_reference_across_refreshes(shape: tuple[int, int], rank: int, tall: bool) -> None:
    given = gradients((2, *shape), 6)
    if tall and shape[0] < shape[1]:
        given_to_rule = [g.mT.contiguous() for g in given]
    else:
        tall, given_to_rule = False, given
    updates, _ = run(GaLore(rank=rank, precondition_every=2, update_scale=0.5), given_to_rule)
    for b in range(2):
        expected = reference([g[b].numpy() for g in given], min(rank, shape[0]), 2, 0.5)
        for update_BMN, update in zip(updates, expected, strict=True):
            assert close(update_BMN[b].T if tall else update_BMN[b], torch.from_numpy(update), 1e-8)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_rank_of_updates_and_of_their_sum(shape: tuple[int, int]) -> None:
    def rank_of(x_MN: Tensor) -> int:
        return int(torch.linalg.matrix_rank(x_MN, rtol=1e-10))

    updates, _ = run(GaLore(rank=3, precondition_every=4), gradients((1, *shape), 8))
    assert [rank_of(update_BMN[0]) for update_BMN in updates] == [3] * 8
    assert rank_of(torch.stack(updates[:4]).sum(0)[0]) == 3
    assert rank_of(torch.stack(updates).sum(0)[0]) == 6


def test_basis_reaches_below_the_rounding_of_a_gram_matrix() -> None:
    """In fp32: singular values down to 1e-5 of the largest, of which the first 16, down to 5e-5, are asked for."""
    u, _, vh = torch.linalg.svd(gradients((20, 30), 1)[0], full_matrices=False)
    gradient_MN = ((u * torch.logspace(0.0, -5.0, 20, dtype=torch.float64)) @ vh).float()
    u_MR = torch.linalg.svd(gradient_MN.double())[0][:, :16]
    _, state = run(GaLore(rank=16), [gradient_MN[None]])
    p_MR = state["basis"][0].double()
    assert close(p_MR @ p_MR.T, u_MR @ u_MR.T, 1e-3)


def test_sizes_of_state() -> None:
    """The survey's example: 3.7% of what Adam keeps."""
    sizes = {name: math.prod(shape) for name, shape in GaLore(rank=128).state(4096, 11008).items()}
    assert sizes["exp_avg"] + sizes["exp_avg_sq"] == 2_818_048
    assert sizes["basis"] == 524_288
    assert sum(sizes.values()) - sizes["failures"] == 3_342_336
    assert 2 * 4096 * 11008 == 90_177_536
    tall = GaLore(rank=128).state(11008, 4096)
    assert {name: math.prod(shape) for name, shape in tall.items()} == sizes
    assert tall["exp_avg"] == (11008, 128)
    assert GaLore(rank=128).state(7, 33)["basis"] == (7, 7)


def test_scale_is_a_factor() -> None:
    given = gradients((1, 5, 6), 3)
    quarter, _ = run(GaLore(rank=2), given)
    whole, _ = run(GaLore(rank=2, update_scale=1.0), given)
    assert all(torch.equal(a, b / 4) for a, b in zip(quarter, whole, strict=True))
    assert GaLore().factor(5, 6) == 0.25


def test_failure_keeps_the_last_basis_at_first_unit_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bases at steps 1, 3, 5, 7; those of the second matrix fail at 1, 5."""
    given = gradients((2, 5, 6), 8)
    rule = GaLore(rank=2, precondition_every=2)
    plain, _ = run(rule, given)
    solver = FailingSolver(monkeypatch, 1, 5)
    state = {name: torch.zeros(2, *shape, dtype=torch.float64) for name, shape in rule.state(5, 6).items()}
    failures, bases = [], []
    for step, gradient_BMN in enumerate(given, 1):
        update_BMN = rule.update(gradient_BMN, state, step)
        assert torch.equal(update_BMN[0], plain[step - 1][0])
        failures.append(state["failures"].tolist())
        bases.append(state["basis"][1].clone())
    assert failures == [[0, 1], [0, 1], [0, 0], [0, 0], [0, 1], [0, 1], [0, 0], [0, 0]]
    assert torch.equal(bases[0], torch.eye(5, 2, dtype=torch.float64))
    assert torch.equal(bases[4], bases[2])
    assert not torch.equal(bases[6], bases[4])
    assert solver.calls == 8


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_same_bits_alone_and_in_batches(shape: tuple[int, int]) -> None:
    assert_independent_of_batch(GaLore(rank=5, precondition_every=2), shape)
