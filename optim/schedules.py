"""Learning-rate schedules: pure functions of the step, so that nothing about them is ever saved or restored."""

from __future__ import annotations

import math

from optim.config import ScheduleConfig


def decay_start(config: ScheduleConfig, total_steps: int) -> int:
    """Under wsd the last step before the decay, which is a fifth of all steps unless `decay_steps` is given."""
    return total_steps - (config.decay_steps if config.decay_steps is not None else max(1, total_steps // 5))


def lr_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Learning rate of a step divided by the peak learning rate.

    Args:
        config: shape, warm-up and decay.
        step: number of the update, from 1 to `total_steps`.
        total_steps: updates of the whole run (`train.steps`).

    With w the warm-up, s the step and r the final ratio:
        warm-up       s / w for s <= w, then
        constant      1
        linear        from 1 at w down to r at the last step
        cosine        the same way along half a cosine (Loshchilov & Hutter 2017)
        wsd           1, then linearly down to r over the last `decay_steps` (Hu et al. 2024)
        inverse_sqrt  sqrt(w / s). With lr = (d_model * w) ** -0.5 it is Vaswani et al. 2017, equation 3:
                      d_model ** -0.5 * min(s ** -0.5, s * w ** -1.5)
    """
    warmup = config.warmup_steps
    if config.name == "inverse_sqrt":
        return min(step / warmup, math.sqrt(warmup / step))
    if step < warmup:
        return step / warmup
    if config.name == "constant":
        return 1.0
    default_floor = 0.0 if config.name == "wsd" else 0.1
    floor = default_floor if config.min_lr_ratio is None else config.min_lr_ratio
    start = warmup
    if config.name == "wsd":
        start = max(warmup, decay_start(config, total_steps))
    # How much of the decay has passed: 0 at `start`, 1 at the last step and after it.
    progress = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    if config.name == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2.0
    return 1.0 - (1.0 - floor) * progress
