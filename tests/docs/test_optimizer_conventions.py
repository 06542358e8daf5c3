"""Where the updates of `torch.optim`, which are ours, differ from the other textbook form (docs/optimizers.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from optim.build import build_optimizer, set_lr
from optim.config import OptimConfig

STEPS = 6
CONSTANT = [0.1] * STEPS
SCHEDULED = [0.1 * (1 - t / STEPS) for t in range(STEPS)]
Form = Callable[[Sequence[float]], Tensor]


def weights() -> Tensor:
    return torch.linspace(-1, 1, 9, dtype=torch.float64)


def gradient(step: int) -> Tensor:
    return torch.cos(torch.arange(9, dtype=torch.float64) + step)


def ours(rates: Sequence[float], name: str, **options: Any) -> Tensor:
    parameter = torch.nn.Parameter(weights())
    optimizer = build_optimizer({"w": parameter}, {"w": {"role": "hidden_matrix"}}, OptimConfig(name=name, **options))
    for step, rate in enumerate(rates):
        parameter.grad = gradient(step)
        set_lr(optimizer, rate)
        optimizer.step()
    return parameter.detach()


def momentum(rates: Sequence[float], mu: float, rate_inside: bool) -> Tensor:
    """Inside: v = mu v - eta g, w += v. Outside: b = mu b + g, w -= eta b."""
    w, v = weights(), torch.zeros(9, dtype=torch.float64)
    for step, rate in enumerate(rates):
        v = mu * v - rate * gradient(step) if rate_inside else mu * v + gradient(step)
        w = w + v if rate_inside else w - rate * v
    return w


def adaptive(rates: Sequence[float], eps: float, under_root: bool, alpha: float | None) -> Tensor:
    """Adagrad (alpha None) or RMSprop, with eps under the root or beside it."""
    w, s = weights(), torch.zeros(9, dtype=torch.float64)
    for step, rate in enumerate(rates):
        g = gradient(step)
        s = s + g**2 if alpha is None else alpha * s + (1 - alpha) * g**2
        w = w - rate * g / ((s + eps).sqrt() if under_root else s.sqrt() + eps)
    return w


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_momentum_keeps_the_learning_rate_outside() -> None:
    for rates in (CONSTANT, SCHEDULED):
        assert gap(ours(rates, "sgd", momentum=0.9), momentum(rates, 0.9, rate_inside=False)) < 1e-12
    assert gap(ours(CONSTANT, "sgd", momentum=0.9), momentum(CONSTANT, 0.9, rate_inside=True)) < 1e-12
    assert gap(ours(SCHEDULED, "sgd", momentum=0.9), momentum(SCHEDULED, 0.9, rate_inside=True)) > 0.01


@pytest.mark.parametrize(("name", "alpha"), [("adagrad", None), ("rmsprop", 0.9)])
def test_epsilon_stands_outside_the_root(name: str, alpha: float | None) -> None:
    options = {} if alpha is None else {"alpha": alpha}
    for eps, apart in ((1.0, 0.01), (1e-14, 0.0)):
        result = ours(CONSTANT, name, eps=eps, **options)
        assert gap(result, adaptive(CONSTANT, eps, under_root=False, alpha=alpha)) < 1e-12
        other = gap(result, adaptive(CONSTANT, eps, under_root=True, alpha=alpha))
        assert other > apart if apart else other < 1e-6


def test_root_of_epsilon_comes_near_the_other_form() -> None:
    """sqrt(s) + sqrt(eps) over sqrt(s + eps) lies in [1, sqrt(2)], and at 1 at both ends."""
    s, eps = torch.logspace(-20, 20, 401, dtype=torch.float64), 1.0
    ratio = (s.sqrt() + math.sqrt(eps)) / (s + eps).sqrt()
    assert float(ratio.min()) >= 1.0
    assert float(ratio.max()) == pytest.approx(math.sqrt(2))
    assert ratio[[0, -1]].tolist() == pytest.approx([1.0, 1.0], abs=1e-9)


def test_adamw_decay_is_multiplied_by_the_learning_rate() -> None:
    """With eps so large that the gradient does nothing, a step shrinks the weights by 1 - eta lambda."""
    expected = weights() * math.prod(1 - rate * 0.5 for rate in SCHEDULED)
    assert gap(ours(SCHEDULED, "adamw", weight_decay=0.5, eps=1e30), expected) < 1e-12
