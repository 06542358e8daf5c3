"""Of which matrices parameters consist, who owns them, and which parts ranks hold."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from optim.boxes import Box, held_boxes
from optim.ownership import Matrix, choose_owners, matrices_of


def test_boxes() -> None:
    a, b = Box((0, 2), (4, 6)), Box((3, 0), (9, 4))
    assert a.meet(b) == b.meet(a) == Box((3, 2), (4, 4))
    assert (a.meet(b).shape, a.meet(b).numel) == ((1, 2), 2)
    assert a.meet(b).within(a) == (slice(3, 4), slice(0, 2))
    assert a.meet(Box((4, 2), (5, 6))).numel == 0


@pytest.mark.parametrize(
    ("role", "heads", "rows"),
    [
        ({}, False, [(0, 12)]),
        ({"parts": 2}, False, [(0, 6), (6, 12)]),
        ({"parts": [8, 2, 2]}, False, [(0, 8), (8, 10), (10, 12)]),
        ({"heads": 3}, False, [(0, 12)]),
        ({"heads": 3}, True, [(0, 4), (4, 8), (8, 12)]),
        ({"parts": [8, 2, 2], "heads": [2, 1, 1]}, True, [(0, 4), (4, 8), (8, 10), (10, 12)]),
    ],
)
def test_matrices_of_a_parameter(role: dict[str, Any], heads: bool, rows: list[tuple[int, int]]) -> None:
    flat = matrices_of("w", (12, 5), role, heads)
    assert [m.box for m in flat] == [Box((a, 0), (b, 5)) for a, b in rows]
    stacked = matrices_of("w", (2, 12, 5), role, heads)
    assert [m.box for m in stacked] == [Box((e, a, 0), (e + 1, b, 5)) for e in (0, 1) for a, b in rows]
    assert [m.shape for m in stacked] == [(b - a, 5) for a, b in rows] * 2
    names = {m.state_name("momentum") for m in stacked}
    assert names == {f"w.momentum.{i}" for i in range(2 * len(rows))}
    assert flat[0].state_name("momentum") == ("w.momentum" if len(rows) == 1 else "w.momentum.0")


@pytest.mark.parametrize(("shape", "role"), [((12,), {}), ((12, 5), {"parts": 5}), ((12, 5), {"parts": [8, 2]})])
def test_what_is_no_matrix(shape: tuple[int, ...], role: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="parameter 'w'"):
        matrices_of("w", shape, role, False)


def cubes(m: int, n: int) -> float:
    return float(m * n * min(m, n))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_owners_have_as_much_to_do(ranks: int) -> None:
    """The busiest of them at most 1.3 times the mean, over forty matrices of random shapes."""
    for seed in range(20):
        draw = random.Random(seed)
        shapes = [(draw.randrange(16, 1024), draw.randrange(16, 1024)) for _ in range(40)]
        matrices = [Matrix(f"w{i}", None, Box((0, 0), shape)) for i, shape in enumerate(shapes)]
        # Each rank has some rows.
        held = {
            m.parameter: [
                [Box((m.shape[0] * r // ranks, 0), (m.shape[0] * (r + 1) // ranks, m.shape[1]))] for r in range(ranks)
            ]
            for m in matrices
        }
        owners = choose_owners(matrices, held, cubes, ranks)
        work = [sum(cubes(*m.shape) for m, o in zip(matrices, owners, strict=True) if o == r) for r in range(ranks)]
        # No choice makes a rank's work less than one matrix', which is above the mean for some of these on 8 ranks.
        assert max(work) <= 1.3 * max(sum(work) / ranks, max(cubes(*shape) for shape in shapes)), (seed, work)
        assert ranks == 8 or max(work) <= 1.3 * sum(work) / ranks, (seed, work)


def test_a_matrix_that_is_whole_somewhere_stays_there() -> None:
    experts = matrices_of("experts", (4, 8, 8), {}, False)
    dense = [Matrix(f"w{i}", None, Box((0, 0), (8, 8))) for i in range(4)]
    held = {"experts": [[Box((2 * r, 0, 0), (2 * r + 2, 8, 8))] for r in (0, 1)]}
    held |= {m.parameter: [[Box((4 * r, 0), (4 * r + 4, 8))] for r in (0, 1)] for m in dense}
    assert choose_owners([*dense, *experts], held, cubes, 2) == [0, 1, 0, 1, 0, 0, 1, 1]


def test_held_boxes_are_those_of_torch() -> None:
    """Each rank's local tensor of a numbered one is what the box says, for uneven and empty parts too."""
    numbered = torch.arange(5 * 3.0).view(5, 3)
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            for places in (
                [Shard(0), Shard(0)],
                [Replicate(), Shard(1)],
                [Shard(1), Replicate()],
                [Shard(1), Shard(0)],
            ):
                tensor = distribute_tensor(numbered, mesh, places, src_data_rank=None)
                (box,) = held_boxes({"w": tensor})["w"][rank]
                at = box.within(Box((0, 0), (5, 3)))
                assert torch.equal(tensor.to_local(), numbered[at].reshape(tensor.to_local().shape))
            sums = DTensor.from_local(numbered, mesh, [Partial(), Replicate()])
            with pytest.raises(ValueError, match="partial"):
                held_boxes({"w": sums})
        finally:
            dist.destroy_process_group()
