"""Sampling, and text from checkpoints with odd vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gang import Gang
from tests.runs import TINY, train_worker
from trainer.generate import generate, sample
from trainer.rundir import RunDirectory


def draws(temperature: float, top_k: int | None, n: int = 4000) -> torch.Tensor:
    """Counts of tokens drawn from fixed logits."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    return torch.bincount(torch.tensor([sample(logits, temperature, top_k, generator) for _ in range(n)]), minlength=4)


def test_temperature_divides_the_logits() -> None:
    """Frequencies within five standard deviations of softmax(logits / T)."""
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(torch.tensor([2.0, 1.0, 0.0, -1.0]) / temperature, 0)
        deviation = (expected * (1 - expected) / 4000).sqrt()
        assert ((draws(temperature, None) / 4000 - expected).abs() < 5 * deviation).all()


def test_top_k_leaves_only_the_likeliest() -> None:
    assert (draws(1.0, 2)[2:] == 0).all()
    assert (draws(1.0, 2)[:2] > 0).all()
    assert draws(0.0, None).tolist() == [4000, 0, 0, 0]
    assert (draws(5.0, 100) > 0).all()


def test_padding_of_the_vocabulary_is_never_drawn(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """A model with 4096 rows for 512 tokens, hardly trained: seven of eight draws would be of no token."""
    keys = ["model.vocab_size=4096", "train.steps=1", "eval.batches=0"]
    assert gang.run(train_worker, [TINY, f"data.corpus={corpus}", f"run.dir={tmp_path}", *keys], world=1) == [0]
    text = generate(RunDirectory(tmp_path / "tiny").checkpoint(1), "def ", 40, temperature=1.0, top_k=None, seed=0)
    assert text.startswith("def ")
    assert len(text) > 20


@pytest.mark.parametrize("prompt", ["", "é\u2581\0"])
def test_any_prompt(gang: Gang, corpus: Path, tmp_path: Path, prompt: str) -> None:
    keys = ["train.steps=1", "eval.batches=0"]
    assert gang.run(train_worker, [TINY, f"data.corpus={corpus}", f"run.dir={tmp_path}", *keys], world=1) == [0]
    text = generate(RunDirectory(tmp_path / "tiny").checkpoint(1), prompt, 5, temperature=1.0, top_k=None, seed=0)
    assert text.startswith(prompt)
