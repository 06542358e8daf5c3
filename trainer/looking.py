"""Looking at an engine around its update, from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.engines.base import Engine


@contextmanager
def looked_at(engine: Engine, before: Callable[[], None], after: Callable[[], None] | None = None) -> Iterator[None]:
    """In this context, call `before` when an engine's gradients are complete and not yet clipped, `after` the update.

    `step` is wrapped on the instance. So the training step has no hook for this, and pays nothing where nobody looks.
    Neither is called around an update that is skipped.
    """
    step = engine.step

    def look_and_step(scale: float) -> None:
        before()
        step(scale)
        if after is not None:
            after()

    engine.step = look_and_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.step  # the class's is there again
