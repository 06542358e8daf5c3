"""Small dataset folders of known content for tests: a byte is a token, so that every row can be read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from data.dataset import Dataset
from data.packing import Batch
from data.progress import Progress
from data.readers import Source
from data.shards import dtype_for
from data.split import Split
from data.tokenize import Job, tokenize
from data.tokenizer import Tokenizer
from data.tokenizers.byte import ByteTokenizer

EOS = 256


def make_dataset(
    folder: Path, texts: list[str], held_out: float = 0.0, tokenizer: Tokenizer | None = None, shard_tokens: int = 2000
) -> Dataset:
    """Tokenize texts into `folder`, in shards so small that rows lie across their borders."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    corpus = folder.with_suffix(".jsonl")
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    tokenizer = tokenizer or ByteTokenizer()
    job = Job(Source([corpus]), tokenizer, Split.at(held_out), dtype_for(tokenizer.vocab_size), shard_tokens, {})
    tokenize(folder, job, 1, Progress("none", 0))
    return Dataset.open(folder)


def followed_by(batch: Batch, other: Batch) -> Batch:
    """The rows of both, those of `other` last. Both or none have `documents`."""
    pairs = ((batch.tokens, other.tokens), (batch.targets, other.targets), (batch.mask, other.mask))
    tokens, targets, mask = (np.concatenate(pair) for pair in pairs)
    if batch.documents is None or other.documents is None:
        return Batch(tokens, targets, mask)
    return Batch(tokens, targets, mask, np.concatenate([batch.documents, other.documents]))


def random_texts(seed: int, n: int, letters: str = "abcdefghijklmnopqrstuvwxyz ", longest: int = 120) -> list[str]:
    """Texts of 4 to `longest` letters, all different."""
    generator, size = random.Random(seed), len(letters)
    names = [letters[i // size**2 % size] + letters[i // size % size] + letters[i % size] for i in range(n)]
    return [name + "".join(generator.choices(letters, k=generator.randint(1, longest - 3))) for name in names]
