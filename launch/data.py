"""`gramian data inspect`, `verify` and `adopt`: what is in a dataset folder, whether it is undamaged, and one of token
files that others made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from common.errors import CheckFailed, UserError
from common.machine import available_cores
from data.adopt import adopt
from data.dataset import Dataset
from data.manifest import SPLITS
from data.statistics import samples, summary
from data.tokenizer import load_tokenizer
from data.verify import verify
from launch.reports import align_right, check_writable, reading_bar, refusing, report_console, write_json
from trainer.exchange.folders import new_folder

_SAMPLE_TOKENS = 64
_SAMPLE_CHARS = 160


def run_inspect(folder: Path, n_samples: int, plot: Path | None, json_file: str | None) -> None:
    """Print counts, lengths and samples of a dataset folder."""
    check_writable("--json", json_file)
    if plot is not None:
        check_writable("--plot", str(plot))
        if plot.suffix not in ("", ".png"):
            raise UserError(f"--plot {plot}: pictures are drawn as PNG; give a name that ends in .png")
    dataset = Dataset.open(folder)
    tokenizer = dataset.tokenizer()
    splits = {split: summary(dataset, split) for split in SPLITS}
    shown = {split: list(samples(getattr(dataset, split), tokenizer, n_samples, _SAMPLE_TOKENS)) for split in SPLITS}
    about = {
        "folder": str(folder),
        "dtype": dataset.dtype.name,
        "vocab_size": dataset.vocab_size,
        "eos_id": dataset.eos_id,
        "tokenizer": {key: dataset.manifest["tokenizer"][key] for key in ("kind", "file", "hash")},
        "sources": len(dataset.manifest["sources"]),
        "skipped": dataset.manifest["skipped"],
        "data_hash": dataset.data_hash,
    }
    write_json(json_file, {**about, "splits": {s: {**splits[s], "samples": shown[s]} for s in SPLITS}})
    if json_file != "-":
        _print(about, splits, shown)
    if plot is not None:
        from launch.plots import plot_lengths

        with refusing("--plot", str(plot)):
            plot_lengths({split: splits[split]["lengths"] for split in SPLITS if splits[split]["documents"]}, plot)
        if json_file != "-":
            print(f"picture  {plot}")


def _print(about: dict[str, Any], splits: dict[str, Any], shown: dict[str, Any]) -> None:
    console = report_console()

    def say(text: str) -> None:
        console.print(text, markup=False)

    tokenizer = about["tokenizer"]
    say(
        f"{about['folder']}: {about['dtype']} ids below {about['vocab_size']:,}; end of document {about['eos_id']}; "
        f"{tokenizer['kind']} tokenizer {tokenizer['file']}, hash {tokenizer['hash'][:16]}"
    )
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in about["skipped"].items()) or "none"
    say(f"read from {about['sources']:,} file{'s' * (about['sources'] != 1)}; records skipped: {skipped}")
    counts = _table("split", "documents", "tokens", "bytes of text", "bytes per token", "shards")
    for split, part in splits.items():
        ratio = f"{part['bytes_per_token']:.3f}" if part["tokens"] else "-"
        numbers = [f"{part[what]:,}" for what in ("documents", "tokens", "bytes")]
        counts.add_row(split, *numbers, ratio, f"{part['shards']:,}")
    console.print(counts)
    lengths = _table(
        "tokens in a document", *(f"{split} {what}" for split in SPLITS for what in ("documents", "tokens"))
    )
    by_bin = {split: {row["from"]: row for row in splits[split]["lengths"]} for split in SPLITS}
    for start in sorted({start for rows in by_bin.values() for start in rows}):
        cells = []
        for split in SPLITS:
            row = by_bin[split].get(start)
            cells += [f"{row['documents']:,}", f"{row['tokens'] / splits[split]['tokens']:.1%}"] if row else ["", ""]
        lengths.add_row(f"{start:,} to {2 * start - 1:,}" if start > 1 else "1", *cells)
    console.print(lengths)
    for split in SPLITS:
        for sample in shown[split]:
            text = json.dumps(sample["text"], ensure_ascii=False)[1:-1]
            more = "..." if len(text) > _SAMPLE_CHARS or sample["tokens"] - 1 > _SAMPLE_TOKENS else ""
            say(f"{split} {sample['document']:,} ({sample['tokens']:,} tokens)  {text[:_SAMPLE_CHARS]}{more}")


def _table(*headings: str) -> Table:
    table = Table(*headings)
    align_right(table, *range(1, len(headings)))
    return table


def run_verify(folder: Path, workers: int | None, json_file: str | None) -> None:
    """Check every byte of a dataset folder. Raises `CheckFailed` if anything is not as it was written."""
    check_writable("--json", json_file)
    with reading_bar() as bar:
        task = bar.add_task("reading", total=None)
        found = verify(
            folder, workers or available_cores(), lambda done, total: bar.update(task, completed=done, total=total)
        )
    problems = [dataclasses.asdict(problem) for problem in found.problems]
    write_json(json_file, {"folder": str(folder), "files": found.files, "bytes": found.bytes, "problems": problems})
    if json_file != "-":
        for problem in found.problems:
            print(problem)
    if found.problems:
        damaged = len({problem.file for problem in found.problems})
        raise CheckFailed(
            f"{folder}: {damaged} of {found.files} files {'is' if damaged == 1 else 'are'} not as written; make them "
            "again, or bring them from where a good copy is"
        )
    if json_file != "-":
        print(f"{folder}: {found.files:,} files, {found.bytes:,} bytes: all as written")


def run_adopt(train: list[Path], held_out: list[Path], tokenizer: Path, eos: str | None, out: Path) -> None:
    """Make a dataset folder of token files in Megatron's format."""
    given = {"train": train, "eval": held_out}
    prefixes = {s: [p.with_suffix("") if p.suffix in (".bin", ".idx") else p for p in given[s]] for s in given}
    loaded = load_tokenizer(tokenizer, eos)
    with new_folder(out, 0) as folder:
        splits = adopt(folder, prefixes, loaded)["splits"]
    counts = (f"{splits[s]['documents']:,} documents, {splits[s]['tokens']:,} tokens" for s in SPLITS)
    print("{}: {} to train on; {} held out".format(out, *counts))
