"""`certify`: what passes, and that each of many one-line faults does not."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.faults import one_line_fault
from tests.gang import Gang
from tests.runs import TINY
from trainer.certify.findings import Finding

Fault = tuple[str, str, str]


def certified(overrides: list[str], fault: Fault | None = None, steps: int = 3, **options: Any) -> list[Finding]:
    """In a rank: the findings of the tiny config, worst first; rank 0 has them all."""
    from trainer.certify.layout import certify_layout
    from trainer.config import load_config
    from trainer.runtime import start_runtime

    config = load_config(TINY, overrides)
    said: list[str] = []
    with one_line_fault(*fault) if fault else nullcontext(), start_runtime() as runtime:
        findings, _ = certify_layout(config, runtime, steps, options.get("may_shrink", True), said.append)
    return findings.worst_first()


def worst_of(findings: list[Finding]) -> dict[str, float]:
    """The largest difference of every quantity."""
    worst: dict[str, float] = {}
    for finding in findings:
        worst[finding.quantity] = max(worst.get(finding.quantity, 0.0), finding.difference)
    return worst


# name -> (ranks, keys). `make verify` has the whole matrix, on the quickstart's model.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank, accumulation": (1, []),
    "ddp, every other block checkpointed": (
        2,
        ["parallel.engine=ddp", "train.activation_checkpointing=full", "train.activation_checkpointing_every=2"],
    ),
    "HSDP 2x2, accumulation, selective": (
        4,
        ["parallel.dp_replicate=2", "train.micro_batch_size=4", "train.activation_checkpointing=selective"],
    ),
    "fsdp, biases, tied": (4, ["model.attention_bias=true", "model.mlp_bias=true", "model.tie_embeddings=true"]),
    "fsdp, sgd that clips": (2, ["optim.name=sgd", "train.grad_clip=0.1", "schedule.warmup_steps=0"]),
    "fsdp, compiled": (2, ["train.compile=true"]),
    "fsdp, uneven masks, roles": (
        4,
        ["data.packing=pad", "optim.roles.head.lr_scale=0.5", "optim.roles.vector.weight_decay=0.2"],
    ),
}
LAYOUTS |= {
    "fsdp, packed documents kept apart": (
        2,
        ["data.packing=best_fit", "data.document_mask=true", "train.activation_checkpointing=selective"],
    ),
    "ZeRO-2, experts over ranks, accumulation": (
        4,
        [
            "parallel.engine=deepspeed",
            "parallel.ep=2",
            "model.moe={n_experts: 4, d_ff: 32}",
            "train.micro_batch_size=4",
        ],
    ),
    "ZeRO-3, biases, tied, Muon": (
        2,
        [
            "parallel.engine=deepspeed",
            "parallel.zero_stage=3",
            "model.attention_bias=true",
            "model.tie_embeddings=true",
            "optim={name: muon, lr: 0.01}",
        ],
    ),
    "ddp, two stages": (
        2,
        [
            "parallel.engine=ddp",
            "stages=[{tokens: 2048}, {tokens: 38912, data: {seq_len: 32}, train: {global_batch_size: 64}}]",
        ],
    ),
}
SMALL = ["data.seq_len=16", "train.global_batch_size=8", "train.micro_batch_size=2"]
LAYOUTS |= {
    f"{precision}, HSDP 2x2": (4, [*SMALL, f"train.precision={precision}", "parallel.dp_replicate=2"])
    for precision in ("bf16", "fp16")
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_certified(gang: Gang, paragraphs: Path, name: str) -> None:
    world, keys = LAYOUTS[name]
    rows = gang.run(certified, [f"data.corpus={paragraphs}", *keys], world=world, timeout=240)[0]
    assert [row.subject() for row in rows if not row.passed] == []
    # Everything was looked at: every parameter thrice.
    parameters = {row.parameter for row in rows if row.parameter}
    for quantity in ("initial weight", "gradient", "update"):
        assert {row.parameter for row in rows if row.quantity == quantity} == parameters
    assert len(parameters) >= 20
    assert ("late compilations" in worst_of(rows)) == ("train.compile=true" in keys)
    # Half precision rounds alike on both sides: were it otherwise, differences would be of the size of 1e-3.
    assert worst_of(rows)["gradient"] < 2e-6


# The fault -> the line as it stands and as it would be wrong, and one of the findings that must tell it.
FAULTS: dict[str, tuple[Fault, list[str], str]] = {
    "gradient averaged twice": (
        ("trainer.parallelize", "module.set_gradient_divide_factor(1.0)", "module.set_gradient_divide_factor(2.0)"),
        [],
        "gradient of head.weight",
    ),
    # The mean of the ranks' means.
    "local denominator": (
        ("trainer.loop", "valid = runtime.count(int(batch.mask.sum()))", "valid = 2 * int(batch.mask.sum())"),
        ["data.packing=pad"],
        "loss",
    ),
    "clip by local norm": (
        ("trainer.clip", "dist.all_reduce(square, group=group)", "pass"),
        [],
        "gradient norm",
    ),
    "wrong shard offset": (
        (
            "trainer.initialize",
            "normal(seed, name, box.start[0] * row, box.stop[0] * row, std)",
            "normal(seed, name, 0, box.shape[0] * row, std)",
        ),
        [],
        "initial weight of blocks.1.mlp.w_up.weight",
    ),
    "a rank with another data seed": (
        (
            "data.streams",
            "sample_ids(self.key, len",
            "sample_ids(self.key + int(__import__('os').environ['RANK']), len",
        ),
        [],
        "loss",
    ),
    "an uninitialised parameter": (
        (
            "trainer.initialize",
            "here.fill_(1.0 if init",
            "init.kind == 'ones' and here.fill_(1.0 if init",
        ),
        ["model.attention_bias=true"],
        "initial weight of blocks.0.attention.wq.bias",
    ),
    # Beyond the six: what else a rank could do alone.
    "a learning rate per rank": (
        ("trainer.loop", "learning_rate(step, config))", "learning_rate(step, config) * (1 + runtime.rank))"),
        ["parallel.engine=ddp"],
        "copies that differ",
    ),
    "a role's learning rate is ignored": (
        ("optim.build", 'group["lr"] = lr * group["lr_scale"]', 'group["lr"] = lr'),
        ["optim.roles.embedding.lr_scale=0.5"],
        "update of embedding.weight",
    ),
    "a mean over ranks in place of a sum": (
        (
            "trainer.engines.zero",
            "loss = loss * self._layout.world_size",
            "loss = loss * 1",
        ),
        ["parallel.engine=deepspeed"],
        "gradient of head.weight",
    ),
    "an engine that does not clip": (
        ("trainer.engines.zero", "self.optimizer.scale = scale", "self.optimizer.scale = 1.0"),
        ["parallel.engine=deepspeed", "optim.name=sgd", "train.grad_clip=0.1"],
        "update of head.weight",
    ),
    "gradients that are not forgotten": (
        (
            "trainer.engines.native",
            "self.optimizer.step()\n        self.optimizer.zero_grad()",
            "self.optimizer.step()",
        ),
        [],
        "gradient of embedding.weight",
    ),
}


@pytest.fixture(scope="module")
def passes(gang: Gang, paragraphs: Path) -> Callable[..., bool]:
    """Whether a config is certified on two ranks; found out once."""

    @functools.cache
    def run(*keys: str) -> bool:
        return all(row.passed for row in gang.run(certified, [f"data.corpus={paragraphs}", *keys], None, 2, world=2)[0])

    return run


@pytest.mark.parametrize("name", FAULTS)
def test_a_one_line_fault_is_found_and_named(
    gang: Gang, paragraphs: Path, passes: Callable[..., bool], name: str
) -> None:
    """Two ranks, one line of the project's written wrongly; the same config without it passes."""
    fault, keys, subject = FAULTS[name]
    assert passes(*keys)
    rows = gang.run(certified, [f"data.corpus={paragraphs}", *keys], fault, 2, world=2)[0]
    failed = [row.subject() for row in rows if not row.passed]
    assert subject in failed


