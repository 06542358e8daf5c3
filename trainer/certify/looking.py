"""What an engine holds, for those who look at it from outside (trainer/looking.py)."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.engines.base import Engine


def weights(engine: Engine) -> dict[str, Tensor]:
    """An engine's live weights and buffers by name."""
    return {
        key.removeprefix("model."): tensor for key, tensor in engine.state_dict().items() if key.startswith("model.")
    }


def whole(tensor: Tensor) -> Tensor:
    """The logical tensor, gathered; every rank has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
