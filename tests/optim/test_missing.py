"""Gradients that are missing and eigendecompositions that fail: all ranks decide the same, and none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from optim import roots
from optim.config import OptimConfig
from tests.gang import Gang
from tests.optim.sharded import placed, process_group, run

LIMIT = 60.0


def _on_last(name: str, step: int) -> bool:
    return dist.get_rank() == dist.get_world_size() - 1 and name in ("square", "experts", "gain")


def _everywhere(name: str, step: int) -> bool:
    return (name, step) in (("square", 1), ("experts", 2), ("experts", 3), ("gain", 2), ("again", 3))


def _all(name: str, step: int) -> bool:
    return step == 2


# Where a gradient is missing, by name and step. An expert that no token came to has a gradient, of zeros.
MISSING: dict[str, Callable[[str, int], bool]] = {"everywhere": _everywhere, "all": _all, "on the last": _on_last}


def _missing(rule: str, kind: str) -> list[str]:
    """Which weights are not as they should be: those of one process, or with zeros for what only one rank lacks."""
    config, missing = OptimConfig(name=rule), MISSING[kind]
    with process_group():
        place = placed("fsdp4")
        ours, _ = run(config, place, steps=4, missing=missing)
        if kind == "on the last":
            right, _ = run(config, place, steps=4, zero=missing)
        else:
            right, _ = run(config, lambda name, tensor: tensor, steps=4, missing=missing)
        return [name for name in ours if not torch.equal(ours[name], right[name])]


@pytest.mark.parametrize("kind", MISSING)
@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_missing_gradients(gang: Gang, rule: str, kind: str) -> None:
    assert gang.run(_missing, rule, kind, world=4, timeout=LIMIT) == [[]] * 4


def _rest_untouched() -> tuple[bool, bool]:
    """A parameter without a gradient keeps its weight and its state; the others move."""
    with process_group():
        place = placed("fsdp4")
        before, first = run(OptimConfig(name="muon"), place, steps=2)
        after, second = run(
            OptimConfig(name="muon"), place, steps=3, missing=lambda name, step: step == 3 and name == "wide"
        )
        state, later = first.named_state(), second.named_state()
        kept = [k for k in state if k.startswith("wide.")]
        return (
            torch.equal(before["wide"], after["wide"]) and not torch.equal(before["tall"], after["tall"]),
            all(torch.equal(state[k], later[k]) for k in kept),
        )


def test_what_lacks_a_gradient_rests(gang: Gang) -> None:
    assert gang.run(_rest_untouched, world=4, timeout=LIMIT) == [(True, True)] * 4


def _failing(rule: str, steps: int, times: int) -> dict[str, Tensor] | str:
    """The last of four ranks has an eigendecomposition that fails at its `times` first calls."""
    eigh, calls = roots.eigh, 0

    def failing(*arguments: Any, **rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 3 and calls <= times:
            raise torch.linalg.LinAlgError("injected")
        return eigh(*arguments, **rest)

    with process_group(), mock.patch.object(roots, "eigh", failing):
        try:
            weights, _ = run(OptimConfig(name=rule, precondition_every=1), placed("fsdp4"), steps=steps)
        except RuntimeError as error:
            return str(error)
        return weights


@pytest.mark.parametrize("rule", ["shampoo", "soap", "galore"])
def test_failed_eigendecompositions_on_one_rank_are_bridged(gang: Gang, rule: str) -> None:
    """All ranks go on, with the same weights."""
    weights = gang.run(_failing, rule, 4, 2, world=4, timeout=LIMIT)
    for theirs in weights:
        assert not isinstance(theirs, str), theirs
        assert all(torch.isfinite(weight).all() for weight in theirs.values())
        assert all(torch.equal(theirs[name], weights[0][name]) for name in theirs)


@pytest.mark.parametrize("rule", ["shampoo", "galore"])
def test_after_too_many_of_them_all_ranks_end(gang: Gang, rule: str) -> None:
    lines = gang.run(_failing, rule, 8, 10**6, world=4, timeout=LIMIT)
    assert all(isinstance(line, str) for line in lines)
    assert len(set(lines)) == 1
    assert "failed 4 times in a row" in lines[0]
