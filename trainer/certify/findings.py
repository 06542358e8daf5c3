"""What a certification compares, how far it may differ, and how far it does. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# Quantity -> largest difference allowed, relative. Loss and gradient norm are numbers; gradients and updates are
# tensors, compared in relative Frobenius norm. What is left in fp32 is the rounding of sums taken in another order.
_FP32 = {"initial weight": 0.0, "loss": 1e-6, "gradient norm": 1e-6, "gradient": 1e-5, "update": 1e-5}
# The plain process rounds to half precision where the layout does, so that differences are as small. But the head's
# gradient is rounded once a chunk of logits in training (models/loss.py), and once a micro-batch there.
_HALF = {**_FP32, "gradient norm": 1e-5, "gradient": 3e-3}
# torch.compile does not round between the operators that it fuses, as the plain process does; where ranks balance
# experts together, the plain process has one micro-batch, and so one gradient to round, where they have several; and
# ranks that share a matrix round their parts of a sum.
_HALF_APART = {**_FP32, "loss": 1e-3, "gradient norm": 1e-2, "gradient": 3e-2}
_COUNTED = {"skipped update": 0.0, "copies that differ": 0.0, "late compilations": 0.0}
# A tensor whose norm is less than this part of the norm over all tensors is compared with that instead of its own.
SMALL = 1e-6


def allowed(precision: str, rounds_apart: bool) -> dict[str, float]:
    """Largest difference of every quantity, for `train.precision` and whether layout and plain process round alike."""
    relative = _FP32 if precision == "fp32" else _HALF_APART if rounds_apart else _HALF
    return relative | _COUNTED


@dataclass
class Finding:
    """The worst difference of one quantity of one parameter (or of the whole, where the parameter is empty)."""

    quantity: str
    parameter: str
    allowed: float
    difference: float = 0.0
    step: int = 0

    @property
    def passed(self) -> bool:
        """Whether the difference is allowed; NaN is not."""
        return self.difference <= self.allowed

    @property
    def excess(self) -> float:
        """Difference over what is allowed: what "worst first" sorts by."""
        if math.isnan(self.difference):
            return math.inf
        if self.allowed == 0:
            return math.inf if self.difference > 0 else 0.0
        return self.difference / self.allowed

    def subject(self) -> str:
        """The quantity, and whose."""
        return f"{self.quantity} of {self.parameter}" if self.parameter else self.quantity


class Findings:
    """The worst difference of everything that was compared."""

    def __init__(self, precision: str, rounds_apart: bool) -> None:
        self._allowed = allowed(precision, rounds_apart)
        self._worst: dict[tuple[str, str], Finding] = {}

    def add(self, quantity: str, parameter: str, step: int, difference: float) -> None:
        """Keep a difference if it is the largest of its kind so far, NaN being larger than any number."""
        key = quantity, parameter
        if key not in self._worst:
            self._worst[key] = Finding(quantity, parameter, self._allowed[quantity], difference, step)
        worst = self._worst[key]
        if not math.isnan(worst.difference) and not difference <= worst.difference:
            worst.difference, worst.step = difference, step

    def worst_first(self) -> list[Finding]:
        """All findings, by how much of the allowed difference they take up."""
        return sorted(self._worst.values(), key=lambda finding: (-finding.excess, finding.step))

    def failures(self) -> list[Finding]:
        """What is not allowed, the earliest step first and there the worst: later ones may follow from it."""
        failed = [finding for finding in self.worst_first() if not finding.passed]
        return sorted(failed, key=lambda finding: finding.step)


def relative(ours: float, theirs: float) -> float:
    """`|ours - theirs| / |theirs|` of two numbers; two that are equal, infinite ones too, do not differ."""
    if ours == theirs:
        return 0.0
    return abs(ours - theirs) / abs(theirs) if theirs else math.inf


def as_json(value: Any) -> Any:
    """A number for JSON, which has no infinity and no NaN: these become words."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
