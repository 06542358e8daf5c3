"""What is quick imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch.commands import command, environment

# typer takes pydantic to show a command's options, which costs it 20 ms; we take it for configs.
_HEAVY = {"torch", "numpy", "sentencepiece", "yaml", "pydantic"}


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["generate", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    result = command(*words, PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    assert "Usage: gramian" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "launch.cli" in imported
    assert not imported & (_HEAVY if words == ["--help"] else _HEAVY - {"pydantic"})


def test_no_config_module_imports_torch() -> None:
    """Configs are checked on login nodes and before processes start; so is what else is known then."""
    modules = [
        *("common.config", "common.logs", "data.config", "models.config", "optim.config", "trainer.config"),
        *("trainer.layout", "trainer.rundir", "trainer.manifest", "trainer.start", "data.prepare", "launch.worker"),
        *("launch.train", "launch.finish", "launch.local"),
    ]
    code = f"import {', '.join(modules)}, sys\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
