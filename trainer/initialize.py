"""Initial weights that depend on the seed and the parameter's name, never on the layout (rule 3).

Every element of a parameter is a fixed function of (seed, name, its position), drawn with a counter-based generator
(Philox 4x64, Salmon et al. 2011) and the Box-Muller transform. A rank draws only the rows that it holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.init import Init
from optim.boxes import Box, Parts, pieces

# Elements are made in whole blocks that start at multiples of this, so that an element goes through the same vector
# instructions, at the same place in the same array, whichever rank makes it.
_BLOCK = 1 << 14


def initialize(parameters: Mapping[str, Tensor], inits: Mapping[str, Init], seed: int) -> None:
    """Fill parameters in place.

    Args:
        parameters: name to materialised parameter, plain or DTensor or in parts (what is local is filled).
        inits: name to the distribution that the model declares; every parameter must have one.
        seed: `run.seed`.
    """
    for name, parameter in parameters.items():
        init, shape = inits[name], tuple(parameter.shape)
        for box, here in zip(_local_boxes(parameter), pieces(parameter), strict=True):
            if init.kind == "normal":
                here.copy_(torch.from_numpy(_draw(seed, name, init.std, shape, box)))
            else:
                here.fill_(1.0 if init.kind == "ones" else 0.0)


def local_box(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part of a parameter, plain or DTensor, and where it begins in the whole."""
    shape = tuple(parameter.shape)
    if isinstance(parameter, DTensor):
        return compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return shape, (0,) * len(shape)


def _local_boxes(parameter: Tensor) -> list[Box]:
    if isinstance(parameter, Parts):
        return parameter.here
    shape, offset = local_box(parameter)
    return [Box(tuple(offset), tuple(o + n for o, n in zip(offset, shape, strict=True)))]


def _draw(seed: int, name: str, std: float, shape: tuple[int, ...], box: Box) -> np.ndarray:
    """A box of a normal parameter of this shape, float32."""
    if box.numel == 0:
        return np.zeros(box.shape, dtype=np.float32)
    row = math.prod(shape[1:])
    rows = normal(seed, name, box.start[0] * row, box.stop[0] * row, std).reshape(box.shape[0], *shape[1:])
    inner = tuple(slice(start, stop) for start, stop in zip(box.start[1:], box.stop[1:], strict=True))
    return np.ascontiguousarray(rows[(slice(None), *inner)])


def normal(seed: int, name: str, start: int, stop: int, std: float) -> np.ndarray:
    """Elements `start` to `stop` of a parameter's flattened normal values, float32."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")
    result = np.empty(stop - start, dtype=np.float32)
    for block in range(start // _BLOCK, -(-stop // _BLOCK)):
        first = block * _BLOCK
        lo, hi = max(start, first), min(stop, first + _BLOCK)
        result[lo - start : hi - start] = _normal_block(key, block, std)[lo - first : hi - first]
    return result


def _normal_block(key: int, block: int, std: float) -> np.ndarray:
    # One counter of Philox 4x64 gives four 64-bit words, and each element takes one word.
    words = np.random.Philox(key=key, counter=block * (_BLOCK // 4)).random_raw(_BLOCK)
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = std * np.sqrt(-2.0 * np.log1p(-uniform[: _BLOCK // 2]))
    angle = 2.0 * np.pi * uniform[_BLOCK // 2 :]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
