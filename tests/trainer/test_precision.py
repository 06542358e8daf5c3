"""What is in low precision and what is not (trainer/precision.py), and fp16's loss scaling."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from common.errors import UserError
from common.files import hash_file
from tests.gang import Gang
from tests.runs import TINY, losses_and_norms, read_state, relative_difference, started, train_worker
from tests.trainer.poison import an_infinite_gradient
from tests.watch import Watch
from trainer.config import load_config
from trainer.generate import Settings, generate
from trainer.manifest import fingerprint
from trainer.metrics import Reporter
from trainer.rundir import RunDirectory
from trainer.scaler import LossScaler

VOCABULARY = 512
# Half precision is slow on many CPUs.
SMALL = [
    "model.d_model=32",
    "model.d_ff=64",
    "data.seq_len=16",
    "train.global_batch_size=16",
    "train.micro_batch_size=4",
]
ENGINES = {"fsdp": [], "ddp": ["parallel.engine=ddp"], "hsdp": ["parallel.dp_replicate=2"]}


def config_of(corpus: Path, *overrides: str) -> list[str]:
    return [f"data.corpus={corpus}", f"data.tokenizer.vocab_size={VOCABULARY}", *SMALL, *overrides]


class Products(Watch):
    """FLOPs of the blocks' products by the types of their operands, and the types that an optimizer works with."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.update_types: set[str] = set()
        self.embedding_gradient_types: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removesuffix(".default")
        operands, flops = products(name, args)
        if not any(VOCABULARY in t.shape for t in operands):  # the head's
            self.flops[", ".join(sorted({str(t.dtype) for t in operands}))] += flops
        if name.startswith("aten._foreach") and "copy" not in name:  # FSDP2 copies, the optimizer computes
            self.update_types |= {str(t.dtype) for t in tree_leaves(args) if isinstance(t, Tensor)}
        if name == "aten.embedding_dense_backward":
            self.embedding_gradient_types.add(str(args[0].dtype))
        return super().__torch_dispatch__(function, types, args, kwargs)


def products(name: str, args: Any) -> tuple[list[Tensor], int]:
    """Operands of an operator's matrix products and their FLOPs, a multiply and an add counted as two.

    Attention has two products forward (scores, values) and five backward (the scores again, and two gradients each).
    """
    if name in ("aten.mm", "aten.addmm", "aten.bmm"):
        return list(args[-2:]), 2 * args[-2].numel() * args[-1].shape[-1]
    if name.startswith("aten._scaled_dot_product"):
        backward = name.endswith("backward")
        query, key = args[1:3] if backward else args[:2]
        return list(args[: 4 if backward else 3]), (5 if backward else 2) * 2 * query.numel() * key.shape[-2]
    return [], 0


def watched_step(arguments: list[str]) -> dict[str, Any]:
    """In a rank: what happens in the second training step of a config."""
    with started(arguments) as here:
        losses = [here.step(here.batch(0)).loss]
        batch = here.batch(1)
        with Products() as watch:
            losses.append(here.step(batch).loss)
        return {
            "flops": +watch.flops,
            "matmuls": set(watch.matmul_types),
            "reduced": set(watch.reduced_types),
            "updated": watch.update_types,
            "embedding": watch.embedding_gradient_types,
            "state": {str(tensor.dtype) for tensor in here.engine.state_dict().values()},
            "losses": losses,
        }


# CI has each precision and each engine once where they do not act on one another; `make verify` has them all.
VERIFY = pytest.mark.verify
BF16, FP16 = ("bf16", "torch.bfloat16"), ("fp16", "torch.float16")


