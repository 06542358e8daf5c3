"""Tokenizing jobs for tests, and an independent reader of what they write."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files import hash_file
from data.manifest import MANIFEST
from data.progress import Progress
from data.readers import Source
from data.shards import dtype_for
from data.split import Split
from data.tokenize import Done, Job, tokenize
from data.tokenizer import Tokenizer


def job(
    inputs: Sequence[Path], tokenizer: Tokenizer, shard_tokens: int = 4000, eval_fraction: float = 0.1, **source: Any
) -> Job:
    """A job of small shards."""
    options = {"text_field": "text", "min_chars": 1, "max_chars": None, **source, "eval_fraction": eval_fraction}
    return Job(
        Source(inputs, **source),
        tokenizer,
        Split.at(eval_fraction),
        dtype_for(tokenizer.max_id + 1),
        shard_tokens,
        options,
    )


def run(folder: Path, job: Job, workers: int = 1) -> Done:
    """Run a job quietly."""
    return tokenize(folder, job, workers, Progress("none", 0))


def content(folder: Path) -> dict[str, str]:
    """Hash of every file of a folder, by its name."""
    return {path.name: hash_file(path) for path in folder.iterdir() if path.name != ".lock"}


def shards(folder: Path) -> dict[str, str]:
    """The same without the manifest, which names the input."""
    return {name: hashed for name, hashed in content(folder).items() if name != MANIFEST}


def texts(paragraphs: Path) -> list[str]:
    """Documents of a JSONL file."""
    return [json.loads(line)["text"] for line in paragraphs.read_text(encoding="utf-8").splitlines()]


def megatron_documents(prefix: Path) -> list[list[int]]:
    """An independent reader of Megatron's format, one field after the other."""
    index = prefix.with_name(f"{prefix.name}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<Q", index, 9) == (1,)
    letter = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[index[17]]
    n_sequences, n_index = struct.unpack_from("<QQ", index, 18)
    place = 34
    lengths = struct.unpack_from(f"<{n_sequences}i", index, place)
    place += 4 * n_sequences
    pointers = struct.unpack_from(f"<{n_sequences}q", index, place)
    place += 8 * n_sequences
    bounds = struct.unpack_from(f"<{n_index}q", index, place)
    assert place + 8 * n_index == len(index)
    tokens = prefix.with_name(f"{prefix.name}.bin").read_bytes()
    sequences = [list(struct.unpack_from(f"<{n}{letter}", tokens, p)) for n, p in zip(lengths, pointers, strict=True)]
    return [list(itertools.chain(*sequences[a:b])) for a, b in itertools.pairwise(bounds)]
