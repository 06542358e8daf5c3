"""From fits to decisions: the best size for a compute budget, the loss to expect, the compute an optimizer saves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from common.errors import UserError
from scaling.intervals import Draws, percentiles
from scaling.isoflop import Frontier, PowerLaw, power_law
from scaling.records import Points


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval over the value."""
        return (self.high - self.low) / 2 / abs(self.value)

    def plain(self) -> dict[str, float | None]:
        """As JSON, in which an end that is not known is null."""
        return {key: finite(value) for key, value in asdict(self).items()}


def finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if np.isfinite(value) else None


def estimate(value: float, draws: np.ndarray) -> Estimate:
    """A value and the percentiles of its draws; NaN ends without draws."""
    return Estimate(float(value), *(percentiles(draws) if len(draws) else (np.nan, np.nan)))


def compute_law(points: Points) -> PowerLaw:
    """`C / D = factor N^exponent`: what a token costs, in the convention of the records.

    6 and 1 for 6ND; attention, head and embedding make it differ, and it is fitted.
    """
    per_token = points.flops / points.tokens
    if np.allclose(per_token, 6 * points.params, rtol=1e-6):
        return PowerLaw(6.0, 1.0)
    return power_law(points.params, per_token)


@dataclass(frozen=True)
class Optimum:
    """The best use of a compute budget."""

    flops: float
    params: Estimate
    tokens: Estimate
    loss: Estimate


def best_use(points: Points, draws: Draws, flops: float) -> tuple[Estimate, Estimate]:
    """N and D where the surface is least under `C = k N^s D` (Hoffmann et al. 2022, equation 4, with s = 1):

    N^(alpha + s beta) = alpha A / (s beta B) (C / k)^beta
    """
    if draws.fit.form.name != "hoffmann":
        raise UserError(f"the optimum is known in closed form for the hoffmann form, not {draws.fit.form.name}")
    cost = compute_law(points)

    def best(thetas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        of = draws.fit.form.natural(thetas, draws.fit.centre)
        alpha, beta, s = of["alpha"], of["beta"], cost.exponent
        with np.errstate(all="ignore"):
            log_n = np.log(alpha * of["A"] / (s * beta * of["B"])) + beta * np.log(flops / cost.factor)
            log_n = log_n / (alpha + s * beta)
        return np.exp(log_n), np.exp(np.log(flops / cost.factor) - s * log_n)

    params, tokens = best(draws.fit.theta)
    drawn_params, drawn_tokens = best(draws.thetas)
    usable = np.isfinite(drawn_params) & np.isfinite(drawn_tokens)
    return estimate(float(params), drawn_params[usable]), estimate(float(tokens), drawn_tokens[usable])


def optimum(points: Points, draws: Draws, flops: float, of_run: bool = True) -> Optimum:
    """The best use of a budget, and the loss to expect there: `losses_at`."""
    params, tokens = best_use(points, draws, flops)
    (loss,) = losses_at(draws, np.array([params.value]), np.array([tokens.value]), of_run)
    return Optimum(flops, params, tokens, loss)


def losses_at(draws: Draws, params: np.ndarray, tokens: np.ndarray, of_run: bool = True) -> list[Estimate]:
    """The loss to expect at given N and D: of one run, noise included, or of the surface, as the mean of many runs."""
    values = np.exp(draws.fit.log_loss(params, tokens))
    noise = draws.noise((len(draws.thetas), len(params))) if of_run else 0.0
    drawn = np.exp(draws.log_loss(params, tokens) + noise)
    return [estimate(float(value), column) for value, column in zip(values, drawn.T, strict=True)]


def multiplier(reference: Frontier, ours: Frontier, draws: list[tuple[Frontier, Frontier]], flops: float) -> Estimate:
    """How many times the compute the reference needs for the loss that ours reaches with C, by the laws of the loss."""

    def ratio(theirs: Frontier, mine: Frontier) -> float:
        wanted = mine.loss.at(flops)
        return float((wanted / theirs.loss.factor) ** (1 / theirs.loss.exponent)) / flops

    with np.errstate(all="ignore"):
        drawn = np.array([ratio(*pair) for pair in draws])
    return estimate(ratio(reference, ours), drawn[np.isfinite(drawn)])


def plain_optimum(found: Optimum) -> dict[str, Any]:
    """As JSON."""
    return {"flops": found.flops, **{key: getattr(found, key).plain() for key in ("params", "tokens", "loss")}}
