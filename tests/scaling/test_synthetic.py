"""Records whose law is known: what is recovered, how often intervals cover it, what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from common.errors import UserError
from scaling.analysis import Settings, analyse, multipliers
from scaling.checks import warnings
from scaling.fit import fit_form
from scaling.forms import FORMS
from scaling.intervals import bootstrap, leave_largest_out, percentiles, profile
from scaling.isoflop import envelope, envelope_draws, isoflop, setting_law, vertices
from scaling.predict import losses_at, optimum
from scaling.records import Points
from tests.scaling.coverage import coverage
from tests.scaling.data import TRUE, points, surface, synthetic


def test_recovers_the_law_without_noise() -> None:
    fit = fit_form(synthetic())
    for name, value in fit.parameters.items():
        assert value == pytest.approx(TRUE[name], rel=1e-5), name


def test_fits_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the library that multiplies, and leave it as it was."""
    threads: list[set[int]] = []

    def of_blas() -> set[int]:
        return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}

    def recorded(*_: Any) -> tuple[float, np.ndarray]:
        threads.append(of_blas())
        return 1.0, np.array([0.0, 0.0, 0.5, 0.3, 0.3])

    with threadpool_limits(2, user_api="blas"):
        before = of_blas()
        fit = fit_form(synthetic(), starts=[(0.0, 0.0, 0.5, 0.3, 0.3)])
        monkeypatch.setattr("scaling.fit.minimise", recorded)
        monkeypatch.setattr("scaling.intervals.minimise", recorded)
        fit_form(synthetic())
        bootstrap(synthetic(), fit, 2)
        assert before
        assert of_blas() == before
    assert {frozenset(seen) for seen in threads} == {frozenset({1})}


def test_kaplan_form_is_recovered() -> None:
    design = synthetic()
    law = {"Nc": 8.8e13, "Dc": 5.4e13, "alpha_N": 0.076, "alpha_D": 0.095}  # Kaplan et al. 2020, section 1.2
    ratio = law["alpha_N"] / law["alpha_D"]
    loss = ((law["Nc"] / design.params) ** ratio + law["Dc"] / design.tokens) ** law["alpha_D"]
    fit = fit_form(points(design.params, design.tokens, loss), "kaplan")
    for name, value in fit.parameters.items():
        assert value == pytest.approx(law[name], rel=1e-4), name


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_formula(form: str) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 7))
    theta = np.array([0.3, -0.2, 0.4, 0.3, 0.25]) if form == "hoffmann" else np.array([0.3, 0.2, 0.4, 0.3])
    _, jacobian = FORMS[form].log_loss(theta, x, y)
    for i in range(len(theta)):
        step = np.zeros_like(theta)
        step[i] = 1e-6
        ends = [FORMS[form].log_loss(theta + sign * step, x, y)[0] for sign in (1, -1)]
        assert jacobian[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-8)


def test_order_and_units_do_not_matter() -> None:
    data = synthetic(noise=0.01)
    fit, turned = fit_form(data), fit_form(data.take(np.arange(len(data))[::-1]))
    assert turned.objective == pytest.approx(fit.objective, rel=1e-9)
    in_millions = fit_form(points(data.params / 1e6, data.tokens / 1e9, data.loss))
    assert in_millions.parameters["alpha"] == pytest.approx(fit.parameters["alpha"], rel=1e-5)
    assert in_millions.parameters["E"] == pytest.approx(fit.parameters["E"], rel=1e-5)


def test_intervals_cover_the_truth() -> None:
    """Twenty draws; two hundred are in tests/verify/test_scaling.py."""
    covered, half_widths = coverage(draws=20, bootstraps=80)
    assert all(share >= 0.8 for share in covered.values()), covered  # at 95%, four misses of twenty are rarer than 1%
    assert all(half <= 0.05 for half in half_widths.values()), half_widths


def test_profile_agrees_with_the_bootstrap() -> None:
    data = synthetic(noise=0.01)
    fit = fit_form(data)
    draws = bootstrap(data, fit, 200)
    for place, name in ((3, "alpha"), (4, "beta")):
        low, high = draws.interval(name)
        ends = profile(data, fit, place)
        assert (ends[1] - ends[0]) == pytest.approx(high - low, rel=0.5)
        assert ends[0] < fit.parameters[name] < ends[1]


