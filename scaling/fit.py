"""Fitting a form: the sum of Huber losses of log residuals, minimised from many starts (Hoffmann et al. 2022, D.2).

The SUM, not the mean: L-BFGS stops when an iteration gains little against `max(|f|, 1)`, and a mean of 1e-6 looks
converged wherever it starts. Here the objective is counted in units of delta squared, which are larger than one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize, nnls
from threadpoolctl import threadpool_limits

from common.errors import UserError
from scaling.forms import FORMS, Form
from scaling.records import Points

DELTA = 1e-3  # of the Huber loss, in log loss, as Hoffmann et al. have it
# Products here are of some hundred numbers: threads of a linear-algebra library wait for each other longer than they
# work, on a machine with other work thirty times as long.
one_thread = threadpool_limits.wrap(limits=1, user_api="blas")
_SAME_OPTIMUM = 1e-4  # relative difference of objectives within which a start has reached the best one
Z = 1.959964  # of a 95% interval of the normal distribution


@dataclass(frozen=True)
class Fit:
    """A fitted form."""

    form: Form
    theta: np.ndarray  # coordinates (p,)
    centre: tuple[float, float]  # means of log N and log D
    delta: float
    objective: float  # sum of Huber losses of log residuals
    residuals: np.ndarray  # predicted minus observed log loss (n,)
    jacobian: np.ndarray  # of log L by the coordinates (p, n)
    starts: int
    share: float  # of the starts that ended at this optimum

    @property
    def parameters(self) -> dict[str, float]:
        """Natural parameters by name."""
        return {name: float(value) for name, value in self.form.natural(self.theta, self.centre).items()}

    def centred(self, params: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """log N and log D as the form has them."""
        return np.log(params) - self.centre[0], np.log(tokens) - self.centre[1]

    def log_loss(self, params: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Predicted log loss at N and D."""
        return self.form.log_loss(self.theta, *self.centred(params, tokens))[0]

    @property
    def condition(self) -> float:
        """Condition number of the Jacobian with columns of equal length: what the data leave undecided."""
        lengths = np.linalg.norm(self.jacobian, axis=1, keepdims=True)
        return float(np.linalg.cond((self.jacobian / np.maximum(lengths, 1e-300)).T))

    @property
    def standard_errors(self) -> np.ndarray:
        """Of the coordinates, by the sandwich formula of M-estimators (Huber 1981, 7.6)."""
        psi, slope = psi_moments(self.residuals, self.delta)
        n, p = self.jacobian.shape[1], self.jacobian.shape[0]
        inverse = np.linalg.pinv(self.jacobian @ self.jacobian.T)
        return np.sqrt(np.maximum(0.0, np.diag(inverse)) * psi * n / max(1, n - p)) / slope


def psi_moments(residuals: np.ndarray, delta: float) -> tuple[float, float]:
    """Means of psi squared and of psi's derivative, for psi(r) = clip(r, -delta, delta).

    The derivative's mean is the share of residuals below delta. Where delta is much smaller than the noise few are, and
    it is taken from the density in a wider window (n^(-1/5) of the residuals' spread).
    """
    size = np.abs(residuals)
    spread = 1.4826 * float(np.median(size))
    window = max(delta, spread * len(residuals) ** -0.2)
    slope = float((size <= window).mean()) * delta / window
    return float(np.minimum(size, delta).__pow__(2).mean()), max(slope, 1e-12)


@one_thread
def fit_form(
    points: Points, form: str = "hoffmann", delta: float = DELTA, starts: Iterable[tuple[float, ...]] | None = None
) -> Fit:
    """Fit from every start and keep the best.

    Args:
        starts: coordinates around the centre of these points; None: the form's own grid, and for Hoffmann's form the
            optimum of least squares by variable projection.

    Raises:
        UserError: no start ended at a finite optimum.
    """
    chosen = FORMS[form]
    centre = (float(np.log(points.params).mean()), float(np.log(points.tokens).mean()))
    x, y, z = np.log(points.params) - centre[0], np.log(points.tokens) - centre[1], np.log(points.loss)
    if starts is None:
        starts = chosen.starts(points.loss)
        if form == "hoffmann":
            starts = [project(x, y, points.loss), *starts]
    ends = [minimise(chosen, x, y, z, delta, start) for start in starts]
    finite = [end for end in ends if np.isfinite(end[0])]
    if not finite:
        raise UserError(f"{points.source}: no start of the {form} fit ended at an optimum; look for wrong rows")
    objective, theta = min(finite, key=lambda end: end[0])
    share = sum(end[0] <= objective * (1 + _SAME_OPTIMUM) + 1e-18 for end in finite) / len(ends)
    predicted, jacobian = chosen.log_loss(theta, x, y)
    return Fit(chosen, theta, centre, delta, objective, predicted - z, jacobian, len(ends), share)


def minimise(
    form: Form,
    x: np.ndarray,
    y: np.ndarray,
    z: np.ndarray,
    delta: float,
    start: Iterable[float],
    fixed: dict[int, float] | None = None,
) -> tuple[float, np.ndarray]:
    """L-BFGS from one start: the sum of Huber losses, and where it is reached.

    Args:
        z: observed log losses.
        fixed: coordinates that stay at a value.
    """

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(all="ignore"):
            predicted, jacobian = form.log_loss(theta, x, y)
            residual = (predicted - z) / delta
            psi = np.clip(residual, -1.0, 1.0)
            value = float(psi @ (residual - 0.5 * psi))
            return (value, jacobian @ psi / delta) if np.isfinite(value) else (1e300, np.zeros_like(theta))

    begin = np.array(list(start), dtype=float)
    bounds = None
    if fixed:
        for place, value in fixed.items():
            begin[place] = value
        bounds = [(fixed[i], fixed[i]) if i in fixed else (None, None) for i in range(len(begin))]
    options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 3000, "maxfun": 6000, "maxcor": 20}
    end = minimize(objective, begin, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    good = np.isfinite(end.x).all() and end.fun < 1e299
    return (float(end.fun) * delta**2 if good else np.inf), end.x


def project(x: np.ndarray, y: np.ndarray, loss: np.ndarray) -> tuple[float, ...]:
    """Hoffmann's coordinates by least squares of relative errors, with variable projection (Golub & Pereyra 1973).

    Given both exponents L is linear in E, A and B, which non-negative least squares finds; what is left is a search in
    two dimensions, on a grid and then by Nelder-Mead.
    """
    target = np.ones_like(loss)

    def solve(exponents: Iterable[float]) -> tuple[float, np.ndarray]:
        alpha, beta = exponents
        with np.errstate(over="ignore"):
            columns = np.stack([np.exp(-alpha * x), np.exp(-beta * y), np.ones_like(x)], axis=1) / loss[:, None]
        if not np.isfinite(columns).all() or min(alpha, beta) <= 0:
            return np.inf, np.zeros(3)
        factors, left = nnls(columns, target)
        return float(left), factors

    grid = np.geomspace(0.05, 2.0, 12)
    begin = min(itertools.product(grid, grid), key=lambda pair: solve(pair)[0])
    found = minimize(lambda pair: solve(pair)[0], begin, method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14})
    a, b, e = np.log(np.maximum(solve(found.x)[1], 1e-12 * float(loss.min())))
    return float(a), float(b), float(e), float(found.x[0]), float(found.x[1])
