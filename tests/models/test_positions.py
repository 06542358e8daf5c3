"""Sinusoidal and rotary positions against their definitions."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.positions import rope_table, rotate, sinusoidal_table


@pytest.mark.parametrize("d", [6, 7])
def test_sinusoidal_table_is_the_formula(d: int) -> None:
    table = sinusoidal_table(torch.arange(3, 8), d, torch.float64)
    for i in range(5):
        for c in range(d):
            angle = (3 + i) / 10000 ** (2 * (c // 2) / d)
            assert table[i, c].item() == pytest.approx(math.cos(angle) if c % 2 else math.sin(angle), abs=1e-14)


def heads(d_head: int, **keys: Any) -> ModelConfig:
    """A config of heads of this width."""
    return ModelConfig(d_model=4 * d_head, head_dim=d_head, **keys)


def test_rotation_multiplies_pairs_by_a_unit_complex_number() -> None:
    positions = torch.tensor([0, 1, 5])
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = rotate(x, rope_table(heads(6, rope_theta=100.0), positions, torch.float64))
    for h in range(2):
        for t, position in enumerate(positions.tolist()):
            for j in range(3):
                z = complex(x[0, h, t, j], x[0, h, t, j + 3]) * cmath.exp(1j * position * 100.0 ** (-2 * j / 6))
                assert complex(y[0, h, t, j], y[0, h, t, j + 3]) == pytest.approx(z, abs=1e-13)


def test_rotated_scores_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64, generator=generator) for _ in range(2))

    def score(i: int, j: int) -> float:
        at_i, at_j = (rope_table(heads(8), torch.tensor([t]), torch.float64) for t in (i, j))
        return (rotate(q, at_i) * rotate(k, at_j)).sum().item()

    assert score(7, 3) == pytest.approx(score(1004, 1000), rel=1e-10)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-3)


def test_the_rest_of_a_head_is_not_rotated() -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    table = rope_table(heads(8, rope_fraction=0.5), torch.arange(5), torch.float64)
    assert torch.equal(rotate(x, table)[..., 4:], x[..., 4:])
    expected = rotate(x[..., :4], rope_table(heads(4), torch.arange(5), torch.float64))
    assert torch.equal(rotate(x, table)[..., :4], expected)


def test_blocks_with_a_window_may_have_a_base_of_their_own() -> None:
    config = heads(
        8, attention_window=4, rope_theta=1e6, rope_theta_local=1e4, rope_scaling={"kind": "linear", "factor": 8}
    )
    places = torch.arange(5)
    assert torch.equal(
        rope_table(config, places, torch.float64, local=True), rope_table(heads(8), places, torch.float64)
    )
    scaled = rope_table(config, 8 * places, torch.float64)
    torch.testing.assert_close(scaled, rope_table(heads(8, rope_theta=1e6), places, torch.float64))
    alike = heads(8, attention_window=4)
    assert torch.equal(rope_table(alike, places, torch.float64, local=True), rope_table(alike, places, torch.float64))


def test_a_table_that_a_wrapper_has_cast_is_refused() -> None:
    x = torch.randn(1, 1, 3, 4)
    table = rope_table(heads(4), torch.arange(3), torch.float32)
    assert rotate(x.bfloat16(), table).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="do not cast"):
        rotate(x.bfloat16(), table.bfloat16())
