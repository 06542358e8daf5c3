"""How well a fit is known: bootstrap, profile, and what it would have said of the largest budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import brentq

from common.errors import UserError
from scaling.checks import refuse_unidentifiable
from scaling.fit import Fit, fit_form, minimise, one_thread, psi_moments
from scaling.records import Points

Resampling = Literal["pairs", "residuals"]
_CHI2_95 = 3.841459  # of one degree of freedom
_FEW = 60  # observations below which residuals are resampled: drawing pairs would lose whole budgets


@dataclass(frozen=True)
class Draws:
    """Fits to resampled data."""

    fit: Fit
    thetas: np.ndarray  # (draws, p), in the coordinates of `fit`
    resampling: Resampling
    seed: int

    def interval(self, name: str) -> tuple[float, float]:
        """95% percentile interval of a natural parameter."""
        return percentiles(self.fit.form.natural(self.thetas, self.fit.centre)[name])

    def log_loss(self, params: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Predicted log loss of each draw, (draws, n)."""
        x, y = self.fit.centred(params, tokens)
        return np.stack([self.fit.form.log_loss(theta, x, y)[0] for theta in self.thetas])

    def noise(self, shape: tuple[int, ...]) -> np.ndarray:
        """Residuals drawn at random, wider by the degrees of freedom that the fit took: what one more run adds."""
        return _drawn(self.fit, np.random.default_rng(self.seed + 1), shape)


def _drawn(fit: Fit, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Residuals of a fit drawn with replacement."""
    n, p = len(fit.residuals), len(fit.theta)
    centred = fit.residuals - np.median(fit.residuals)
    return generator.choice(centred, shape) * (n / max(1, n - p)) ** 0.5


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


@one_thread
def bootstrap(points: Points, fit: Fit, n: int, seed: int = 0) -> Draws:
    """Fit n resampled data sets, each from the optimum.

    From 60 groups on pairs: observations, in whole groups, are drawn with replacement (Efron 1979). Else residuals: the
    losses are those that the fit predicts plus residuals drawn so, which keeps the design.
    """
    groups = [np.flatnonzero(points.group == name) for name in dict.fromkeys(points.group)]
    resampling: Resampling = "pairs" if len(groups) >= _FEW else "residuals"
    generator = np.random.default_rng(seed)
    x, y = fit.centred(points.params, points.tokens)
    z, predicted = np.log(points.loss), np.log(points.loss) + fit.residuals
    thetas = []
    for _ in range(n):
        if resampling == "pairs":
            rows = np.concatenate([groups[i] for i in generator.integers(len(groups), size=len(groups))])
            end = minimise(fit.form, x[rows], y[rows], z[rows], fit.delta, fit.theta)
        else:
            end = minimise(fit.form, x, y, predicted + _drawn(fit, generator, z.shape), fit.delta, fit.theta)
        thetas.append(end[1])
    return Draws(fit, np.stack(thetas), resampling, seed)


@one_thread
def profile(points: Points, fit: Fit, place: int) -> tuple[float, float]:
    """95% interval of a coordinate by the profile: where the least objective with it held fixed rises too far.

    The rise is compared with chi squared by the tau test of M-estimators: `2 (S - S_min) mean(psi') / mean(psi^2)`
    (Hampel et al. 1986, 7.2). An end that is not found within 60 standard errors is infinite.
    """
    x, y = fit.centred(points.params, points.tokens)
    z = np.log(points.loss)
    psi, slope = psi_moments(fit.residuals, fit.delta)
    best, error = float(fit.theta[place]), max(float(fit.standard_errors[place]), 1e-6)

    def excess(value: float) -> float:
        rise = minimise(fit.form, x, y, z, fit.delta, fit.theta, {place: value})[0] - fit.objective
        return 2 * rise * slope / max(psi, 1e-300) - _CHI2_95

    ends = []
    for sign in (-1.0, 1.0):
        inside, step = best, error
        while step < 60 * error and excess(best + sign * step) < 0:
            inside, step = best + sign * step, 2 * step
        found = step < 60 * error
        ends.append(float(brentq(excess, inside, best + sign * step, xtol=1e-3 * error)) if found else sign * np.inf)
    return ends[0], ends[1]


@dataclass(frozen=True)
class Extrapolation:
    """What a fit without the largest budget says of it."""

    records: int  # of the largest budget
    factor: float  # its compute over the largest that was fitted
    mean_error: float  # of relative differences of the loss, predicted over observed minus one
    worst_error: float


def leave_largest_out(points: Points, form: str, delta: float) -> Extrapolation:
    """Fit all but the largest budget and compare. Raises `UserError` where the rest is too little."""
    largest = points.largest
    rest = points.take(~largest)
    if not len(rest):
        raise UserError(f"{points.source}: one budget only, so that none can be left out; add smaller ones")
    refuse_unidentifiable(rest, form)
    fit, held = fit_form(rest, form, delta), points.take(largest)
    errors = np.exp(fit.log_loss(held.params, held.tokens)) / held.loss - 1
    factor = float(np.median(held.flops) / rest.flops.max())
    return Extrapolation(len(held), factor, float(errors.mean()), float(errors[np.abs(errors).argmax()]))
