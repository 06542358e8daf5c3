"""The interface that every engine fits, so that the loop is written once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from models.transformer import Transformer

OptimizerFactory = Callable[[Mapping[str, Tensor]], Optimizer]


class Engine(ABC):
    """Owns the distributed model and its optimizer after `prepare`.

    A step is: some pairs of `model(...)` and `micro_backward(loss, last)`, then `grad_norm()`, then `step(scale)`.
    Clipping is the factor given to `step`, because engines such as DeepSpeed fuse norm, clip and update.
    """

    model: nn.Module
    optimizer: Optimizer

    @abstractmethod
    def prepare(self, model: Transformer, make_optimizer: OptimizerFactory) -> None:
        """Distribute a model that was built on the meta device, fill in its initial weights, make the optimizer.

        The optimizer is made here and not before, because distributing a model replaces its parameters.
        """

    @abstractmethod
    def micro_backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch's loss; gradients are complete over all ranks after the last one."""

    @abstractmethod
    def grad_norm(self) -> float:
        """Norm of the accumulated gradient over all parameters, the same on every rank (rule 5)."""

    @abstractmethod
    def step(self, scale: float) -> None:
        """Multiply gradients by `scale`, update the parameters and forget the gradients."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Live weights `model.<name>` and optimizer state `optim.<name>.<key>` as logical tensors, for DCP.

        The tensors share memory with the engine: loading into them in place loads the engine.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back a state that was made by `state_dict()` and loaded into."""
