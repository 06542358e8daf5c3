"""The quickstart's model under every stage of ZeRO, against `fsdp`; and what a rank holds."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gang import Gang
from tests.runs import read_state, train_worker, worst_difference
from tests.verify.evidence import ROOT, write_evidence
from trainer.config import load_config
from trainer.rundir import RunDirectory

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3600)]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
ZERO = "parallel.engine=deepspeed"
SETTINGS = {
    "0": ["parallel.zero_stage=0"],
    "1": ["parallel.zero_stage=1"],
    "2": ["parallel.zero_stage=2"],
    "3": ["parallel.zero_stage=3"],
    "2 offload": ["parallel.zero_stage=2", "parallel.offload=optimizer"],
    "3 offload": ["parallel.zero_stage=3", "parallel.offload=optimizer+params"],
}


def test_the_quickstart_under_every_stage(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """20 fp32 steps with Muon, at 2 and 4 ranks, accumulating once and four times: losses, norms and weights to 1e-5.

    The learning rate is a fifth of the quickstart's: with it differences by rounding grow, and at half of it they reach
    1.7e-5 in the weights between layouts of `fsdp` too (docs/how-we-know.md).
    """
    keys = [f"data.corpus={corpus}", f"run.dir={tmp_path}", "train.steps=20", "train.sample_prompt=null"]
    keys += ["eval.batches=0", "train.global_batch_size=16", "optim.lr=0.004", "schedule.warmup_steps=5"]
    figures: dict[str, Any] = {}

    def run(name: str, world: int, *more: str) -> RunDirectory:
        words = [CONFIG, *keys, f"run.name={name}", *more]
        assert gang.run(train_worker, words, world=world, timeout=900) == [0] * world
        return RunDirectory(tmp_path / name)

    for world in (2, 4):
        for accumulation in (1, 4):
            micro = f"train.micro_batch_size={16 // world // accumulation}"
            expected = run(f"fsdp-{world}-{accumulation}", world, micro)
            weights = read_state(expected.checkpoint(20))
            for stage, words in SETTINGS.items():
                name = f"{stage.replace(' ', '-')}-{world}-{accumulation}"
                found = run(name, world, micro, ZERO, *words)
                worst = worst_difference(found, expected)
                state = read_state(found.checkpoint(20))
                apart = {
                    key: float((state[key] - tensor).norm() / tensor.norm())
                    for key, tensor in weights.items()
                    if key.startswith("model.")
                }
                worst["weight"] = max(apart.values())
                figures[f"stage {stage}, {world} ranks, {accumulation} micro-batches"] = worst
    write_evidence("zero", "python -m pytest -m verify tests/verify/test_zero.py -k every_stage", figures)
    assert all(value < 1e-5 for of in figures.values() for value in of.values()), figures


def held(overrides: list[str]) -> dict[str, int]:
    """In a rank: bytes of all tensors that live at the second update, and after it."""
    from data.prepare import prepare
    from tests.runs import Batches, plan_layout
    from trainer.build import build_engine
    from trainer.loop import train_step
    from trainer.runtime import start_runtime

    config = load_config(CONFIG, overrides)
    data = prepare(config.data)
    counts: dict[str, int] = {}
    with start_runtime() as runtime:
        layout = plan_layout(config, runtime.world_size)
        gc.collect()
        before = _bytes()
        engine = build_engine(config, config.model.with_vocab_size(data.vocab_size), layout, runtime)
        batches = Batches(data, config.data, config.run.seed, config.train.global_batch_size)
        step, backward = engine.step, engine.micro_backward

        def backward_and_count(loss: torch.Tensor, last: bool) -> None:
            backward(loss, last)
            if not last:
                gc.collect()
                counts["between micro-batches"] = _bytes() - before

        def count_and_step(scale: float) -> None:
            gc.collect()
            counts["at the update"] = _bytes() - before
            step(scale)

        engine.step, engine.micro_backward = count_and_step, backward_and_count  # type: ignore[method-assign]
        for number in range(2):
            batch = batches.train(number, runtime.rank, runtime.world_size)
            train_step(engine, batch, layout, runtime, config.train.grad_clip)
        gc.collect()
        counts["between steps"] = _bytes() - before
        counts["parameters"] = sum(
            tensor.numel() for n, tensor in engine.state_dict().items() if n.startswith("model.")
        )
    return counts


def _bytes() -> int:
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            # A gradient that nobody has asked for is no object of Python's.
            gradient = thing.grad if thing.is_leaf else None
            for tensor in (thing, gradient):
                if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    storage = tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def test_memory_by_stage(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """Bytes a parameter that a rank of four holds in tensors, with AdamW: at an update, between steps
    and between micro-batches.

    With small buckets, and no parameter so small that it is not cut: what is little beside a large model would be most
    of this one.
    """
    file = tmp_path / "small.json"
    tuned = {"reduce_bucket_size": 50_000, "stage3_param_persistence_threshold": 0}
    file.write_text(json.dumps({"zero_optimization": tuned}), encoding="utf-8")
    keys = [f"data.corpus={corpus}", "optim={name: adamw, lr: 0.001}", "train.micro_batch_size=2"]
    figures: dict[str, Any] = {}
    for name, words in {
        "fsdp": [],
        **{k: [ZERO, *v, f"parallel.deepspeed_config={file}"] for k, v in SETTINGS.items() if "offload" not in k},
    }.items():
        counts = gang.run(held, [*keys, *words], world=4, timeout=300)
        figures[name] = {
            when: round(max(of[when] / of["parameters"] for of in counts), 3)
            for when in counts[0]
            if when != "parameters"
        }
    write_evidence("zero-memory", "python -m pytest -m verify tests/verify/test_zero.py -k memory", figures)
    between = {name: of["between steps"] for name, of in figures.items()}
    # fp32 weights and two moments are 12 bytes, of which a stage leaves a rank these; stage 3 keeps
    # gradients' memory, and in fp32 too a second copy of the parameters.
    for name, bytes_ in (("fsdp", 3), ("0", 12), ("1", 4 + 3), ("2", 4 + 3), ("3", 3 + 2)):
        assert between[name] == pytest.approx(bytes_, rel=0.15), figures
    for when in ("between micro-batches", "at the update"):
        assert figures["3"][when] < figures["2"][when] <= figures["1"][when] < figures["0"][when], (when, figures)
