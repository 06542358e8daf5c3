"""Steps that are not made, and losses that jump (rule 10). Imports no torch.

Everything here follows from numbers that all ranks have, so that all do the same; it goes into checkpoints, so that a
resumed run does what an unbroken one does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# Losses that a new one is compared with, and how many there must be.
_WINDOW, _LEAST = 64, 32
# The median absolute deviation of a normal distribution, in standard deviations, and the least of it that counts: what
# differs by less than a ten-thousandth of the loss is no spike, however still the losses before it were.
_NORMAL, _STILL = 0.6745, 1e-4


@dataclass
class Health:
    """What a run knows of its bad steps."""

    skipped: int = 0  # updates that were not made since loss or gradient norm was not finite
    in_a_row: int = 0
    roll_backs: int = 0
    undone: list[list[int]] = field(default_factory=list)  # first and last steps that were rolled back
    losses: list[float] = field(default_factory=list)  # the newest ones that were no spikes

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Health:
        """From `state()`, or from nothing."""
        return cls(**state)

    def state(self) -> dict[str, Any]:
        """What a resumed run must know, as plain data."""
        return asdict(self)

    def bad(self) -> None:
        """Note a step that was skipped."""
        self.skipped += 1
        self.in_a_row += 1

    def good(self, loss: float) -> float:
        """Note a step that was made; how far its loss lies above the last ones, in robust standard deviations.

        That is 0.6745 (loss - median) / (median absolute deviation), the modified z-score of Iglewicz and Hoaglin
        1993; 0 as long as there are too few losses. What is above `train.spike_score` is not to be counted in: `keep`
        the others.
        """
        self.in_a_row = 0
        if len(self.losses) < _LEAST:
            return 0.0
        median = statistics.median(self.losses)
        deviation = statistics.median(abs(other - median) for other in self.losses)
        return _NORMAL * (loss - median) / max(deviation, _STILL * abs(median))

    def keep(self, loss: float) -> None:
        """Compare later losses with this one too."""
        self.losses = [*self.losses, loss][-_WINDOW:]

    def rolled_back(self, first: int, last: int) -> None:
        """Note, on the state of an earlier step, that the steps after it are undone and their batches left out."""
        self.roll_backs += 1
        self.undone.append([first, last])


def or_none(value: float) -> float | None:
    """A number as JSON has them: without those that are not finite."""
    return value if math.isfinite(value) else None
