"""Muon: momentum whose singular values are made equal (Jordan et al. 2024, "Muon: an optimizer for hidden layers")."""

from __future__ import annotations

import math

from torch import Tensor

from optim.newton_schulz import flops, newton_schulz, steps_of
from optim.rule import Rule


def _original(m: int, n: int) -> float:
    return math.sqrt(max(1.0, m / n))


def _rms(m: int, n: int) -> float:
    return 0.2 * math.sqrt(max(m, n))


def _spectral(m: int, n: int) -> float:
    return math.sqrt(m / n)


SCALES = {"original": _original, "rms": _rms, "spectral": _spectral}


class Muon(Rule):
    """M = G + mu M; U = scale(m, n) * orthogonal factor of G + mu M, or of M without `nesterov`.

    The factor is approximate: see `newton_schulz`. As it does not depend on scale, an average (1 - mu) M of gradients,
    as torch.optim.Muon keeps it, gives the same update as this sum, as long as mu stays.

    Args:
        momentum: mu, in [0, 1).
        nesterov: look ahead by the newest gradient.
        scale: `original` sqrt(max(1, m / n)), as in torch.optim.Muon; `rms` 0.2 sqrt(max(m, n)), by which an entry's
            root mean square is about that of an AdamW update (Liu et al. 2025, arXiv 2502.16982); `spectral`
            sqrt(m / n), by which outputs change alike at all widths (Bernstein & Newhouse 2024, arXiv 2410.21265).
            m counts a matrix' outputs and n its inputs.
        coefficients: a table of `newton_schulz`.
        ns_steps: steps of that iteration, the table's own number by default.

    Raises:
        ValueError: an unknown scale or table, or a number out of range.
    """

    def __init__(
        self,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: str = "original",
        coefficients: str = "polar_express",
        ns_steps: int | None = None,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), not be {momentum}")
        if scale not in SCALES:
            raise ValueError(f"no scale '{scale}'; there are {', '.join(SCALES)}")
        self.momentum, self.nesterov, self.scale = momentum, nesterov, SCALES[scale]
        self.coefficients, self.steps = coefficients, len(steps_of(coefficients, ns_steps).steps)

    def state(self, m: int, n: int) -> dict[str, tuple[int, ...]]:
        return {"momentum": (m, n)}

    def update(self, gradient_BMN: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        momentum_BMN = state["momentum"]
        momentum_BMN.mul_(self.momentum).add_(gradient_BMN)
        direction_BMN = gradient_BMN.add(momentum_BMN, alpha=self.momentum) if self.nesterov else momentum_BMN
        update_BMN = newton_schulz(direction_BMN, self.coefficients, self.steps)
        factor = self.factor(*gradient_BMN.shape[-2:])
        return (update_BMN if factor == 1.0 else update_BMN.mul_(factor)).to(gradient_BMN.dtype)

    def cost(self, m: int, n: int) -> float:
        return flops(m, n, self.steps) + 10.0 * m * n  # products, and what is done to every entry

    def factor(self, m: int, n: int) -> float:
        return self.scale(m, n)
