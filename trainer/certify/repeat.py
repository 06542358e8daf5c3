"""The same steps twice, compared to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from trainer.build import build_engine
from trainer.certify.copies import digest
from trainer.config import TrainingConfig
from trainer.layout import plan_layout
from trainer.loop import step_at
from trainer.rundata import batches_of, open_run_data
from trainer.runtime import Runtime


class Difference(NamedTuple):
    """Where two runs parted first."""

    step: int
    rank: int
    names: list[str]  # `loss`, `grad_norm`, `model.<parameter>`, `optim.<parameter>.<state>`


class Repeated(NamedTuple):
    """What two runs had in common: steps, tensors of this rank, and the first difference if there is one."""

    steps: int
    tensors: int
    difference: Difference | None


def certify_repeat(config: TrainingConfig, runtime: Runtime, steps: int, say: Callable[[str], None]) -> Repeated:
    """Run the first `steps` steps of a config twice and compare loss, norm, weights and optimizer state after each."""
    say(plan_layout(config, runtime.world_size).describe())
    first, second = (_run(config, runtime, steps, say, name) for name in ("first", "second"))
    mine = [(step, sorted(k for k in a if a[k] != b[k])) for step, (a, b) in enumerate(zip(first, second, strict=True))]
    everyone: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(everyone, mine)
    found = [Difference(step, rank, names) for rank, steps_ in enumerate(everyone) for step, names in steps_ if names]
    return Repeated(steps, len(first[0]), min(found, key=lambda d: (d.step, d.rank), default=None))


def _run(
    config: TrainingConfig, runtime: Runtime, steps: int, say: Callable[[str], None], name: str
) -> list[dict[str, str]]:
    """Digests of all that a run consists of on this rank, at its start and after each step."""
    layout, data = plan_layout(config, runtime.world_size), open_run_data(config)
    runtime = replace(runtime, tp=layout.tp)
    engine = build_engine(config, config.model.with_vocab_size(data.vocab_size), layout, runtime)
    batches = batches_of(config, data)
    digests = [{key: digest(tensor) for key, tensor in engine.state_dict().items()}]
    digests[0] |= {"loss": "", "grad_norm": ""}
    for step in range(1, steps + 1):
        result = step_at(step, engine, batches, layout, runtime, config)
        state = {key: digest(tensor) for key, tensor in engine.state_dict().items()}
        digests.append({**state, "loss": result.loss.hex(), "grad_norm": result.grad_norm.hex()})
        say(f"{name} run  {step}/{steps}  loss {result.loss:.4f}  grad norm {result.grad_norm:.4f}")
    return digests