def test_what_the_rest_says_of_the_largest_budget() -> None:
    exact = leave_largest_out(synthetic(), "hoffmann", 1e-3)
    assert abs(exact.worst_error) < 1e-5
    assert exact.factor == pytest.approx((1e22 / 6e18) ** (1 / 13), rel=1e-6)
    bent = synthetic()
    bent.loss[bent.largest] *= 1.1
    assert leave_largest_out(bent, "hoffmann", 1e-3).mean_error == pytest.approx(1 / 1.1 - 1, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("few", "6 records, where the hoffmann form with its 5 parameters needs 7"),
        ("one size", "alpha cannot be identified from 1 different sizes"),
        ("two numbers of tokens", "beta cannot be identified from 2 different numbers of tokens"),
        ("fixed ratio", "N and D change together"),
        ("noise", "cannot be identified: "),
    ],
)
def test_data_that_cannot_identify_an_exponent_is_refused(change: str, reason: str) -> None:
    size, flops = (a.ravel() for a in np.meshgrid(np.geomspace(1e8, 1e10, 6), np.geomspace(1e19, 1e21, 5)))
    tokens, noise = flops / (6 * size), 0.0
    if change == "few":
        size, tokens = size[:6], tokens[:6]
    elif change == "one size":
        size = np.full_like(size, 1e9)
    elif change == "two numbers of tokens":
        tokens = np.where(np.arange(len(size)) % 2, 1e10, 2e10)
    elif change == "fixed ratio":
        tokens = 20 * size
    else:
        noise = 0.5
    errors = noise * np.random.default_rng(1).standard_normal(len(size))
    data = points(size, tokens, surface(size, tokens) * np.exp(errors))
    with pytest.raises(UserError, match=re.escape(reason)):
        analyse(data, Settings("3", bootstrap=20))


def test_weak_data_is_warned_of() -> None:
    size = np.tile(np.geomspace(1e8, 5e8, 5), 6)
    tokens = 20 * size * np.repeat(np.geomspace(0.5, 2, 6), 5)
    data = points(size, tokens, surface(size, tokens))
    told = " ".join(warnings(data, fit_form(data)))
    assert "span a factor of 5.0, less than a decade" in told
    assert not warnings(synthetic(), fit_form(synthetic()))


def test_optimum_is_where_the_surface_is_least() -> None:
    data = synthetic(noise=1e-4)
    draws = bootstrap(data, fit_form(data), 50)
    found = optimum(data, draws, 1e23)
    sizes = np.geomspace(1e9, 1e12, 20001)
    losses = surface(sizes, 1e23 / (6 * sizes))
    assert found.params.value == pytest.approx(sizes[losses.argmin()], rel=0.02)
    assert found.params.value * found.tokens.value * 6 == pytest.approx(1e23, rel=1e-6)
    assert found.loss.low < losses.min() < found.loss.high


def test_optimum_under_another_count_of_flops() -> None:
    """With C = 40 N^0.9 D the optimum is another, and again where the surface is least."""
    data = synthetic(noise=1e-5)
    data.flops[:] = 40 * data.params**0.9 * data.tokens
    found = optimum(data, bootstrap(data, fit_form(data), 20), 1e23)
    sizes = np.geomspace(1e9, 1e12, 20001)
    losses = surface(sizes, 1e23 / (40 * sizes**0.9))
    assert found.params.value == pytest.approx(sizes[losses.argmin()], rel=0.01)


def test_expected_losses_include_the_noise_of_a_run() -> None:
    data = synthetic(noise=0.01)
    (one,) = losses_at(bootstrap(data, fit_form(data), 300), np.array([1e9]), np.array([2e10]))
    assert 0.012 < one.half_width < 0.03  # of the noise alone it would be 0.0196


def symmetric(sizes: int, budgets: int, noise: float = 0.0, seed: int = 0) -> Points:
    """With alpha = beta and A = B the optimum is at N = D, and approach 2 has no bias."""
    size, flops = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, sizes), np.geomspace(6e15, 6e17, budgets)))
    tokens = flops / (6 * size)
    near = (tokens / size > 0.02) & (tokens / size < 50)
    size, tokens = size[near], tokens[near]
    law = {"E": 1.0, "A": 100.0, "B": 100.0, "alpha": 0.3, "beta": 0.3}
    factors = np.exp(noise * np.random.default_rng(seed).normal(size=len(size)))
    return points(size, tokens, surface(size, tokens, law) * factors)


