"""An engine that is looked at between its backward pass and its update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from models.transformer import Transformer
from trainer.engines.base import Engine, OptimizerFactory


class Recorder(Engine):
    """Hands everything on to another engine, and calls `look` when gradients are complete and not yet clipped.

    The training step takes it for an engine. So it needs no hook for this, and training itself pays nothing.
    """

    def __init__(self, engine: Engine, look: Callable[[Engine], None]) -> None:
        self._engine, self._look = engine, look
        self.model, self.optimizer = engine.model, engine.optimizer

    def prepare(self, model: Transformer, make_optimizer: OptimizerFactory) -> None:
        raise NotImplementedError("the engine inside is prepared")

    @property
    def loss_scale(self) -> float:
        return self._engine.loss_scale

    def micro_backward(self, loss: Tensor, last: bool) -> None:
        self._engine.micro_backward(loss, last)

    def gradients(self) -> dict[str, Tensor]:
        return self._engine.gradients()

    def grad_norm(self) -> float:
        return self._engine.grad_norm()

    def step(self, scale: float) -> None:
        self._look(self._engine)
        self._engine.step(scale)

    def skip(self) -> None:
        self._engine.skip()

    def scaler_state(self) -> dict[str, Any]:
        return self._engine.scaler_state()

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        self._engine.load_scaler_state(state)

    def state_dict(self) -> dict[str, Tensor]:
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._engine.load_state_dict(state)


def weights(engine: Engine) -> dict[str, Tensor]:
    """An engine's live weights by parameter name."""
    return {
        key.removeprefix("model."): tensor for key, tensor in engine.state_dict().items() if key.startswith("model.")
    }


def whole(tensor: Tensor) -> Tensor:
    """The logical tensor, gathered; every rank has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
