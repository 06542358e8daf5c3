"""Steps of a matrix optimizer on recorded gradients, in one process and on a gang of ranks in many layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from optim.boxes import local
from optim.build import make_rule
from optim.config import OptimConfig
from optim.matrix import MatrixOptimizer
from optim.ownership import Matrix, matrices_of

# Shapes that divide by nothing, parts that are empty on some ranks, one row, fused parts of unequal rows, experts.
SHAPES: dict[str, tuple[int, ...]] = {
    "square": (24, 24),
    "tall": (33, 16),
    "wide": (7, 40),
    "few": (2, 12),
    "row": (1, 16),
    "fused": (4 * 8 + 2 * 4 + 2 * 4, 20),  # q of 4 heads of 8 rows, k and v of 2 of 4
    "again": (24, 24),
    "experts": (5, 12, 18),
    "more": (8, 10, 6),
}
ROLES: dict[str, dict[str, Any]] = {name: {"parts": 1, "heads": 1} for name in SHAPES} | {
    "fused": {"parts": [32, 8, 8], "heads": [4, 2, 2]}
}
VECTORS = {"gain": (16,), "table": (11, 6)}  # AdamW's
OPTIONS = {
    "muon": {},
    "shampoo": {"precondition_every": 2, "block_size": 16},
    "soap": {"precondition_every": 2},
    "galore": {"rank": 4, "precondition_every": 3},
    "tests.optim.own_rule:Whitened": {},
}

# (ranks, mesh, its dimension names, where dense parameters and experts lie)
Places = tuple[Placement, ...]
LAYOUTS: dict[str, tuple[tuple[int, ...], Places, Places]] = {
    "fsdp2": ((2,), (Shard(0),), (Shard(0),)),
    "fsdp3": ((3,), (Shard(0),), (Shard(1),)),
    "fsdp4": ((4,), (Shard(0),), (Shard(0),)),  # with ep 4 too, which leaves a rank whole experts
    "columns4": ((4,), (Shard(1),), (Shard(2),)),
    "ddp4": ((4,), (Replicate(),), (Replicate(),)),
    "hsdp2x2": ((2, 2), (Replicate(), Shard(0)), (Replicate(), Shard(0))),
    "both2x2": ((2, 2), (Shard(0), Shard(1)), (Shard(1), Shard(0))),
    # What FSDP2 makes of rows that tensor parallelism shares, and of experts that lie on ranks: `efsdp x ep`.
    "fsdp2-tp2": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), (Shard(1), Shard(0))),
}


def values(name: str, step: int, scale: float = 1.0) -> Tensor:
    """What stands for a weight (step 0) or a recorded gradient."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + step)
    return torch.randn((SHAPES | VECTORS)[name], generator=generator) * scale


def make(parameters: dict[str, Tensor], config: OptimConfig, bucket_size: int) -> MatrixOptimizer:
    """An optimizer of `SHAPES` and `VECTORS`, with several groups."""
    matrices: dict[str, list[Matrix]] = {
        name: matrices_of(name, SHAPES[name], ROLES[name], config.split_heads) for name in SHAPES
    }
    split = list(SHAPES)[:4], list(SHAPES)[4:]
    groups: list[dict[str, Any]] = [
        {"params": [parameters[n] for n in names], "names": names, "lr": lr, "weight_decay": 0.1}
        for names, lr in zip(split, (0.02, 0.03), strict=True)
    ]
    names = list(VECTORS)
    groups.append({"params": [parameters[n] for n in names], "names": names, "lr": 0.01, "weight_decay": 0.0})
    return MatrixOptimizer(groups, matrices, make_rule(config), bucket_size)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run(
    config: OptimConfig, place: Any, steps: int = 5, bucket_size: int = 400, missing: Any = None, zero: Any = None
) -> tuple[dict[str, Tensor], MatrixOptimizer]:
    """Weights after some steps. `place(name, tensor)` distributes; `missing(name, step)`: no gradient; `zero`: 0."""
    parameters = {name: torch.nn.Parameter(place(name, values(name, 0))) for name in SHAPES | VECTORS}
    optimizer = make(parameters, config, bucket_size)
    for step in range(1, steps + 1):
        for name, parameter in parameters.items():
            parameter.grad = place(name, values(name, step, 0.1))  # which all ranks do together
            if missing is not None and missing(name, step):
                parameter.grad = None
            if zero is not None and zero(name, step):
                local(parameter.grad).zero_()
        optimizer.step()
    return {name: whole(parameter) for name, parameter in parameters.items()}, optimizer


def placed(layout: str) -> Any:
    """How a layout distributes; every rank calls it."""
    sizes, dense, experts = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])

    def place(name: str, tensor: Tensor) -> Tensor:
        places = experts if tensor.ndim == 3 else dense
        if any(isinstance(at, _StridedShard) for at in places) and tensor.shape[0] % 4:
            places = (Replicate(), Shard(0))  # torch cuts no uneven ones, and a layout with uneven ones is refused
        if tensor.ndim == 1:
            places = tuple(
                Shard(0) if isinstance(place, Shard) and i == 0 else Replicate() for i, place in enumerate(dense)
            )
        return distribute_tensor(tensor, mesh, places)

    return place


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def differences(cases: Sequence[tuple[str, OptimConfig]], layout: str) -> dict[str, list[str]]:
    """By case, which weights are not those of one process, to the bit."""
    with process_group():
        place = placed(layout)
        found = {}
        for label, config in cases:
            ours, _ = run(config, place)
            alone, _ = run(config, lambda name, tensor: tensor)
            found[label] = [name for name in ours if not torch.equal(ours[name], alone[name])]
    return found
