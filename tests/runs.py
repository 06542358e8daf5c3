"""Training runs for tests: a worker on each rank of the gang, and what the run left behind."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from data.loader import Batches
from data.packing import Batch
from data.prepare import prepare
from trainer.config import TrainingConfig, load_config
from trainer.layout import Layout, plan_layout
from trainer.rundir import RunDirectory
from trainer.stop import SIGNALS

TINY = str(Path(__file__).resolve().parent.parent / "configs" / "tiny.yaml")


def train_worker(arguments: list[str]) -> int:
    """What `python -m launch.worker` does, in this rank; returns the exit code."""
    from launch.worker import main

    # A look at the machine's speed, which a worker takes at its start: one product in place of a third of a second.
    with mock.patch("trainer.throughput._SECONDS", 0.0):
        return exit_code_of(main, arguments)


def exit_code_of(function: Callable[..., Any], *arguments: Any) -> int:
    """How what would end a process ends. A worker that was told to stop ignores signals from then on; this one not."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        function(*arguments)
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


class Started(NamedTuple):
    """A config on this rank, ready for `step`."""

    config: TrainingConfig
    runtime: Any
    layout: Layout
    engine: Any
    batches: Batches

    def batch(self, step: int) -> Batch:
        """This rank's rows of a step's global batch, counted from 0."""
        return self.batches.train(step, self.runtime.rank, self.runtime.world_size)

    def step(self, batch: Batch) -> Any:
        """Loss, gradient norm and number of valid tokens of a training step."""
        from trainer.loop import train_step

        return train_step(self.engine, batch, self.layout, self.runtime, self.config.train.grad_clip)


@contextmanager
def started(overrides: list[str]) -> Iterator[Started]:
    """Build the engine of the tiny config in this rank of the gang, without the loop around it."""
    from trainer.build import build_engine
    from trainer.runtime import start_runtime

    config = load_config(TINY, overrides)
    data = prepare(config.data)
    with start_runtime() as runtime:
        layout = plan_layout(config, runtime.world_size)
        engine = build_engine(config, config.model.with_vocab_size(data.vocab_size), layout, runtime)
        batches = Batches(data, config.data, config.run.seed, config.train.global_batch_size)
        yield Started(config, runtime, layout, engine, batches)


def losses_and_norms(run: RunDirectory) -> list[tuple[float, float]]:
    """Loss and gradient norm of every logged step."""
    return [(row["loss"], row["grad_norm"]) for row in run.read_metrics() if "loss" in row]


def stopped(run: RunDirectory, name: str, after: int) -> RunDirectory:
    """A copy of a run, under another name, as it was when the checkpoint of that step was its newest."""
    copy = RunDirectory(Path(shutil.copytree(run.path, run.path.with_name(name))))
    for step in copy.committed():
        if step > after:
            shutil.rmtree(copy.checkpoint(step))
    text = copy.config_file.read_text(encoding="utf-8")
    copy.config_file.write_text(text.replace(f"name: {run.path.name}\n", f"name: {name}\n"), encoding="utf-8")
    return copy


def relative_difference(a: float, b: float) -> float:
    """|a - b| / |b|."""
    return abs(a - b) / abs(b)


def worst_difference(a: RunDirectory, b: RunDirectory) -> dict[str, float]:
    """Largest relative difference of loss and of gradient norm over all steps, which must be the same ones."""
    ours, theirs = losses_and_norms(a), losses_and_norms(b)
    assert len(ours) == len(theirs) > 0
    return {
        name: max(relative_difference(x[i], y[i]) for x, y in zip(ours, theirs, strict=True))
        for i, name in enumerate(("loss", "grad_norm"))
    }


def read_state(checkpoint: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, whole, read with safetensors alone (no code of the project, no DCP)."""
    import json

    import torch
    from safetensors import safe_open

    pieces: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for key in opened.keys():  # noqa: SIM118 - not a dict
                pieces.setdefault(key, []).append((places[key]["saved_offsets"], opened.get_tensor(key)))
    whole: dict[str, Any] = {}
    for key, parts in pieces.items():
        shape = [max(o[d] + t.shape[d] for o, t in parts) for d in range(parts[0][1].ndim)]
        tensor = torch.full(shape, float("nan"))
        for offsets, part in parts:
            tensor[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
        assert not tensor.isnan().any(), f"{key} has holes"
        whole[key] = tensor
    return whole
