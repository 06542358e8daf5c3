"""Every knob acts: precision, activation checkpointing, compile, communication under accumulation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gang import Gang
from tests.runs import TINY


class Watch(TorchDispatchMode):
    """Counts operators, and operand types of matrix products, from outside the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.matmul_types: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removesuffix(".default")
        self.calls[name] += 1
        if name in ("aten.mm", "aten.addmm", "aten.bmm"):
            self.matmul_types[str(args[-1].dtype)] += 1
        return function(*args, **(kwargs or {}))


def watched_step(arguments: list[str]) -> dict[str, Any]:
    """In a rank: what happens in the second training step of a config."""
    from data.loader import Batches
    from data.prepare import prepare
    from trainer.build import build_engine
    from trainer.config import load_config
    from trainer.layout import plan_layout
    from trainer.loop import train_step
    from trainer.runtime import start_runtime

    config = load_config(TINY, arguments)
    data = prepare(config.data)
    with start_runtime() as runtime:
        layout = plan_layout(config, runtime.world_size)
        engine: Any = build_engine(config, config.model.with_vocab_size(data.vocab_size), layout, runtime)
        batches = Batches(data, config.data, 0, config.train.global_batch_size)
        losses = []
        for step in range(2):
            batch = batches.train(step, runtime.rank, runtime.world_size)
            with Watch() as watch:
                losses.append(train_step(engine, batch, layout, runtime, config.train.grad_clip)[0])
        state = {str(tensor.dtype) for name, tensor in engine.state_dict().items()}
        return {"calls": dict(watch.calls), "matmuls": dict(watch.matmul_types), "state": state, "losses": losses}


def step_of(gang: Gang, corpus: Path, *overrides: str, world: int = 1) -> dict[str, Any]:
    return gang.run(watched_step, [f"data.corpus={corpus}", *overrides], world=world, timeout=240)[0]


def test_bf16_products_with_fp32_state_and_reduction(gang: Gang, corpus: Path) -> None:
    small = ["train.global_batch_size=2", "train.micro_batch_size=1", "data.seq_len=16"]
    plain = step_of(gang, corpus, *small, world=2)
    mixed = step_of(gang, corpus, *small, "train.precision=bf16", world=2)
    assert set(plain["matmuls"]) == {"torch.float32"}
    assert set(mixed["matmuls"]) == {"torch.bfloat16"}
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
    """In a rank: losses of four steps, the graphs that were compiled, and how many after the second step."""
    from torch._dynamo.utils import counters

    from data.loader import Batches
    from data.prepare import prepare
    from trainer.build import build_engine
    from trainer.config import load_config
    from trainer.layout import plan_layout
    from trainer.loop import train_step
    from trainer.runtime import start_runtime

    counters.clear()
    config = load_config(TINY, arguments)
    data = prepare(config.data)
    with start_runtime() as runtime:
        layout = plan_layout(config, runtime.world_size)
        engine = build_engine(config, config.model.with_vocab_size(data.vocab_size), layout, runtime)
        batches = Batches(data, config.data, 0, config.train.global_batch_size)
        losses, graphs = [], []
        for step in range(4):
            batch = batches.train(step, runtime.rank, runtime.world_size)
            losses.append(train_step(engine, batch, layout, runtime, config.train.grad_clip)[:2])
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