def shrunken(overrides: list[str], memory: int, may_shrink: bool) -> tuple[list[Finding], dict[str, Any], list[str]]:
    """In a rank with so much memory: the findings, the model and what was said."""
    from trainer.certify import layout
    from trainer.config import load_config
    from trainer.runtime import start_runtime

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch, start_runtime() as runtime:
        patch.setattr(layout, "available_memory", lambda: memory)
        config = load_config(TINY, overrides)
        findings, model = layout.certify_layout(config, runtime, 1, may_shrink, said.append)
    return findings.worst_first(), model.model_dump(), said


def test_a_model_that_does_not_fit_is_shrunken_and_that_is_said(gang: Gang, corpus: Path) -> None:
    arguments = [f"data.corpus={corpus}", "model.n_layers=64", "model.d_model=256", "model.d_ff=512"]
    for rows, model, said in gang.run(shrunken, arguments, 200_000_000, True, world=2):
        assert all(row.passed for row in rows)
        assert model["n_layers"] == 2
        assert (model["d_model"], model["d_ff"], model["n_heads"], model["n_kv_heads"]) == (128, 256, 4, 2)
        line = "model  shrunken to fit in one process: n_layers 64 -> 2, d_model 256 -> 128, d_ff 512 -> 256"
        assert line in said


