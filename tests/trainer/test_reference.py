"""The whole loop against a plain one: no engine, no mesh, no checkpoint, of `trainer` only the config.

The layout tests compare our loop with itself; this one says what the numbers have to be.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.order import sample_ids
from data.prepare import PreparedData, prepare
from models.transformer import Transformer
from tests.gang import Gang
from tests.runs import TINY, read_state, train_worker
from trainer.config import TrainingConfig, load_config
from trainer.rundir import RunDirectory

STEPS, WARMUP, LR, CLIP, DECAY, SEQ_LEN, BATCH = 12, 4, 3e-3, 0.4, 0.1, 32, 8
KEYS = [
    f"train.steps={STEPS}",
    f"train.grad_clip={CLIP}",
    f"train.global_batch_size={BATCH}",
    "train.micro_batch_size=2",
    f"data.seq_len={SEQ_LEN}",
    "schedule.name=cosine",
    f"schedule.warmup_steps={WARMUP}",
    f"optim.lr={LR}",
    f"optim.weight_decay={DECAY}",
    "eval.every=6",
    "checkpoint.every=12",
]


def lr_at(step: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth, written out."""
    if step <= WARMUP:
        return LR * step / WARMUP
    return LR * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2)


def rows(tokens: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the concatenated token stream as inputs and targets."""
    windows = np.stack([tokens[i * SEQ_LEN : i * SEQ_LEN + SEQ_LEN + 1] for i in indices]).astype(np.int64)
    return torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:])


def plain_run(config: TrainingConfig, data: PreparedData, initial: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Train and evaluate in the dullest way."""
    torch.set_num_threads(1)
    model = Transformer(config.model.with_vocab_size(data.vocab_size))
    model.load_state_dict(initial)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    train = np.fromfile(data.folder / "train-00000.bin", dtype=np.uint16)
    held_out = np.fromfile(data.folder / "eval-00000.bin", dtype=np.uint16)
    n_train, n_held_out = (len(train) - 1) // SEQ_LEN, (len(held_out) - 1) // SEQ_LEN

    def loss_of(tokens: np.ndarray, indices: np.ndarray) -> torch.Tensor:
        inputs, targets = rows(tokens, indices)
        return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    result: dict[str, Any] = {"loss": [], "grad_norm": [], "lr": [], "eval_loss": [], "eval_bits_per_byte": []}
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        loss = loss_of(train, sample_ids(config.run.seed, n_train, (step - 1) * BATCH, BATCH))
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters() if p.grad is not None))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, CLIP / norm)
        optimizer.step()
        result["loss"].append(float(loss.detach()))
        result["grad_norm"].append(norm)
        result["lr"].append(lr_at(step))
        if step % 6 == 0:
            with torch.no_grad():
                read = np.arange(min(n_held_out, config.eval.batches * BATCH))
                nats = float(loss_of(held_out, read))
            text = data.tokenizer().decode(held_out[1 : len(read) * SEQ_LEN + 1])
            result["eval_loss"].append(nats)
            # The end-of-document tokens among the targets are predicted too, and stand for no byte of text.
            result["eval_bits_per_byte"].append(nats * len(read) * SEQ_LEN / math.log(2) / len(text.encode()))
    result["weights"] = {name: p.detach() for name, p in model.named_parameters()}
    return result


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (1, []),
        (4, ["parallel.dp_replicate=2"]),
        pytest.param(2, ["parallel.engine=ddp"], marks=pytest.mark.verify),
    ],
)
def test_training_is_the_plain_loop(gang: Gang, corpus: Path, tmp_path: Path, world: int, keys: list[str]) -> None:
    """Losses, norms before a clip that bites, learning rates, evaluations and weights; fp32 sums in another order."""
    arguments = [f"data.corpus={corpus}", f"run.dir={tmp_path}", *KEYS, *keys]
    assert gang.run(train_worker, [TINY, *arguments], world=world) == [0] * world
    run = RunDirectory(tmp_path / "tiny")
    # The initial weights are those of the run itself: that they follow seed and name is another test's.
    first = ["run.name=first", "optim.lr=1e-30", "train.steps=1", "schedule.warmup_steps=0", "eval.batches=0"]
    assert gang.run(train_worker, [TINY, *arguments, *first], world=world) == [0] * world
    state = read_state(RunDirectory(tmp_path / "first").checkpoint(1))
    initial = {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")}

    config = load_config(TINY, arguments)
    expected = plain_run(config, prepare(config.data), initial)
    assert min(expected["grad_norm"]) > CLIP
    logged = run.read_metrics()
    for key in ("loss", "grad_norm", "lr", "eval_loss", "eval_bits_per_byte"):
        values = [row[key] for row in logged if key in row]
        assert values == pytest.approx(expected[key], rel=1e-12 if key == "lr" else 2e-6), key
    final = read_state(run.checkpoint(STEPS))
    for name, weight in expected["weights"].items():
        assert float((final[f"model.{name}"] - weight).norm() / weight.norm()) < 1e-5, name


def test_valid_tokens_are_counted(gang: Gang, paragraphs: Path, tmp_path: Path) -> None:
    """`tokens` in the metrics counts predictions that the loss has, not padding, and goes on over a resume."""
    from data.loader import Batches

    arguments = [f"data.corpus={paragraphs}", f"run.dir={tmp_path}", "data.packing=pad", "eval.batches=0"]
    for steps in (3, 5):
        assert gang.run(train_worker, [TINY, *arguments, f"train.steps={steps}"], world=2) == [0, 0]
    config = load_config(TINY, arguments)
    batches = Batches(prepare(config.data), config.data, 0, config.train.global_batch_size)
    counts = [int(batches.train(step, 0, 1).mask.sum()) for step in range(5)]
    logged = [row["tokens"] for row in RunDirectory(tmp_path / "tiny").read_metrics()]
    assert logged == np.cumsum(counts).tolist()
    assert max(counts) < config.train.global_batch_size * config.data.seq_len
