"""How the loss depends on parameters N and tokens D: formulas with gradients.

Every form is fitted in coordinates in which log N and log D are counted from their means. A and alpha, which move
along a narrow valley in the usual ones, are then nearly independent, and every start finds the optimum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np


class Form(ABC):
    """A formula for log L.

    `theta` are its p coordinates, `x` and `y` the centred log N and log D of n observations, `centre` what was
    subtracted.
    """

    name: ClassVar[str]
    names: ClassVar[tuple[str, ...]]  # of the natural parameters
    exponents: ClassVar[dict[str, int]]  # those of N and of D, with their places among the coordinates

    @abstractmethod
    def log_loss(self, theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """log L, shape (n,), and its derivatives, shape (p, n)."""

    @abstractmethod
    def natural(self, theta: np.ndarray, centre: tuple[float, float]) -> dict[str, np.ndarray]:
        """The parameters as they are published, from coordinates of shape (..., p)."""

    @abstractmethod
    def starts(self, loss: np.ndarray) -> list[tuple[float, ...]]:
        """Coordinates to start from, from small exponents to large and from one term's loss to the other's."""


def _softmax(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log sum exp over the first axis, and the softmax."""
    top = rows.max(axis=0)
    weights = np.exp(rows - top)
    total = weights.sum(axis=0)
    return top + np.log(total), weights / total


class Hoffmann(Form):
    """`L = E + A N^-alpha + B D^-beta` (Hoffmann et al. 2022, approach 3), coordinates (a, b, e, alpha, beta).

    `log L = log(exp(a - alpha x) + exp(b - beta y) + exp(e))`.
    """

    name = "hoffmann"
    names = ("E", "A", "B", "alpha", "beta")
    exponents: ClassVar[dict[str, int]] = {"alpha": 3, "beta": 4}

    def log_loss(self, theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Form`."""
        a, b, e, alpha, beta = theta
        value, (p, q, r) = _softmax(np.stack([a - alpha * x, b - beta * y, np.full_like(x, e)]))
        return value, np.stack([p, q, r, -p * x, -q * y])

    def natural(self, theta: np.ndarray, centre: tuple[float, float]) -> dict[str, np.ndarray]:
        """See `Form`."""
        a, b, e, alpha, beta = np.moveaxis(theta, -1, 0)
        with np.errstate(over="ignore"):  # a bootstrap may draw an exponent that nothing holds
            big_a, big_b = np.exp(a + alpha * centre[0]), np.exp(b + beta * centre[1])
        return {"E": np.exp(e), "A": big_a, "B": big_b, "alpha": alpha, "beta": beta}

    def starts(self, loss: np.ndarray) -> list[tuple[float, ...]]:
        """See `Form`. The shares of the three terms in the median loss, and both exponents, on a grid."""
        exponents, level = (0.1, 0.2, 0.4, 0.8, 1.6), float(np.log(np.median(loss)))
        shares = ((0.2, 0.2, 0.6), (0.45, 0.45, 0.1), (0.05, 0.05, 0.9))
        return [
            (*(level + float(np.log(share)) for share in split), alpha, beta)
            for split in shares
            for alpha in exponents
            for beta in exponents
        ]


class Kaplan(Form):
    """`L = ((Nc / N)^(alpha_N / alpha_D) + Dc / D)^alpha_D` (Kaplan et al. 2020, equation 1.5).

    Coordinates (u, v, alpha_N, alpha_D): `log L = alpha_D log(exp((u - alpha_N x) / alpha_D) + exp(v / alpha_D - y))`.
    """

    name = "kaplan"
    names = ("Nc", "Dc", "alpha_N", "alpha_D")
    exponents: ClassVar[dict[str, int]] = {"alpha_N": 2, "alpha_D": 3}

    def log_loss(self, theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Form`."""
        u, v, alpha_n, alpha_d = theta
        of_n = (u - alpha_n * x) / alpha_d
        value, (p, q) = _softmax(np.stack([of_n, v / alpha_d - y]))
        by_alpha_d = value - p * of_n - q * v / alpha_d
        return alpha_d * value, np.stack([p, q, -p * x, by_alpha_d])

    def natural(self, theta: np.ndarray, centre: tuple[float, float]) -> dict[str, np.ndarray]:
        """See `Form`."""
        u, v, alpha_n, alpha_d = np.moveaxis(theta, -1, 0)
        with np.errstate(over="ignore"):
            big_n, big_d = np.exp(u / alpha_n + centre[0]), np.exp(v / alpha_d + centre[1])
        return {"Nc": big_n, "Dc": big_d, "alpha_N": alpha_n, "alpha_D": alpha_d}

    def starts(self, loss: np.ndarray) -> list[tuple[float, ...]]:
        """See `Form`."""
        exponents, level = (0.03, 0.1, 0.3, 1.0), float(np.log(np.median(loss)))
        return [
            (level + alpha_d * float(np.log(share)), level + alpha_d * float(np.log(1 - share)), alpha_n, alpha_d)
            for share in (0.2, 0.5, 0.8)
            for alpha_n in exponents
            for alpha_d in exponents
        ]


FORMS: dict[str, Form] = {form.name: form for form in (Hoffmann(), Kaplan())}
