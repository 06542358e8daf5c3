"""docs/parallelism.md: its command runs, and certifies."""

from __future__ import annotations

from pathlib import Path

from tests.docs.test_docs import ROOT, commands, without_starting
from tests.gang import Gang


def test_command_runs(gang: Gang, corpus: Path) -> None:
    """On the small corpus."""
    (command,) = commands(ROOT / "docs" / "parallelism.md")
    printed = without_starting(gang, f"{command} data.corpus={corpus}", ROOT)
    assert "certified: 2 steps on 4 ranks equal one plain process" in printed