@pytest.mark.parametrize(
    ("precision", "dtype", "engine"),
    [
        (*BF16, "fsdp"),
        (*FP16, "ddp"),
        pytest.param(*BF16, "ddp", marks=VERIFY),
        pytest.param(*FP16, "fsdp", marks=VERIFY),
    ],
)
def test_products_are_in_low_precision_and_sums_in_fp32(
    gang: Gang, corpus: Path, precision: str, dtype: str, engine: str
) -> None:
    keys = config_of(corpus, *ENGINES[engine])
    plain = gang.run(watched_step, keys, world=2)[0]
    mixed = gang.run(watched_step, [*keys, f"train.precision={precision}"], world=2, timeout=240)[0]
    total = sum(plain["flops"].values())
    assert set(plain["flops"]) == {"torch.float32"}
    assert sum(mixed["flops"].values()) == total  # the instrument sees the same products
    assert mixed["flops"][dtype] >= 0.99 * total
    assert mixed["matmuls"] == {dtype}  # also the head's
    # Gradients in fp32; counts, losses and the norm's squares in fp64.
    assert mixed["reduced"] == plain["reduced"] == {"torch.float32", "torch.float64"}
    assert mixed["updated"] == plain["updated"] == {"torch.float32"}
    assert mixed["state"] == plain["state"] == {"torch.float32"}
    assert mixed["embedding"] == {"torch.float32"}
    assert mixed["losses"] != plain["losses"]
    assert mixed["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-2)


def test_loss_after_30_steps_is_near_that_of_fp32(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """Within 1% at the end, for bf16 and fp16; the first gradient norms, which are those before scaling, too."""

    def run(precision: str) -> list[tuple[float, float]]:
        keys = config_of(corpus, f"train.precision={precision}", "train.steps=30", "optim.lr=2e-3", "eval.batches=0")
        keys += [f"run.dir={tmp_path}", f"run.name={precision}", "checkpoint.every=30"]
        assert gang.run(train_worker, [TINY, *keys], world=1, timeout=240) == [0]
        return losses_and_norms(RunDirectory(tmp_path / precision))

    expected = run("fp32")
    assert expected[-1][0] < 0.9 * expected[0][0]
    for precision in ("bf16", "fp16"):
        ours = run(precision)
        assert len(ours) == 30
        assert ours != expected
        assert relative_difference(ours[-1][0], expected[-1][0]) < 0.01
        assert all(relative_difference(a[1], b[1]) < 0.01 for a, b in zip(ours[:10], expected, strict=False))


def local(tensor: Tensor) -> Tensor:
    """A copy of this rank's part."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def accumulation_errors(arguments: list[str]) -> dict[str, float]:
    """In a rank: error of each gradient of one micro-batch and 15 times a thousandth of it, relative to the exact sum.

    The micro-batches are the same, and the factor is a power of two, so that the exact sum is known.
    """
    from trainer.batch import micro_batches

    with started(arguments) as here:
        micro = next(iter(micro_batches(here.batch(0), 1, here.runtime.device)))

        def accumulate(factors: list[float]) -> dict[str, Tensor]:
            for i, factor in enumerate(factors):
                here.engine.micro_backward(here.engine.model(*micro).cross_entropy * factor, last=i == len(factors) - 1)
            gradients = {name: local(gradient) for name, gradient in here.engine.gradients().items()}
            here.engine.optimizer.zero_grad()
            return gradients

        once = accumulate([2.0**-4])
        total = accumulate([2.0**-4, *[2.0**-14] * 15])
        # Where a token does not occur, the embedding's gradient is zero, and has to stay it.
        return {n: float((total[n] - g * (1 + 15 / 1024)).norm() / g.norm().clamp_min(1e-9)) for n, g in once.items()}


@pytest.mark.parametrize("engine", ["fsdp", "ddp"])
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 1e-6), ("fp16", 1e-3)])
def test_gradients_of_micro_batches_are_added_up_in_fp32(
    gang: Gang, corpus: Path, precision: str, tolerance: float, engine: str
) -> None:
    """Added up in bf16, the 15 would be lost one by one, and the sum be 1.5% off. fp16 rounds the smallest of them."""
    keys = config_of(corpus, *ENGINES[engine], f"train.precision={precision}")
    for errors in gang.run(accumulation_errors, keys, world=2, timeout=240):
        assert errors
        assert max(errors.values()) < tolerance, errors


def overflow_on_one_rank(arguments: list[str], poisoned_rank: int) -> dict[str, Any]:
    """In a rank: what a step does whose gradient overflows on one rank, and the step after it."""
    with started(arguments) as here:
        engine = here.engine
        for step in range(2):
            here.step(here.batch(step))
        before, scale = {k: local(t) for k, t in engine.state_dict().items()}, engine.loss_scale
        with an_infinite_gradient(engine.model, here.runtime.rank == poisoned_rank):
            result = here.step(here.batch(2))
        after, halved = {k: local(t) for k, t in engine.state_dict().items()}, engine.loss_scale
        following = here.step(here.batch(2))
        moved = {k: local(t) for k, t in engine.state_dict().items()}
        return {
            "results": [result, following],
            "scales": [scale, halved],
            "state": engine.scaler_state(),
            "gradients": len(engine.gradients()),
            "same": [k for k in before if torch.equal(before[k], after[k])] == list(before),
            "moved": any(not torch.equal(after[k], moved[k]) for k in after if k.startswith("model.")),
            "keys": list(before),
        }


@pytest.mark.parametrize(
    ("world", "engine"),
    [
        (2, "fsdp"),
        (2, "ddp"),
        pytest.param(4, "fsdp", marks=VERIFY),
        pytest.param(4, "ddp", marks=VERIFY),
        (4, "hsdp"),
    ],
)
def test_an_overflow_on_one_rank_skips_the_update_on_all(gang: Gang, corpus: Path, world: int, engine: str) -> None:
    keys = config_of(corpus, *ENGINES[engine], "train.precision=fp16", "train.loss_scale_init=1024")
    answers = gang.run(overflow_on_one_rank, keys, world - 1, world=world, timeout=240)
    for answer in answers:
        skipped, following = answer["results"]
        assert skipped.skipped
        assert not following.skipped
        assert answer["scales"] == [1024.0, 512.0]
        assert answer["state"] == {"loss_scale": 512.0, "good_steps": 1, "skipped_steps": 1}
        assert answer["gradients"] == 0
        assert answer["same"]  # weights, moments, step counts
        assert {key.split(".")[-1] for key in answer["keys"]} >= {"weight", "exp_avg", "exp_avg_sq", "step"}
        assert skipped.loss == following.loss  # the same batch, at the same weights
        assert following.grad_norm < 100
    assert any(answer["moved"] for answer in answers)


def change_of_weights(arguments: list[str]) -> tuple[float, float, dict[str, Tensor]]:
    """In a rank: loss and gradient norm of the first step, and what it added to each weight."""
    with started(arguments) as here:
        before = {k: local(t) for k, t in here.engine.state_dict().items() if k.startswith("model.")}
        result = here.step(here.batch(0))
        state = here.engine.state_dict()
        return result.loss, result.grad_norm, {k: local(state[k]) - before[k] for k in before}


def test_norm_and_update_are_unscaled(gang: Gang, corpus: Path) -> None:
    """A step of gradient descent, clipped to a fifth: fp16's at any scale is fp32's to 1%."""
    keys = config_of(corpus, "optim.name=sgd", "optim.weight_decay=0", "optim.lr=10", "train.grad_clip=0.1")
    _, norm, change = gang.run(change_of_weights, keys, world=1)[0]
    assert norm > 0.2
    for scale in (64, 2**12):
        fp16 = [*keys, "train.precision=fp16", f"train.loss_scale_init={scale}"]
        _, our_norm, our_change = gang.run(change_of_weights, fp16, world=1)[0]
        assert our_norm == pytest.approx(norm, rel=1e-2)
        for name, expected in change.items():
            assert (our_change[name] - expected).norm() < 1e-2 * expected.norm(), name


def test_scale_doubles_after_good_steps_in_a_row() -> None:
    scaler = LossScaler(scale=8.0, interval=3)
    scales = []
    for overflow in (False, False, True, False, False, False, False, False, False, True):
        scaler.overflow() if overflow else scaler.good_step()
        scales.append(scaler.scale)
    assert scales == [8, 8, 4, 4, 4, 8, 8, 8, 16, 8]
    assert scaler.state() == {"loss_scale": 8.0, "good_steps": 0, "skipped_steps": 2}


def test_scale_does_not_fall_below_one() -> None:
    scaler = LossScaler(scale=3.0)
    for expected in (1.5, 1.0, 1.0):
        scaler.overflow()
        assert scaler.scale == expected
    assert scaler.skipped_steps == 3


def bad_at_scale_one(arguments: list[str]) -> tuple[Any, bool]:
    """In a rank: a step whose gradient overflows though its scale has been halved to 1; whether the state rests."""
    with started(arguments) as here, an_infinite_gradient(here.engine.model, here.runtime.rank == 1):
        first = here.step(here.batch(0))
        assert first.skipped
        assert not first.bad
        assert here.engine.loss_scale == 1.0
        before = {key: local(tensor).clone() for key, tensor in here.engine.state_dict().items()}
        result = here.step(here.batch(1))
        return result, all(torch.equal(local(tensor), before[key]) for key, tensor in here.engine.state_dict().items())


def bad_by_a_nan_weight(arguments: list[str]) -> tuple[Any, bool]:
    """In a rank: a step whose loss is not finite, at a scale above 1; whether the scale rests."""
    with started(arguments) as here:
        next(iter(here.engine.parameters.values())).to_local().detach().fill_(float("nan"))
        return here.step(here.batch(0)), here.engine.scaler_state()["skipped_steps"] == 0


def test_what_a_smaller_scale_cannot_help_is_a_bad_step(gang: Gang, corpus: Path) -> None:
    keys = config_of(corpus, "train.precision=fp16")
    for result, rests in gang.run(bad_at_scale_one, [*keys, "train.loss_scale_init=2"], world=2, timeout=240):
        assert rests
        assert result.bad
        assert result.grad_norm == float("inf")
    for result, rests in gang.run(bad_by_a_nan_weight, keys, world=2, timeout=240):
        assert rests
        assert result.bad
        assert math.isnan(result.loss)


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("ddp", marks=VERIFY)])
def test_fp16_resumes_bitwise_with_its_scale(gang: Gang, corpus: Path, tmp_path: Path, engine: str) -> None:
    """A scale that starts too high and grows every second step: updates are skipped before and after the stop.

    All rows are strict JSON, and tell the scale and the skips.
    """
    keys = config_of(corpus, *ENGINES[engine], f"run.dir={tmp_path}", "train.precision=fp16", "train.steps=14")
    keys += ["train.loss_scale_init=1e8", "train.loss_scale_interval=2", "checkpoint.every=1", "checkpoint.keep=14"]
    keys.append("eval.batches=0")
    run = RunDirectory(tmp_path / "tiny")
    assert gang.run(train_worker, [TINY, *keys], world=2, timeout=240) == [0, 0]
    rows, weights = logged(run), read_state(run.checkpoint(14))
    scale, skipped = 1e8, 0
    for row in rows:
        overflow = row["grad_norm"] is None
        assert (row["loss_scale"] == scale / 2) == (row["skipped_steps"] == skipped + 1) == overflow
        scale, skipped = row["loss_scale"], row["skipped_steps"]

    # Stop where a good step in a row is to be remembered, with skipped updates before and after.
    scalers = {step: scaler_of(run.checkpoint(step)) for step in run.committed()}
    stop = next(step for step, s in scalers.items() if s["good_steps"] == 1 and step > 7)
    assert 0 < scalers[stop]["skipped_steps"] == rows[stop - 1]["skipped_steps"] < rows[-1]["skipped_steps"]
    for step in run.committed():
        if step > stop:
            shutil.rmtree(run.checkpoint(step))
    assert gang.run(train_worker, [TINY, *keys], world=2, timeout=240) == [0, 0]
    timing = ("tokens_per_second", "mfu", "seconds")
    ours, theirs = ([{k: v for k, v in row.items() if k not in timing} for row in some] for some in (logged(run), rows))
    assert ours == theirs
    assert scaler_of(run.checkpoint(14)) == scalers[14]
    again = read_state(run.checkpoint(14))
    assert all(torch.equal(again[key], weights[key]) for key in again.keys() | weights.keys())


def scaler_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint knows of the loss scaler."""
    scaler: dict[str, Any] = json.loads((checkpoint / "trainer.json").read_text())["loss_scaler"]
    return scaler


def logged(run: RunDirectory) -> list[dict[str, Any]]:
    """The rows of training steps; an error if a line holds what is not JSON (Python writes Infinity and NaN)."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    lines = run.metrics_file.read_text(encoding="utf-8").splitlines()
    return [row for row in (json.loads(line, parse_constant=refuse) for line in lines) if "loss" in row]


def test_checkpoints_of_another_precision_or_age_start_with_a_fresh_scale(
    gang: Gang, corpus: Path, tmp_path: Path
) -> None:
    """fp16 from an fp32 checkpoint, bf16 from an fp16 one, fp16 from one that knows no scale; and fp16 generates."""

    def run(name: str, *overrides: str) -> RunDirectory:
        keys = config_of(corpus, f"run.dir={tmp_path}", f"run.name={name}", "eval.batches=1", *overrides)
        assert gang.run(train_worker, [TINY, *keys], world=1, timeout=240) == [0]
        return RunDirectory(tmp_path / name)

    source = run("fp32", "train.steps=2").checkpoint(2)
    half = run("fp16", "train.steps=4", "train.precision=fp16", f"checkpoint.resume={source}")
    assert [row["loss_scale"] for row in logged(half)] == [65536.0] * 2
    assert "eval_loss" in half.read_metrics()[-1]
    assert generate(half.checkpoint(4), ["def"], Settings(4, 0.0, None, 0))[0].finish
    brain = run("bf16", "train.steps=5", "train.precision=bf16", f"checkpoint.resume={half.checkpoint(4)}")
    assert "loss_scale" not in logged(brain)[0]

    old = half.checkpoint(4)
    state = json.loads((old / "trainer.json").read_text())
    del state["loss_scaler"]
    (old / "trainer.json").write_text(json.dumps(state))
    manifest = json.loads((old / "manifest.json").read_text())
    manifest["files"]["trainer.json"] = fingerprint(old / "trainer.json")
    (old / "manifest.json").write_text(json.dumps(manifest))
    (old / "COMMIT").write_text(hash_file(old / "manifest.json") + "\n")
    again = run("again", "train.steps=5", "train.precision=fp16", "train.loss_scale_init=2", f"checkpoint.resume={old}")
    assert logged(again)[0]["loss_scale"] == 2.0


def test_a_skipped_update_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "loss": 2.0, "lr": 1e-3, "tokens_per_second": 10.0, "mfu": 0.1}
    with Reporter(RunDirectory(tmp_path), True, 0, 2) as reporter:
        reporter.row({**row, "grad_norm": None})
        reporter.row({**row, "grad_norm": 0.25})
    first, second = capsys.readouterr().out.splitlines()
    assert "grad norm overflow, update skipped  lr" in first
    assert "grad norm 0.250  lr" in second


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.loss_scale_init=8"], "'loss_scale_init' does nothing under precision: fp32 .*; remove it"),
        (
            ["train.precision=bf16", "train.loss_scale_interval=8"],
            "'loss_scale_interval' does nothing under precision: bf16 .*; remove it",
        ),
        (["train.precision=fp16", "train.loss_scale_init=0.5"], "train.loss_scale_init"),
        (["train.precision=fp16", "train.loss_scale_interval=0"], "train.loss_scale_interval"),
        (["train.precision=half"], "train.precision"),
    ],
)
def test_wrong_keys_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(TINY, words)
