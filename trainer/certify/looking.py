"""What an engine holds, for those who look at it from outside (trainer/looking.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from optim.boxes import Box, Parts
from trainer.engines.base import Engine


def weights(engine: Engine) -> dict[str, Tensor]:
    """An engine's live weights and buffers by name."""
    return {
        key.removeprefix("model."): tensor for key, tensor in engine.state_dict().items() if key.startswith("model.")
    }


def whole(tensor: Tensor) -> Tensor:
    """The logical tensor, gathered; every rank has to call this."""
    if isinstance(tensor, Parts):
        everything = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for box, part in zip(tensor.here, tensor.pieces, strict=True):
            everything[box.within(Box((0,) * tensor.ndim, tuple(tensor.shape)))] = part
        dist.all_reduce(everything)  # of each element all ranks but one have a zero
        return everything
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
