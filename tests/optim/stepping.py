"""Rules without any optimizer around them: steps from zeros, and the same bits alone and in batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from optim.rule import Rule

# Addresses and lengths that no vector register divides, and a single row.
ODD_SHAPES = ((33, 64), (7, 33), (33, 7), (1, 16))


def gradients(shape: tuple[int, ...], steps: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Random gradients of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 3.0**-t for t in range(steps)]


def fresh_state(rule: Rule, batch: int, m: int, n: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: torch.zeros(batch, *shape, dtype=dtype) for name, shape in rule.state(m, n).items()}


def run(rule: Rule, gradients_TBMN: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Updates of each step, and the state in the end. A gradient is not changed, nor given back as the update."""
    state = fresh_state(rule, *gradients_TBMN[0].shape, dtype=gradients_TBMN[0].dtype)  # type: ignore[misc]
    updates = []
    for step, gradient_BMN in enumerate(gradients_TBMN, 1):
        given_BMN = gradient_BMN.clone()
        update_BMN = rule.update(given_BMN, state, step)
        assert torch.equal(given_BMN, gradient_BMN)
        assert update_BMN.shape == given_BMN.shape
        assert update_BMN.dtype == given_BMN.dtype
        assert update_BMN.untyped_storage().data_ptr() != given_BMN.untyped_storage().data_ptr()
        updates.append(update_BMN)
    return updates, state


def assert_independent_of_batch(rule: Rule, shape: tuple[int, int]) -> None:
    """Updates and state of five matrices at once and of each by itself are the same, bit for bit."""
    whole = gradients((5, *shape), 4, torch.float32)
    updates, state = run(rule, whole)
    for b in range(5):
        alone, state_alone = run(rule, [gradient[b : b + 1].clone() for gradient in whole])
        for together_BMN, single_BMN in zip(updates, alone, strict=True):
            assert torch.equal(together_BMN[b], single_BMN[0])
        for name, tensor in state.items():
            assert torch.equal(tensor[b], state_alone[name][0]), name


class FailingSolver:
    """Takes the place of `roots.eigh`: fails at the calls of the given numbers, from 0, and counts all."""

    def __init__(self, patch: pytest.MonkeyPatch, *failing: int):
        self.calls, self.failing = 0, set(failing)
        patch.setattr("optim.roots.eigh", self)

    def __call__(self, a_NN: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls - 1 in self.failing:
            raise torch.linalg.LinAlgError("injected")
        values_N, vectors_NN = torch.linalg.eigh(a_NN)
        return values_N, vectors_NN


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Relative Frobenius distance."""
    return bool((a - b).norm() <= tolerance * b.norm())
