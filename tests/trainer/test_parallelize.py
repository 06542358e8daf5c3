"""Every knob acts: precision, activation checkpointing, compile, communication under accumulation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.gang import Gang
from tests.runs import started


class Watch(TorchDispatchMode):
    """Counts operators, and operand types of matrix products, from outside the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.matmul_types: Counter[str] = Counter()
        self.reduced_types: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removesuffix(".default")
        self.calls[name] += 1
        if name in ("aten.mm", "aten.addmm", "aten.bmm"):
            self.matmul_types[str(args[-1].dtype)] += 1
        if "c10d" in name and "reduce" in name:
            tensors, _ = tree_flatten(args)
            self.reduced_types.update(str(t.dtype) for t in tensors if isinstance(t, torch.Tensor))
        return function(*args, **(kwargs or {}))


def watched_step(arguments: list[str]) -> dict[str, Any]:
    """In a rank: what happens in the second training step of a config."""
    with started(arguments) as here:
        losses = []
        for step in range(2):
            batch = here.batch(step)
            with Watch() as watch:
                losses.append(here.step(batch)[0])
        state = {str(tensor.dtype) for tensor in here.engine.state_dict().values()}
        return {
            "calls": dict(watch.calls),
            "matmuls": set(watch.matmul_types),
            "reduced": set(watch.reduced_types),
            "state": state,
            "losses": losses,
        }


def step_of(gang: Gang, corpus: Path, *overrides: str, world: int = 1) -> dict[str, Any]:
    return gang.run(watched_step, [f"data.corpus={corpus}", *overrides], world=world, timeout=240)[0]


def test_bf16_products_with_fp32_state_and_reduction(gang: Gang, corpus: Path) -> None:
    small = ["train.global_batch_size=2", "train.micro_batch_size=1", "data.seq_len=16"]
    plain = step_of(gang, corpus, *small, world=2)
    mixed = step_of(gang, corpus, *small, "train.precision=bf16", world=2)
    assert plain["matmuls"] == {"torch.float32"}
    assert mixed["matmuls"] == {"torch.bfloat16"}
    # Gradients in fp32; counts, losses and the norm's squares in fp64.
    assert mixed["reduced"] == plain["reduced"] == {"torch.float32", "torch.float64"}
    assert mixed["state"] == plain["state"] == {"torch.float32"}
    assert mixed["losses"] != plain["losses"]
    assert mixed["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-2)


def test_full_checkpointing_computes_blocks_twice(gang: Gang, corpus: Path) -> None:
    plain, full = (
        step_of(gang, corpus, "train.micro_batch_size=32", *keys)
        for keys in ([], ["train.activation_checkpointing=full"])
    )
    attention = next(name for name in plain["calls"] if "scaled_dot_product" in name and "backward" not in name)
    assert plain["calls"][attention] == 2  # layers
    assert full["calls"][attention] == 4
    assert full["losses"] == plain["losses"]


def test_accumulation_communicates_once(gang: Gang, corpus: Path) -> None:
    """Gradients are reduced in the last micro-batch only: as many reductions with four micro-batches as with one."""

    def reductions(*keys: str) -> dict[str, int]:
        calls = step_of(gang, corpus, *keys, world=2)["calls"]
        return {name: n for name, n in calls.items() if "reduce" in name and "c10d" in name}

    for engine in (["parallel.engine=ddp"], ["parallel.engine=fsdp"]):
        once = reductions(*engine, "train.micro_batch_size=16")
        assert sum(once.values()) >= 3 + 2  # two blocks and the root, and the counts of tokens and losses
        assert reductions(*engine, "train.micro_batch_size=4") == once


def compiled_losses(arguments: list[str]) -> dict[str, Any]:
    """In a rank: loss and norm of four steps, how many graphs were compiled by then, and graph breaks."""
    from torch._dynamo.utils import counters

    counters.clear()
    with started(arguments) as here:
        losses, graphs = [], []
        for step in range(4):
            losses.append(here.step(here.batch(step))[:2])
            graphs.append(counters["stats"]["unique_graphs"])
        return {"losses": losses, "graphs": graphs, "breaks": sum(counters["graph_break"].values())}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compile_per_block(gang: Gang, corpus: Path, checkpointing: str) -> None:
    """Compiled blocks give the losses of eager ones to 1e-5 on two sharded ranks, without a graph break or a late
    recompilation."""
    arguments = [f"data.corpus={corpus}", f"train.activation_checkpointing={checkpointing}"]
    eager = gang.run(compiled_losses, arguments, world=2)[0]
    compiled = gang.run(compiled_losses, [*arguments, "train.compile=true"], world=2, timeout=280)[0]
    assert eager["graphs"] == [0, 0, 0, 0]
    assert compiled["graphs"][0] >= 1
    assert compiled["graphs"][-1] == compiled["graphs"][1]
    assert compiled["breaks"] == 0
    for ours, expected in zip(compiled["losses"], eager["losses"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
