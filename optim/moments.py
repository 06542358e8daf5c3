"""Running sums and averages, and Adam's direction, as several rules have them.

Each line rounds once per element, without fused multiply and add, which not every element of a tensor gets: so a matrix
has the same moments, bit for bit, wherever it lies in a batch.
"""

from __future__ import annotations

from torch import Tensor


def accumulate(total: Tensor, value: Tensor, beta: float) -> None:
    """In place: total <- beta total + (1 - beta) value, or the plain sum if beta is 1."""
    if beta == 1.0:
        total.add_(value)
    else:
        total.mul_(beta).add_(value * (1.0 - beta))


def adam(
    gradient: Tensor, average: Tensor, square: Tensor, betas: tuple[float, float], eps: float, step: int
) -> Tensor:
    """Adam's direction, as `torch.optim.Adam` has it: moments free of bias, epsilon outside the root.

    Args:
        gradient: any shape; not changed.
        average, square: both moments, of that shape, brought up to date in place.
        step: from 1.
    """
    accumulate(average, gradient, betas[0])
    accumulate(square, gradient * gradient, betas[1])
    root = (square / (1.0 - betas[1] ** step)).sqrt_().add_(eps)
    return (average / (1.0 - betas[0] ** step)).div_(root)
