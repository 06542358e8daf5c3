"""docs/parallelism.md: its command runs, and certifies."""

from __future__ import annotations

from tests.docs.test_docs import ROOT, commands, shell


def test_command_runs() -> None:
    (command,) = commands(ROOT / "docs" / "parallelism.md")
    assert "certified: 2 steps on 4 ranks equal one plain process" in shell(command, ROOT)
