"""Text from checkpoints with odd vocabularies, and from odd prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang import Gang
from tests.runs import TINY, train_worker
from trainer.generate import generate
from trainer.rundir import RunDirectory


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
