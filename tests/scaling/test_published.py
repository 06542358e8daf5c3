"""Fits of public data: the optimum that a replication of Chinchilla found, and those of Gemstones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import huber, logsumexp

from scaling.fit import fit_form
from scaling.intervals import bootstrap
from scaling.isoflop import isoflop, vertices
from tests.scaling.data import CHINCHILLA_BUDGETS, chinchilla, expected, gemstones, needs_data

pytestmark = needs_data


def plain_objective(theta: np.ndarray, params: np.ndarray, tokens: np.ndarray, loss: np.ndarray) -> float:
    """The sum as Hoffmann et al. write it, with scipy's Huber loss; coordinates (a, b, e, alpha, beta)."""
    a, b, e, alpha, beta = theta
    terms = np.stack([a - alpha * np.log(params), b - beta * np.log(tokens), np.full(len(loss), e)])
    return float(huber(1e-3, logsumexp(terms, axis=0) - np.log(loss)).sum())


def test_chinchilla() -> None:
    points, wanted = chinchilla(), expected()["epoch"]
    assert len(points) == wanted["n_used"]
    fit = fit_form(points)
    for name, value in fit.parameters.items():
        assert value == pytest.approx(wanted["our_optimum"][name], rel=1e-3), name
    assert fit.objective <= 0.00101828
    p = fit.parameters
    theta = np.array([np.log(p["A"]), np.log(p["B"]), np.log(p["E"]), p["alpha"], p["beta"]])
    again = plain_objective(theta, points.params, points.tokens, points.loss)
    assert again == pytest.approx(fit.objective, rel=1e-9)
    assert fit.share > 0.9
    assert fit.starts > 70


def test_chinchilla_with_all_rows_is_another_law() -> None:
    """Five rows with the highest losses, of 245, move the exponent of D from 0.37 to 0.45."""
    points = chinchilla(drop_highest=0)
    assert len(points) == 245
    fit = fit_form(points)
    assert fit.parameters["beta"] == pytest.approx(0.4530, abs=1e-3)
    assert fit.parameters["alpha"] == pytest.approx(0.3493, abs=1e-3)


def test_published_parameters_belong_to_another_objective() -> None:
    """Those that Besiroglu et al. print are of a density with a free scale; in the sum of Huber losses they are 0.04%
    worse than the optimum, and 0.45% as they are printed, with four digits."""
    points, p = chinchilla(), expected()["epoch"]["published_besiroglu"]
    theta = np.array([np.log(p["A"]), np.log(p["B"]), np.log(p["E"]), p["alpha"], p["beta"]])
    assert 1.0003 < plain_objective(theta, points.params, points.tokens, points.loss) / 0.001018274018 < 1.01


def test_chinchilla_intervals() -> None:
    points, published = chinchilla(), expected()["epoch"]["published_ci95_4000_bootstraps"]
    draws = bootstrap(points, fit_form(points), 1000)
    assert draws.resampling == "pairs"
    for name, (low, high) in published.items():
        ours = draws.interval(name)
        assert ours[0] == pytest.approx(low, rel=0.1), name
        assert ours[1] == pytest.approx(high, rel=0.1), name


def test_mean_reduction_with_default_tolerances_stops_early() -> None:
    """The known fault: scipy's defaults on the mean of the same losses, from a part of Hoffmann et al.'s grid that has
    its best start. It ends at an alpha of 0.38 and 9% above the optimum; ours does not."""
    points, trap = chinchilla(), expected()["epoch"]["trap_mean_reduction_default_tolerance"]
    x, y, z = np.log(points.params), np.log(points.tokens), np.log(points.loss)

    def mean(theta: np.ndarray) -> tuple[float, np.ndarray]:
        a, b, e, alpha, beta = theta
        weights = np.exp(np.stack([a - alpha * x, b - beta * y, np.full_like(x, e)]))
        error = np.log(weights.sum(axis=0)) - z
        p, q, r = weights / weights.sum(axis=0)
        psi = np.clip(error, -1e-3, 1e-3) / len(z)
        gradient = np.array([psi @ p, psi @ q, psi @ r, -(psi * p) @ x, -(psi * q) @ y])
        return float(huber(1e-3, error).mean()), gradient

    exponents = (0.0, 0.5, 1.0, 1.5, 2.0)
    grid = itertools.product((0, 10, 20), (0, 10, 20), (-1, 0, 1), exponents, exponents)
    ends = [minimize(mean, np.array(start, dtype=float), jac=True, method="L-BFGS-B") for start in grid]
    best = min(ends, key=lambda end: float(end.fun))
    assert best.x[3] == pytest.approx(trap["alpha"], abs=5e-3)
    assert best.fun * len(z) > 1.05 * 0.001018274
    fit = fit_form(points)
    assert fit.parameters["alpha"] == pytest.approx(0.3473, abs=1e-3)
    assert plain_objective(best.x, points.params, points.tokens, points.loss) > 1.05 * fit.objective


@pytest.mark.parametrize(
    ("which", "delta", "key"),
    [("hot", 1e-3, "hot_delta1e-3"), ("cool_end", 1e-3, "cool_end_delta1e-3"), ("hot", 1e-4, "hot_delta1e-4")],
)
def test_gemstones(which: str, delta: float, key: str) -> None:
    wanted = expected()["gemstones"][key]
    fit = fit_form(gemstones(which), delta=delta)
    assert fit.objective <= wanted["published_obj"]
    for name in ("alpha", "beta"):
        if name in wanted:
            assert fit.parameters[name] == pytest.approx(wanted[name], rel=1e-3)


def test_isoflop_of_chinchilla() -> None:
    """With budgets named. The approach's exponent is near to the surface's, and to what Hoffmann et al. print."""
    points = chinchilla(budgets=CHINCHILLA_BUDGETS)
    found = vertices(points)
    assert len(found) == 9
    assert isoflop(points, found).params.exponent == pytest.approx(0.5, abs=0.03)
