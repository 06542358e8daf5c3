"""A matrix optimizer at every layout is the one process' to the bit, computes nothing twice and sends what it must."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from optim.config import OptimConfig
from optim.muon import Muon
from tests.gang import Gang
from tests.optim.sharded import LAYOUTS, OPTIONS, SHAPES, differences, make, placed, process_group, run, values

# But for the rule of a user's own, whose batched products round by where in a batch a matrix is.
CASES = [(name, OptimConfig(name=name, **options)) for name, options in OPTIONS.items() if ":" not in name]
CASES += [
    ("muon, heads", OptimConfig(name="muon", split_heads=True)),
    ("shampoo, sum", OptimConfig(name="shampoo", factor_beta=1.0, grafting="adagrad", precondition_every=2)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_one_process_to_the_bit(gang: Gang, layout: str) -> None:
    """Five steps of every rule on recorded gradients: uneven and empty parts, one row, fused parts, experts."""
    for found in gang.run(differences, CASES, layout, world=math.prod(LAYOUTS[layout][0])):
        assert found == {label: [] for label, _ in CASES}


def _one_step(config: OptimConfig) -> dict[str, Tensor]:
    """The updates of a first step on four ranks, of which each has some rows."""
    with process_group():
        weights, _ = run(config, placed("fsdp4"), steps=1)
        decayed = {name: values(name, 0) * (1 - 0.02 * 0.1) for name in ("square", "tall", "wide")}
        return {name: (weight - weights[name]) / 0.02 for name, weight in decayed.items()}


def test_a_rule_on_shards_would_be_another_rule(gang: Gang) -> None:
    """What others do by mistake: each rank's rows made orthogonal for themselves. Ours is never that."""
    muon = Muon()

    def updated(gradient: Tensor) -> Tensor:
        return muon.update(gradient[None], {"momentum": torch.zeros(1, *gradient.shape)}, 1)[0]

    for name, ours in gang.run(_one_step, OptimConfig(name="muon"), world=4)[0].items():
        gradient = values(name, 1, 0.1)
        whole, on_shards = updated(gradient), torch.cat([updated(rows) for rows in gradient.chunk(4)])
        # The scale of a shard of other proportions is left out of the comparison.
        on_shards *= whole.norm() / on_shards.norm()
        assert (on_shards - whole).norm() > 0.1 * whole.norm(), name
        assert (ours - whole).norm() < 1e-5 * whole.norm(), name


class Counted:
    """What happens in a step, seen from outside: matrices given to the rule, collectives, bytes sent to other ranks."""

    def __init__(self) -> None:
        self.matrices: Counter[tuple[int, ...]] = Counter()
        self.decompositions = 0
        self.collectives: Counter[str] = Counter()
        self.bytes = 0
        self.flops = 0


def _count(config: OptimConfig, layout: str | None, steps: int) -> Counted:
    """On recorded gradients, at a layout or in one process."""
    counted = Counted()
    all_to_all, all_reduce, eigh = dist.all_to_all_single, dist.all_reduce, torch.linalg.eigh

    def sending(output: Tensor, given: Tensor, into: list[int], out: list[int], group: Any, **rest: Any) -> Any:
        counted.collectives["all_to_all"] += 1
        counted.bytes += (sum(out) - out[dist.get_rank(group)]) * given.element_size()
        return all_to_all(output, given, into, out, group, **rest)

    def reducing(*arguments: Any, **rest: Any) -> Any:
        counted.collectives["all_reduce"] += 1
        return all_reduce(*arguments, **rest)

    def decomposing(matrix: Tensor, *rest: Any) -> Any:
        counted.decompositions += math.prod(matrix.shape[:-2])
        return eigh(matrix, *rest)

    parameters = {}
    place = (lambda name, tensor: tensor) if layout is None else placed(layout)
    for name in (*SHAPES, "gain", "table"):
        parameters[name] = torch.nn.Parameter(place(name, values(name, 0)))
    optimizer = make(parameters, config, 400)
    update = optimizer.rule.update

    def updating(gradient: Tensor, *rest: Any) -> Tensor:
        counted.matrices[tuple(gradient.shape[1:])] += len(gradient)
        return update(gradient, *rest)

    for step in range(1, steps + 1):
        for name, parameter in parameters.items():
            parameter.grad = place(name, values(name, step, 0.1))
        with (
            mock.patch.object(dist, "all_to_all_single", sending),
            mock.patch.object(dist, "all_reduce", reducing),
            mock.patch.object(torch.linalg, "eigh", decomposing),
            mock.patch.object(optimizer.rule, "update", updating),
            FlopCounterMode(display=False) as flops,
        ):
            optimizer.step()
        counted.flops += flops.get_total_flops()
    return counted


def _count_both(configs: list[tuple[str, OptimConfig]], layout: str) -> dict[str, tuple[Counted, Counted]]:
    with process_group():
        return {label: (_count(config, layout, 2), _count(config, None, 2)) for label, config in configs}


def buckets() -> int:
    """How many the matrices make, where each is full at 400 numbers."""
    number, size = 1, 0
    for shape in SHAPES.values():
        pieces = [shape] if len(shape) == 2 else [shape[1:]] * shape[0]
        pieces = [(32, 20), (8, 20), (8, 20)] if shape == SHAPES["fused"] else pieces
        for piece in pieces:
            if size >= 400:
                number, size = number + 1, 0
            size += math.prod(piece)
    return number


@pytest.mark.parametrize("layout", ["fsdp4", "hsdp2x2"])
def test_nothing_is_computed_twice(gang: Gang, layout: str) -> None:
    """Summed over ranks: each matrix once a step, the operations and decompositions of one process."""
    by_rank = gang.run(_count_both, CASES, layout, world=4)
    for label, _ in CASES:
        ranks, alone = [found[label][0] for found in by_rank], by_rank[0][label][1]
        assert sum((r.matrices for r in ranks), Counter()) == alone.matrices, label
        assert sum(alone.matrices.values()) == 2 * (7 + 2 + 5 + 8 + (5 if "heads" in label else 0)), label
        assert sum(r.decompositions for r in ranks) == alone.decompositions, label
        assert alone.flops > 0
        assert alone.flops <= sum(r.flops for r in ranks) <= 1.05 * alone.flops, label
        assert all(r.collectives["all_reduce"] == 2 for r in ranks), label  # the vote
        if "heads" not in label:
            assert all(r.collectives["all_to_all"] == 2 * 2 * buckets() for r in ranks), label


def _bytes(layout: str) -> int:
    """Bytes that this rank sends in a step, of matrices that all ranks hold even parts of."""
    shapes = {"a": (24, 16), "b": (8, 40), "c": (4, 4), "d": (16, 16), "e": (16, 16)}
    with (
        process_group(),
        mock.patch.dict("tests.optim.sharded.SHAPES", shapes, clear=True),
        mock.patch.dict("tests.optim.sharded.ROLES", {name: {} for name in shapes}),
    ):
        return _count(OptimConfig(name="muon"), layout, 1).bytes


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp2", 2), ("fsdp4", 4)])
def test_bytes_that_travel(gang: Gang, layout: str, ranks: int) -> None:
    """There and back, each rank's part but for what it owns: 2 (W - 1) / W numbers per number, over all ranks."""
    numbers = 24 * 16 + 8 * 40 + 4 * 4 + 2 * 16 * 16
    assert sum(gang.run(_bytes, layout, world=ranks)) == 2 * (ranks - 1) * numbers * 4 // ranks
