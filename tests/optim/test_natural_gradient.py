"""The survey's example of natural gradient descent: step sizes, criterion and counts are those that the docs quote."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "docs" / "natural_gradient.py"


def load(script: Path) -> Any:
    """A script of the docs as a module."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> Any:
    """The functions that draw the figure."""
    return load(SCRIPT)


def test_the_problem(example: Any) -> None:
    assert np.array_equal(example.A, [[2, 0.5], [0.5, 0]])
    assert np.linalg.cond(example.A.T @ example.A) == pytest.approx(322, abs=0.5)
    assert example.best_rate() == pytest.approx(0.444, abs=5e-4)
    assert example.CLOSE == 1e-12
    w, small = np.array([0.3, -0.7]), 1e-6
    f = lambda v: np.linalg.norm(example.A @ v) ** 2 / 2  # noqa: E731
    numeric = [(f(w + small * e) - f(w - small * e)) / (2 * small) for e in np.eye(2)]
    assert numeric == pytest.approx(example.FISHER @ w, rel=1e-6)  # the gradient that both descents use


def test_natural_gradient_lands(example: Any) -> None:
    """In one step with eta 1; with eta 0.25 each step leaves three quarters of w, whatever its direction."""
    assert len(example.descend(1.0, natural=True)) - 1 == 1
    points = example.descend(0.25, natural=True)
    assert len(points) - 1 == 95
    assert points[40] == pytest.approx(0.75**40 * np.array([0.5, 0.5]), rel=1e-9)


@pytest.mark.parametrize(("rate", "steps"), [(0.1, 19_110), ("best", 4_393)])
def test_gradient_descent_takes_thousands(example: Any, rate: Any, steps: int) -> None:
    """Up to what another machine's rounding adds or takes."""
    points = example.descend(example.best_rate() if rate == "best" else rate, natural=False)
    assert len(points) - 1 == pytest.approx(steps, abs=5)
    assert np.linalg.norm(points[-1]) < 1e-12 <= np.linalg.norm(points[-2])


def test_the_best_rate_is_the_best(example: Any) -> None:
    """Shrinking is fastest there, from the worst of starts; a little above it, descent no longer converges."""

    def shrinking(rate: float) -> float:
        return float(np.linalg.norm(np.eye(2) - rate * example.FISHER, 2))

    best = example.best_rate()
    assert shrinking(best) < min(shrinking(0.999 * best), shrinking(1.001 * best)) < 1
    assert len(example.descend(1.02 * best, natural=False, limit=300)) == 301
