"""Initial weights and copies: the same tensor on any layout, the same bits on every rank that holds them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gang import Gang
from tests.runs import started
from trainer.initialize import normal

LAYOUTS = {
    "one": (1, []),
    "ddp4": (4, ["parallel.engine=ddp"]),
    "fsdp3": (3, ["train.global_batch_size=24"]),  # 512 rows and 3 ranks: uneven shards
    "fsdp4": (4, []),
    "hsdp2x2": (4, ["parallel.dp_replicate=2"]),
}
REPLICAS = ("ddp4", "hsdp2x2")


def initial_and_trained(arguments: list[str], steps: int) -> dict[str, Any]:
    """In a rank: hashes of the whole initial weights, and of this rank's own parts before and after some steps."""
    from torch.distributed.tensor import DTensor

    with started(arguments) as here:

        def local() -> dict[str, str]:
            state = here.engine.state_dict().items()
            return {name: _digest(p.to_local() if isinstance(p, DTensor) else p) for name, p in state}

        result: dict[str, Any] = {
            "shard": here.runtime.rank % here.layout.dp_shard,
            "whole": {n: _digest(p.full_tensor()) for n, p in here.engine.parameters.items()},
            "initial": local(),
        }
        for step in range(steps):
            here.step(here.batch(step))
        result["trained"] = local()
    return result


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


@pytest.fixture(scope="module")
def results(gang: Gang, corpus: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: gang.run(
            initial_and_trained, [f"data.corpus={corpus}", *overrides], 5 if name in REPLICAS else 0, world=world
        )
        for name, (world, overrides) in LAYOUTS.items()
    }


def test_initial_weights_are_the_same_tensor_at_any_layout(results: dict[str, list[dict[str, Any]]]) -> None:
    reference = results["one"][0]["whole"]
    assert len(set(reference.values())) > len(reference) / 2  # different names, different values
    for name, ranks in results.items():
        for rank in ranks:
            assert rank["whole"] == reference, name


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_are_bit_identical(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Ranks with the same place in the sharding dimension hold the same bits, after init and after five steps."""
    by_shard: dict[int, list[dict[str, Any]]] = {}
    for rank in results[name]:
        by_shard.setdefault(rank["shard"], []).append(rank)
    assert len(by_shard) == (1 if name == "ddp4" else 2)
    for copies in by_shard.values():
        assert len(copies) == (4 if name == "ddp4" else 2)
        for copy in copies[1:]:
            assert copy["initial"] == copies[0]["initial"]
            assert copy["trained"] == copies[0]["trained"]
        assert copies[0]["trained"] != copies[0]["initial"]


def test_seed_and_name_change_the_values() -> None:
    a, b, c = normal(0, "x", 0, 100, 1.0), normal(1, "x", 0, 100, 1.0), normal(0, "y", 0, 100, 1.0)
    assert not np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_any_piece_is_a_piece_of_the_whole() -> None:
    whole = normal(3, "w", 0, 50_000, 0.5)
    for start, stop in ((0, 1), (16_383, 16_385), (12_345, 43_210), (49_999, 50_000)):
        assert np.array_equal(normal(3, "w", start, stop, 0.5), whole[start:stop])


def test_values_are_normal() -> None:
    """Kolmogorov-Smirnov distance to the normal distribution below the 0.1% point of a true sample, and no repeats."""
    values = np.sort(normal(7, "w", 0, 200_000, 2.0).astype(np.float64)) / 2.0
    cumulative = torch.special.ndtr(torch.from_numpy(values)).numpy()
    n = len(values)
    distance = max(np.abs(cumulative - np.arange(1, n + 1) / n).max(), np.abs(cumulative - np.arange(n) / n).max())
    assert distance < 1.95 / n**0.5
    assert len(np.unique(values)) > 0.99 * n
