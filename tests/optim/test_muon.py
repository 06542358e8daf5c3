"""Muon against `torch.optim.Muon` in full precision, and against its definition in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from optim.muon import SCALES, Muon
from optim.newton_schulz import flops, newton_schulz

LR, DECAY, STEPS = 0.05, 0.1, 4


def recorded(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """A weight, and a gradient for each step, of different sizes."""
    generator = torch.Generator().manual_seed(sum(shape))
    weight, *gradients = torch.randn(STEPS + 1, *shape, generator=generator, dtype=dtype)
    return weight, [g * 10.0 ** (-step) for step, g in enumerate(gradients)]


def make_state(rule: Muon, like_BMN: Tensor) -> dict[str, Tensor]:
    batch, m, n = like_BMN.shape
    return {name: like_BMN.new_zeros(batch, *shape) for name, shape in rule.state(m, n).items()}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)], ids=str)
def test_equals_torch_in_full_precision(
    shape: tuple[int, int], nesterov: bool, adjust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum, polynomial, scale and decay over several steps; torch averages where the rule sums."""
    # A copy, as a cast to bfloat16 is one: torch divides what comes out of it in place.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    weight, gradients = recorded(*shape)
    parameter = torch.nn.Parameter(weight.clone())
    original = torch.optim.Muon(
        [parameter], lr=LR, weight_decay=DECAY, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust
    )
    rule = Muon(0.9, nesterov, {"original": "original", "match_rms_adamw": "rms"}[adjust], coefficients="keller")
    state = make_state(rule, weight[None])
    for step, gradient in enumerate(gradients, start=1):
        parameter.grad = gradient.clone()  # torch's is changed
        original.step()
        weight = (1 - LR * DECAY) * weight - LR * rule.update(gradient[None], state, step)[0]
        expected = parameter.detach()
        assert ((weight - expected).norm() / expected.norm()).item() < 1e-6, step


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=str)
def test_equals_its_definition(shape: tuple[int, int], scale: str, nesterov: bool) -> None:
    m, n = shape
    factor = {"original": math.sqrt(max(1, m / n)), "rms": 0.2 * math.sqrt(max(m, n)), "spectral": math.sqrt(m / n)}
    _, gradients = recorded(3, m, n, dtype=torch.float64)
    rule = Muon(momentum=0.8, nesterov=nesterov, scale=scale)
    state = make_state(rule, gradients[0])
    momentum = torch.zeros(3, m, n, dtype=torch.float64)
    for step, gradient in enumerate(gradients, start=1):
        momentum = gradient + 0.8 * momentum
        ahead = gradient + 0.8 * momentum if nesterov else momentum
        expected = factor[scale] * newton_schulz(ahead)
        before = gradient.clone()
        torch.testing.assert_close(rule.update(gradient, state, step), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state["momentum"], momentum, rtol=1e-14, atol=1e-14)
        assert torch.equal(gradient, before)


def test_root_mean_square_of_scale_rms_is_that_of_adamw() -> None:
    """0.2, whatever the shape, where no singular value is too small for the polynomial."""
    for shape in ((8, 32), (32, 8), (8, 80)):
        _, gradients = recorded(1, *shape)
        rule = Muon(scale="rms", coefficients="polar_express_8")
        update = rule.update(gradients[0], make_state(rule, gradients[0]), 1)
        assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("shape", [(7, 33), (33, 7)], ids=str)
def test_a_batch_changes_no_bit(shape: tuple[int, int]) -> None:
    rule = Muon()
    _, gradients = recorded(4, *shape)
    whole = make_state(rule, gradients[0])
    parts = [make_state(rule, gradients[0][part]) for part in (slice(0, 1), slice(1, 4))]
    for step, gradient in enumerate(gradients, start=1):
        expected = rule.update(gradient, whole, step)
        halves = [rule.update(gradient[:1], parts[0], step), rule.update(gradient[1:], parts[1], step)]
        assert torch.equal(torch.cat(halves), expected)
    assert torch.equal(torch.cat([part["momentum"] for part in parts]), whole["momentum"])


def test_cost_and_steps() -> None:
    """Products make up nearly all of the cost, and steps multiply them."""
    for rule, steps in ((Muon(), 5), (Muon(ns_steps=3), 3), (Muon(coefficients="polar_express_8"), 8)):
        assert 1.0 < rule.cost(64, 256) / flops(256, 64, steps) < 1.05
    assert 0 < Muon().cost(1, 16) < Muon().cost(2, 16)
    assert Muon(scale="spectral").factor(9, 4) == 1.5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"scale": "match"}, "no scale 'match'; there are original, rms, spectral"),
        ({"coefficients": "quintic"}, "no table of coefficients 'quintic'"),
        ({"momentum": 1.0}, "momentum must lie in"),
        ({"ns_steps": 0}, "at least one step"),
    ],
)
def test_wrong_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Muon(**options)
