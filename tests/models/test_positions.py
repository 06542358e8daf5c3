"""Sinusoidal and rotary positions against their definitions."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from models.positions import rope_table, rotate, sinusoidal_table


@pytest.mark.parametrize("d", [6, 7])
def test_sinusoidal_table_is_the_formula(d: int) -> None:
    table = sinusoidal_table(torch.arange(3, 8), d, torch.float64)
    for i in range(5):
        for c in range(d):
            angle = (3 + i) / 10000 ** (2 * (c // 2) / d)
            assert table[i, c].item() == pytest.approx(math.cos(angle) if c % 2 else math.sin(angle), abs=1e-14)


def test_rotation_multiplies_pairs_by_a_unit_complex_number() -> None:
    positions = torch.tensor([0, 1, 5])
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = rotate(x, rope_table(positions, 6, 100.0, torch.float64))
    for h in range(2):
        for t, position in enumerate(positions.tolist()):
            for j in range(3):
                z = complex(x[0, h, t, j], x[0, h, t, j + 3]) * cmath.exp(1j * position * 100.0 ** (-2 * j / 6))
                assert complex(y[0, h, t, j], y[0, h, t, j + 3]) == pytest.approx(z, abs=1e-13)


def test_rotated_scores_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64, generator=generator) for _ in range(2))

    def score(i: int, j: int) -> float:
        at_i, at_j = (rope_table(torch.tensor([t]), 8, 10000.0, torch.float64) for t in (i, j))
        return (rotate(q, at_i) * rotate(k, at_j)).sum().item()

    assert score(7, 3) == pytest.approx(score(1004, 1000), rel=1e-10)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-3)


def test_a_table_that_a_wrapper_has_cast_is_refused() -> None:
    x = torch.randn(1, 1, 3, 4)
    table = rope_table(torch.arange(3), 4, 10000.0, torch.float32)
    assert rotate(x.bfloat16(), table).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="do not cast"):
        rotate(x.bfloat16(), table.bfloat16())