def refused(overrides: list[str], memory: int, may_shrink: bool) -> str:
    """In a rank: the refusal."""
    from common.errors import UserError

    with pytest.raises(UserError) as refusal:
        shrunken(overrides, memory, may_shrink)
    return str(refusal.value)


def test_a_model_that_may_not_be_shrunken_is_refused_by_all_ranks(gang: Gang, corpus: Path) -> None:
    arguments = [f"data.corpus={corpus}", "model.n_layers=64"]
    for line in gang.run(refused, arguments, 50_000_000, False, world=2):
        assert "does not fit in one process" in line
        assert "leave --no-shrink out" in line
    for line in gang.run(refused, arguments, 1_000, True, world=2):
        assert "set train.micro_batch_size" in line


def repeated(overrides: list[str], fault: Fault | None = None) -> Any:
    """In a rank: two runs of the tiny config compared to the bit."""
    from trainer.certify.repeat import certify_repeat
    from trainer.config import load_config
    from trainer.runtime import start_runtime

    config = load_config(TINY, overrides)
    with one_line_fault(*fault) if fault else nullcontext(), start_runtime(config.train.deterministic) as runtime:
        return certify_repeat(config, runtime, 2, lambda _: None)


def test_two_runs_are_equal_to_the_bit(gang: Gang, corpus: Path) -> None:
    """And a last bit that differs, in one tensor of one rank, is found with its step, its rank and its name."""
    arguments = [f"data.corpus={corpus}", "train.deterministic=true", "parallel.dp_replicate=2"]
    for result in gang.run(repeated, arguments, world=4):
        assert (result.steps, result.difference) == (2, None)
        assert result.tensors == 4 * 21 + 2  # weight, two moments and a count of each parameter; loss and norm
    # The fourth update, the second of the second run, leaves one more bit behind on rank 1.
    flip = (
        "self.optimizer.step(); self.__class__.updates = getattr(self, 'updates', 0) + 1; "
        "self.updates == 4 and self._mesh.get_rank() == 1 and self.parameters['embedding.weight'].to_local()"
        ".detach()[0, 0].mul_(1 + 1e-6)"
    )
    fault = ("trainer.engines.native", "self.optimizer.step()", flip)
    for result in gang.run(repeated, arguments, fault, world=4):
        assert result.difference == (2, 1, ["model.embedding.weight"])


def test_two_runs_that_share_matrices_and_experts_are_too(gang: Gang, corpus: Path) -> None:
    keys = ["parallel.tp=2", "parallel.ep=2", "model.moe={n_experts: 4, d_ff: 32}", "train.deterministic=true"]
    for result in gang.run(repeated, [f"data.corpus={corpus}", *keys], world=4):
        assert (result.steps, result.difference) == (2, None)


def trace(overrides: list[str], looked: bool) -> list[str]:
    """In a rank: the operators of a training step in their order, with the types and shapes of their tensors."""
    import torch
    from torch.utils._pytree import tree_flatten

    from tests.runs import started
    from tests.watch import Watch
    from trainer.looking import looked_at

    class Sequence(Watch):
        def __init__(self) -> None:
            super().__init__()
            self.sequence: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
            self.sequence.append(f"{function} {[(str(t.dtype), tuple(t.shape)) for t in tensors]}")
            return super().__torch_dispatch__(function, types, args, kwargs)

    with started(overrides) as here, looked_at(here.engine, lambda: None) if looked else nullcontext():
        here.step(here.batch(0))
        with Sequence() as watch:
            here.step(here.batch(1))
    return watch.sequence


def test_training_pays_nothing_for_being_certifiable(corpus: Path, cache: Path) -> None:
    """The same operators in the same order whether or not the process has certified, and under the look itself:
    what is looked at is looked at from outside. And nothing that trains imports it."""
    arguments = [f"data.corpus={corpus}"]
    fresh = Gang(size=2)
    try:
        before = fresh.run(trace, arguments, False, world=2)
        fresh.run(certified, arguments, world=2)
        assert fresh.run(trace, arguments, False, world=2) == before
        assert fresh.run(trace, arguments, True, world=2) == before
    finally:
        fresh.stop()
    assert all(len(sequence) > 500 for sequence in before)
    code = (
        "import sys, launch.cli, launch.train, launch.worker, trainer.loop, trainer.generate; "
        "sys.exit(any('certify' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
