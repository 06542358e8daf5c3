"""Gradients that are not finite, on chosen ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def an_infinite_gradient(model: nn.Module, here: bool, value: float = float("inf")) -> Iterator[None]:
    """Put this value into one element of one parameter's gradient, on the ranks where `here` is true."""
    handles = []

    def poison(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[3] = value
        return gradient

    def before_forward(module: nn.Module, _: Any) -> None:
        assert isinstance(module.weight, nn.Parameter)  # the whole weight, of this rank only; it is kept over steps
        handles.append(module.weight.register_hook(poison))

    if here:
        module = model.get_submodule("blocks.1.mlp.w_up")
        handles.append(module.register_forward_pre_hook(before_forward))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
