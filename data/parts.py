"""One tokenizing job as parts for many machines: part i of n reads a run of the files and writes a folder of its own.

DIR/part-00000-of-00004/     a dataset folder by itself
DIR/manifest.json            written by whoever finishes last: it names the shards of the parts, and moves nothing
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.files import atomic_write, locked
from data.checksums import entry_of
from data.manifest import JOURNAL, MANIFEST, SPLITS, read_manifest, with_totals, write_manifest
from data.progress import Progress
from data.tokenize import LOCK, Done, Job, cannot_write, tokenize

_MERGED = ("format", "block_bytes", "dtype", "vocab_size", "eos_id", "tokenizer")  # what all parts must have alike


@dataclasses.dataclass(frozen=True)
class Part:
    """Part `number` (from 0) `of` so many."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"part-{self.number:05d}-of-{self.of:05d}"


def parse_part(words: str) -> Part:
    """Read `i/n`. Raises `UserError` for anything else."""
    number, slash, of = words.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise UserError(f"--shard: {words!r} is not i/n with i from 0 to n - 1, for example 0/4")
    return Part(int(number), int(of))


def files_of(part: Part, sizes: list[int]) -> tuple[int, int]:
    """Files [first, stop) of a part: runs of about equal size, none of them empty.

    Raises:
        UserError: there are fewer files than parts.
    """
    if len(sizes) < part.of:
        raise UserError(
            f"--shard: {len(sizes)} input files cannot be shared by {part.of} parts; give at most {len(sizes)} parts, "
            "or split the files"
        )
    ends = np.cumsum(np.maximum(sizes, 1))  # a file of unknown size counts as any other of these
    wanted = np.arange(1, part.of) * ends[-1] / part.of
    cuts = np.searchsorted(ends, wanted) + 1
    # At least one file for each part: cuts rise by one or more, and leave as many files as there are parts to come.
    numbers = np.arange(1, part.of)
    cuts = np.maximum.accumulate(cuts - numbers) + numbers
    cuts = np.minimum(cuts, len(sizes) - part.of + numbers)
    bounds = [0, *map(int, cuts), len(sizes)]
    return bounds[part.number], bounds[part.number + 1]


def tokenize_part(folder: Path, job: Job, part: Part, workers: int, progress: Progress) -> tuple[Done, list[str]]:
    """Do one part of a job, and merge all parts if it is the last.

    Returns what was done, and the names of the parts that are not finished. Raises as `tokenize` does.
    """
    others = sorted({path.name[-5:] for path in folder.glob("part-*-of-*")} - {f"{part.of:05d}"})
    if others:
        raise UserError(f"{folder}: holds parts of {int(others[0])}, not of {part.of}; give another --out")
    whole = (folder / JOURNAL).exists() or ((folder / MANIFEST).exists() and "parts" not in read_manifest(folder))
    if whole:
        raise UserError(f"{folder}: holds a dataset that was made without --shard; give another --out")
    first, stop = files_of(part, [int(size) for _, size, _ in job.sources])
    inputs = {"number": part.number, "of": part.of, "first_file": first, "files": len(job.source.files)}
    mine = dataclasses.replace(
        job, source=job.source.part(first, stop), options={**job.options, "part": inputs}, may_be_empty=True
    )
    done = tokenize(folder / part.name, mine, workers, progress)
    try:
        with locked(folder / LOCK):
            names = [Part(number, part.of).name for number in range(part.of)]
            missing = [name for name in names if not (folder / name / MANIFEST).is_file()]
            if not missing and not (folder / MANIFEST).exists():
                write_manifest(folder, _merged(folder, names))
    except OSError as error:
        raise cannot_write(folder, error) from None
    return done, missing


def _merged(folder: Path, names: list[str]) -> dict[str, Any]:
    """The manifest over finished parts. Raises `UserError` that names a part which is not of the same job."""
    parts = [read_manifest(folder / name) for name in names]
    first = parts[0]
    files_before = 0
    for name, manifest in zip(names, parts, strict=True):
        place = manifest["job"].pop("part")
        alike = all(manifest[key] == first[key] for key in (*_MERGED, "job"))
        if not alike or place["first_file"] != files_before or place["files"] != sum(len(p["sources"]) for p in parts):
            raise UserError(
                f"{folder / name}: made from other input files, with other options or another tokenizer than "
                f"{names[0]}; remove the folder of the wrong one and give its command again"
            )
        _move(manifest, name, files_before)
        files_before += len(manifest["sources"])
    tokenizer = folder / first["tokenizer"]["file"]
    atomic_write(tokenizer, (folder / names[0] / tokenizer.name).read_bytes())
    splits = {
        split: with_totals(list(itertools.chain(*(manifest["splits"][split]["shards"] for manifest in parts))))
        for split in SPLITS
    }
    if not any(splits[split]["documents"] for split in SPLITS):
        raise UserError(f"{folder}: no document with any text in any of the {files_before} input files; give others")
    reasons = sorted({reason for manifest in parts for reason in manifest["skipped"]})
    return {
        **{key: first[key] for key in _MERGED},
        "splits": splits,
        "sources": list(itertools.chain(*(manifest["sources"] for manifest in parts))),
        "skipped": {reason: sum(manifest["skipped"].get(reason, 0) for manifest in parts) for reason in reasons},
        "job": first["job"],
        "parts": [
            {"name": name, "files": {f"{name}/{f}": entry_of(folder / name / f) for f in (MANIFEST, tokenizer.name)}}
            for name in names
        ],
    }


def _move(manifest: dict[str, Any], name: str, files_before: int) -> None:
    """Name a part's shards, and number their files, as the whole folder does."""
    for split in SPLITS:
        for shard in manifest["splits"][split]["shards"]:
            shard["name"] = f"{name}/{shard['name']}"
            shard["files"] = {f"{name}/{file}": entry for file, entry in shard["files"].items()}
            for end in ("first", "last"):
                shard[end][0] += files_before
