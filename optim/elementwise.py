"""Optimizers of torch that treat every number alike, with their state from the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

_CLASSES: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
# The state tensors of each optimizer, shaped like the parameter. Adagrad makes its own in its constructor.
_MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "adagrad": (),
    "rmsprop": ("square_avg", "momentum_buffer"),
}
ELEMENTWISE = tuple(_CLASSES.values())


def elementwise(groups: list[dict[str, Any]], name: str, options: Mapping[str, Any] | None = None) -> Optimizer:
    """The optimizer that `optim.name` calls so, of groups that have their `lr` and may have options of their own."""
    options = options or {}
    # torch's fused kernels round differently in a tensor's last elements, so a shard would not equal its part of the
    # whole, bit for bit; the foreach kernels do.
    optimizer = _CLASSES[name](groups, foreach=True, **options)  # type: ignore[call-arg]
    _create_state(optimizer, name, options.get("momentum"))
    return optimizer


def _create_state(optimizer: Optimizer, name: str, momentum: float | None) -> None:
    """Fill in the state that `torch.optim` would make lazily: zeros, which give the same first step bit for bit."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for key in _MOMENTS[name]:
                if key != "momentum_buffer" or momentum:
                    state[key] = torch.zeros_like(parameter)
            if name != "sgd" and "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
