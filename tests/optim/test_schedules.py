"""Learning-rate schedules against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optim.config import ScheduleConfig
from optim.schedules import lr_factor

STEPS = 100


def curve(**keys: object) -> list[float]:
    """Factor of every step from 1 to STEPS."""
    config = ScheduleConfig.model_validate(keys)
    return [lr_factor(config, step, STEPS) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd", "inverse_sqrt"])
def test_warmup_rises_linearly_to_the_peak(name: str) -> None:
    values = curve(name=name, warmup_steps=10)
    assert values[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(values) == pytest.approx(1.0)
    assert values[10:] == sorted(values[10:], reverse=True)


def test_constant() -> None:
    assert curve(name="constant") == [1.0] * STEPS


def test_linear_ends_at_its_floor() -> None:
    values = curve(name="linear", min_lr_ratio=0.2)
    assert values == pytest.approx([1 - 0.8 * step / STEPS for step in range(1, STEPS + 1)])


def test_cosine() -> None:
    values = curve(name="cosine", warmup_steps=20, min_lr_ratio=0.1)
    for step in range(20, STEPS + 1):
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 20) / 80)) / 2
        assert values[step - 1] == pytest.approx(expected)


def test_wsd_is_flat_then_falls_over_its_decay() -> None:
    values = curve(name="wsd", warmup_steps=5, decay_steps=25)
    assert values[4:75] == [1.0] * 71
    assert values[75:] == pytest.approx([1 - (step - 75) / 25 for step in range(76, STEPS + 1)])
    assert curve(name="wsd")[:80] == [1.0] * 80  # a fifth by default


@pytest.mark.parametrize("d_model", [64, 512])
@pytest.mark.parametrize("warmup", [1, 40, 4000])
def test_inverse_sqrt_is_the_transformers(d_model: int, warmup: int) -> None:
    """Vaswani et al. 2017, equation 3, at every step, when lr is (d_model * warmup) ** -0.5."""
    config = ScheduleConfig(name="inverse_sqrt", warmup_steps=warmup)
    steps = range(1, 20_001)
    ours = np.array([(d_model * warmup) ** -0.5 * lr_factor(config, step, len(steps)) for step in steps])
    s = np.array(steps, dtype=np.float64)
    np.testing.assert_allclose(ours, d_model**-0.5 * np.minimum(s**-0.5, s * warmup**-1.5), rtol=1e-14)
    assert ours.argmax() + 1 == warmup


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"name": "cosine", "decay_steps": 3}, "'decay_steps' does nothing under name: cosine"),
        ({"name": "constant", "min_lr_ratio": 0.1}, "'min_lr_ratio' does nothing"),
        ({"name": "inverse_sqrt"}, "'warmup_steps' must be at least 1"),
    ],
)
def test_keys_that_do_nothing_are_refused(keys: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ScheduleConfig.model_validate(keys)