def test_isoflop_and_envelope_find_exponents_of_a_symmetric_surface() -> None:
    data = symmetric(41, 15)
    frontier = isoflop(data, vertices(data))
    assert frontier.params.exponent == pytest.approx(0.5, abs=0.002)
    assert frontier.tokens.exponent == pytest.approx(0.5, abs=0.002)
    assert frontier.best_params[-1] == pytest.approx((frontier.flops[-1] / 6) ** 0.5, rel=0.02)
    assert envelope(data).params.exponent == pytest.approx(0.5, abs=0.05)


def test_intervals_of_the_envelope_cover_the_truth() -> None:
    """More often than 95%: a size that is not drawn takes its neighbours' place away too."""
    covered, half_widths = [], []
    for seed in range(20):
        data = symmetric(15, 9, 0.01, seed)
        ends = percentiles(np.array([one.params.exponent for one in envelope_draws(data, 200)]))
        covered.append(ends[0] <= 0.5 <= ends[1])
        half_widths.append((ends[1] - ends[0]) / 2)
    assert sum(covered) >= 18
    assert np.median(half_widths) < 0.2


def test_an_envelope_of_four_sizes_has_no_interval() -> None:
    """Hardly a draw of four sizes has all of them, and of fewer at most one lies between others."""
    data = symmetric(15, 9)
    of_few = data.take(np.isin(data.params, sorted(set(data.params.tolist()))[5:9]))
    assert envelope(of_few).params.exponent > 0
    assert envelope_draws(of_few, 100) == []


def test_isoflop_is_biased_where_sizes_lie_to_one_side() -> None:
    """Which is why no exponent is told of one approach alone: with sizes drifting away from the optimum, approach 2
    misses what approach 3 finds."""
    flops = np.repeat(np.geomspace(1e18, 1e22, 7), 9)
    best = 0.1 * flops**0.4516  # a = beta / (alpha + beta)
    drift = np.repeat(np.linspace(1, 6, 7), 9)
    size = best * drift * np.tile(np.geomspace(0.2, 5, 9), 7)
    tokens = flops / (6 * size)
    data = points(size, tokens, surface(size, tokens))
    assert abs(isoflop(data).params.exponent - 0.28 / 0.62) > 0.01
    theta = fit_form(data).theta
    assert theta[4] / (theta[3] + theta[4]) == pytest.approx(0.28 / 0.62, abs=1e-4)


def test_law_of_the_learning_rate() -> None:
    size, tokens, lr = (a.ravel() for a in np.meshgrid([1e7, 3e7, 1e8], [1e9, 4e9], np.geomspace(1e-4, 3e-2, 9)))
    best = 0.1 * size**-0.25 * tokens**0.05
    data = points(size, tokens, 3 + 0.05 * np.log(lr / best) ** 2, lr=lr)
    law = setting_law(data, "lr")
    assert (law.by_params, law.by_tokens) == (pytest.approx(-0.25, abs=1e-6), pytest.approx(0.05, abs=1e-6))
    assert law.factor == pytest.approx(0.1, rel=1e-3)
    assert law.cells == 6
    with pytest.raises(UserError, match="0 sizes and budgets with a best batch"):
        setting_law(data, "batch")
    # Of each cell the best learning rate alone goes into the other fits.
    assert len(data.best_of_each()) == 6
    assert (data.best_of_each().loss <= data.loss.min() + 0.05).all()


def test_multiplier_of_compute() -> None:
    """A variant that makes of C what the reference makes of 1.4 C."""
    reference = synthetic(sizes=40, budgets=8, noise=1e-4)
    better = synthetic(sizes=40, budgets=8, noise=1e-4, seed=1)
    better.loss[:] = surface(better.params, 1.4 * better.tokens) * (better.loss / surface(better.params, better.tokens))
    # D 1.4 times as large at the same N is C 1.4 times as large at that N; the reference's own optimum is elsewhere.
    analyses = {name: analyse(data, Settings("2", bootstrap=100)) for name, data in (("a", reference), ("b", better))}
    found = multipliers(analyses, "a")["b"]
    assert 1.1 < found.low < found.value < found.high < 1.5
    assert multipliers({"a": analyses["a"], "b": analyses["a"]}, "a")["b"].value == pytest.approx(1, rel=1e-9)
