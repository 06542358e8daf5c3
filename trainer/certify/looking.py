"""Looking at an engine between its backward pass and its update, from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.engines.base import Engine


@contextmanager
def looked_at(engine: Engine, look: Callable[[], None]) -> Iterator[None]:
    """In this context, call `look` when an engine's gradients are complete and not yet clipped.

    `step` is wrapped on the instance. So the training step has no hook for this, and training itself pays nothing.
    """
    step = engine.step

    def look_and_step(scale: float) -> None:
        look()
        step(scale)

    engine.step = look_and_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.step  # the class's is there again


def weights(engine: Engine) -> dict[str, Tensor]:
    """An engine's live weights and buffers by name."""
    return {
        key.removeprefix("model."): tensor for key, tensor in engine.state_dict().items() if key.startswith("model.")
    }


def whole(tensor: Tensor) -> Tensor:
    """The logical tensor, gathered; every rank has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
