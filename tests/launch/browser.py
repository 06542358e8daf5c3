"""Headless Chromium looks at a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# What the browser asks for by itself, whatever the page.
_ITS_OWN = ("googleapis.com", "google.com", "gstatic.com", "gvt1.com")


class Seen(NamedTuple):
    """What a page did."""

    console: list[str]
    requests: list[str]


def look_at(page: Path, picture: Path, size: str = "1100,1400") -> Seen:
    """Open a page, without a network, and write a screenshot."""
    assert CHROMIUM is not None
    log = picture.with_suffix(".net.json")
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *("--disable-component-update", "--no-first-run", "--disable-sync", "--enable-logging=stderr"),
            *(f"--user-data-dir={picture.with_suffix('.profile')}", f"--log-net-log={log}"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={size}", f"--screenshot={picture}"),
            page.resolve().as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    urls = set(re.findall(r'"url":("(?:[^"\\]|\\.)*")', log.read_text(encoding="utf-8")))
    found = [json.loads(url) for url in urls]
    requests = [url for url in found if urlsplit(url).scheme not in ("file", "data", "chrome", "about", "devtools")]
    return Seen(console, sorted(u for u in requests if not (urlsplit(u).hostname or "").endswith(_ITS_OWN)))
