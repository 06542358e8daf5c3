"""What commands tell: programs a JSON file, people tables on a console."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from common.errors import UserError
from common.files import atomic_write


def check_writable(option: str, file: str | None) -> None:
    """Refuse a file that could not be written, before the work and not after it. `-` is standard output."""
    if file is None or file == "-":
        return
    path = Path(file)
    written = path if path.exists() and not path.is_file() else path.parent  # a pipe or a device, or what gets the name
    if path.is_dir() or not path.parent.is_dir() or not os.access(written, os.W_OK):
        raise UserError(
            f"{option} {file}: cannot be written; give a file in a folder that is there, or - for the terminal"
        )


def write_json(file: str | None, record: dict[str, Any]) -> None:
    """Write a report, if one is asked for."""
    if file is None:
        return
    text = json.dumps(record, indent=1) + "\n"
    with refusing("--json", file):
        if file == "-":
            print(text, end="", flush=True)
        else:
            atomic_write(Path(file), text)


@contextlib.contextmanager
def refusing(option: str, file: str) -> Iterator[None]:
    """Turn what goes wrong in writing, a full disk and the like, into the user's to mend."""
    try:
        yield
    except BrokenPipeError:  # the reader has had enough
        raise
    except OSError as error:
        if file == "-":  # what is left unwritten would be tried again at the end, and change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UserError(
            f"{option} {file}: cannot be written: {error.strerror}; make room, or give another file"
        ) from None


def report_console(stderr: bool = False) -> Console:
    """A console for tables, which keep their columns in a file or a pipe too."""
    console = Console(highlight=False, soft_wrap=True, stderr=stderr)
    if not console.is_terminal:
        console.width = 110
    return console


def align_right(table: Table, *columns: int) -> None:
    """Set numbers to the right, in the columns of these places."""
    for place in columns:
        table.columns[place].justify = "right"


def reading_bar() -> Progress:
    """A bar on the terminal for bytes that are read."""
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
