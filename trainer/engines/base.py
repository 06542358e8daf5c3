"""The interface that every engine fits, so that the loop is written once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from models.transformer import Transformer
from optim.matrix import MatrixOptimizer
from optim.table import Routing, routing_of

OptimizerFactory = Callable[[Mapping[str, Tensor]], Optimizer]


class Engine(ABC):
    """Owns the distributed model and its optimizer after `prepare`.

    A step is: some pairs of `model(...)` and `micro_backward(loss, last)`, then `grad_norm()`, then `step(scale)` or
    `skip()`. Clipping is the factor given to `step`, because engines such as DeepSpeed fuse norm, clip and update.

    An engine may scale losses to keep gradients in fp16's range. How is its own matter; others see `loss_scale`.
    """

    model: nn.Module
    optimizer: Optimizer

    @abstractmethod
    def prepare(self, model: Transformer, make_optimizer: OptimizerFactory) -> None:
        """Distribute a model that was built on the meta device, fill in its initial weights, make the optimizer.

        The optimizer is made here and not before, because distributing a model replaces its parameters.
        """

    @property
    def loss_scale(self) -> float:
        """The factor on losses, and so on gradients until `step`; 1.0 where nothing is scaled."""
        return 1.0

    @abstractmethod
    def micro_backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch's loss; gradients are complete over all ranks after the last one."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients by parameter name, as logical tensors, between the last backward and `step`.

        Under fp16 they are still multiplied by `loss_scale`.
        """

    @abstractmethod
    def grad_norm(self) -> float:
        """Norm of the accumulated gradient over all parameters, the same on every rank (rule 5), and not scaled."""

    @abstractmethod
    def step(self, scale: float) -> None:
        """Multiply gradients by `scale`, update the parameters and forget the gradients."""

    @abstractmethod
    def skip(self, overflow: bool) -> None:
        """Forget the gradients of a step without an update; after an `overflow` lower the loss scale."""

    def scaler_state(self) -> dict[str, Any]:
        """State of the loss scaler as plain data, with at least `loss_scale` and `skipped_steps`; empty without one."""
        return {}

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `scaler_state()` gave."""
        return  # without a scaler there is nothing to take back

    def routing(self) -> Routing | None:
        """What a rule for matrices has to do, and who does it; None without one. All ranks call it at once."""
        return routing_of(self.optimizer) if isinstance(self.optimizer, MatrixOptimizer) else None

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Live weights `model.<name>` and optimizer state `optim.<name>.<key>` as logical tensors, for DCP.

        The tensors share memory with the engine: loading into them in place loads the engine.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back a state that was made by `state_dict()` and loaded into."""
