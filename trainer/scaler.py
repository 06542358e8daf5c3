"""Dynamic loss scaling, which keeps small gradients of fp16 from being flushed to zero. Pure logic, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config import TrainConfig

# The defaults of torch.amp.GradScaler.
INITIAL_SCALE = 2.0**16
INTERVAL = 2000


@dataclass
class LossScaler:
    """The factor on the loss: halved where a gradient overflowed, doubled after `interval` good steps in a row.

    An overflowed update is skipped whole (Micikevicius et al. 2018, section 3.2). What overflowed is decided by the
    caller, from a number that is the same on all ranks, so that the scale is too. Powers of two are exact in floating
    point: as long as nothing leaves fp16's range, scaling changes no gradient.
    """

    scale: float = INITIAL_SCALE
    interval: int = INTERVAL
    good_steps: int = 0  # in a row
    skipped_steps: int = 0  # in the whole run

    def good_step(self) -> None:
        """Note an update that was made."""
        self.good_steps += 1
        if self.good_steps >= self.interval:
            self.scale *= 2
            self.good_steps = 0

    def overflow(self) -> None:
        """Note an update that was skipped. Below 1 the scale would shrink what it is to protect."""
        self.scale = max(1.0, self.scale / 2)
        self.good_steps = 0
        self.skipped_steps += 1

    def state(self) -> dict[str, Any]:
        """What a resumed run must know, as plain data."""
        return {"loss_scale": self.scale, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state()` gave."""
        self.scale = state["loss_scale"]
        self.good_steps = state["good_steps"]
        self.skipped_steps = state["skipped_steps"]


def make_scaler(train: TrainConfig) -> LossScaler | None:
    """The scaler of a config; None where the precision needs none."""
    if train.precision != "fp16":
        return None
    return LossScaler(train.loss_scale_init or INITIAL_SCALE, train.loss_scale_interval or INTERVAL)
