"""Communication under accumulation."""

from __future__ import annotations

from pathlib import Path

from tests.gang import Gang
from tests.runs import started
from tests.watch import Watch


def operators_of_a_step(arguments: list[str]) -> dict[str, int]:
    """In a rank: how often each operator is called in the second training step of a config."""
    with started(arguments) as here:
        for step in range(2):
            batch = here.batch(step)
            with Watch() as watch:
                here.step(batch)
        return dict(watch.calls)


def test_accumulation_communicates_once(gang: Gang, corpus: Path) -> None:
    """Gradients are reduced in the last micro-batch only: as many reductions with four micro-batches as with one."""

    def reductions(*keys: str) -> dict[str, int]:
        calls = gang.run(operators_of_a_step, [f"data.corpus={corpus}", *keys], world=2)[0]
        return {name: n for name, n in calls.items() if "reduce" in name and "c10d" in name}

    for engine in (["parallel.engine=ddp"], ["parallel.engine=fsdp"]):
        once = reductions(*engine, "train.micro_batch_size=16")
        assert sum(once.values()) >= 3 + 2  # two blocks and the root, and the counts of tokens and losses
        assert reductions(*engine, "train.micro_batch_size=4") == once
