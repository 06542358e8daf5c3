"""`gramian tokenize`: files of text to a dataset folder."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.logs import get_logger, setup_logging
from common.machine import available_cores
from data.manifest import SPLITS
from data.parts import parse_part, tokenize_part
from data.progress import Progress
from data.readers import Source
from data.shards import dtype_for
from data.split import Split
from data.tokenize import Done, Job, tokenize
from data.tokenizer import load_tokenizer
from launch.reports import check_writable, write_json


@dataclass(frozen=True)
class Request:
    """The words of the command line."""

    inputs: list[str]
    tokenizer: Path
    eos: str | None
    out: Path
    workers: int | None
    text_field: str
    eval_fraction: float
    min_chars: int
    max_chars: int | None
    max_bad_share: float
    shard_tokens: int
    part: str | None
    json_file: str | None


def run_tokenize(request: Request) -> None:
    """Tokenize, or go on, or find it done; tell what there is."""
    for option, share in (("--eval-fraction", request.eval_fraction), ("--max-bad-share", request.max_bad_share)):
        if math.isnan(share):  # which typer's bounds let through
            raise UserError(f"{option} must be a number from 0 to 1, got nan")
    if request.max_chars is not None and request.max_chars < request.min_chars:
        raise UserError(
            f"--max-chars {request.max_chars} is less than --min-chars {request.min_chars}: no document would be left; "
            "raise the one or lower the other"
        )
    part = parse_part(request.part) if request.part is not None else None
    check_writable("--json", request.json_file)
    setup_logging(quiet=request.json_file == "-")
    source = Source(request.inputs, request.text_field, request.min_chars, request.max_chars, request.max_bad_share)
    tokenizer = load_tokenizer(request.tokenizer, request.eos)
    options = {
        "text_field": request.text_field,
        "min_chars": request.min_chars,
        "max_chars": request.max_chars,
        "eval_fraction": request.eval_fraction,
    }
    job = Job(
        source,
        tokenizer,
        Split.at(request.eval_fraction),
        dtype_for(max(tokenizer.vocab_size, tokenizer.max_id + 1)),
        request.shard_tokens,
        options,
    )
    workers = request.workers or available_cores()
    on_terminal = sys.stderr.isatty() and request.json_file != "-"
    progress = Progress("bar" if on_terminal else "lines", source.total_bytes)
    missing: list[str] = []
    if part is None:
        done, place = tokenize(request.out, job, workers, progress), request.out
    else:
        done, missing = tokenize_part(request.out, job, part, workers, progress)
        place = request.out / part.name
    _tell(place, done, request.eval_fraction)
    if part is not None:
        left = f"{len(missing)} of {part.of} parts are missing: {', '.join(missing[:3])}" + ", ..." * (len(missing) > 3)
        get_logger().info("%s: %s", request.out, left if missing else f"all {part.of} parts are there; it is whole")
    write_json(request.json_file, _record(place, done, workers, missing))


def _tell(folder: Path, done: Done, eval_fraction: float) -> None:
    """The summary line, after what deserves a warning."""
    held_out = done.manifest["splits"]["eval"]["documents"]
    if eval_fraction > 0 and not held_out:
        get_logger().warning(
            "%s: no document was held out for evaluation; with so few, raise --eval-fraction or keep a file apart",
            folder,
        )
    skipped = done.manifest["skipped"]
    reasons = f" ({', '.join(f'{count:,} {reason}' for reason, count in skipped.items())})" if skipped else ""
    tokens = done.total("tokens")
    per_token = f"{done.total('bytes') / tokens:.3f} bytes per token" if tokens else "nothing in it"
    if done.seconds:
        rate = f"{done.new_bytes / done.seconds / 1e6:.2f} MB/s, {done.new_tokens / done.seconds:,.0f} tokens/s"
        time = f"{done.seconds:.1f} s, {rate}"
    else:
        time = "it was finished already"
    get_logger().info(
        "%s: %s documents (%s held out), %s tokens, %s, %s records skipped%s; %s",
        folder,
        f"{done.total('documents'):,}",
        f"{held_out:,}",
        f"{tokens:,}",
        per_token,
        f"{sum(skipped.values()):,}",
        reasons,
        time,
    )


def _record(folder: Path, done: Done, workers: int, missing: list[str]) -> dict[str, Any]:
    """The same for programs."""
    splits = done.manifest["splits"]
    return {
        "folder": str(folder),
        "splits": {s: {what: splits[s][what] for what in ("documents", "tokens", "bytes")} for s in SPLITS},
        "dtype": done.manifest["dtype"],
        "vocab_size": done.manifest["vocab_size"],
        "tokenizer": {key: done.manifest["tokenizer"][key] for key in ("kind", "file", "hash")},
        "skipped": done.manifest["skipped"],
        "workers": workers,
        "this_start": {
            "documents": done.new_documents,
            "tokens": done.new_tokens,
            "bytes": done.new_bytes,
            "seconds": done.seconds,
        },
        "missing_parts": missing,
    }
