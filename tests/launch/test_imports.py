"""What is quick imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.commands import command, environment

# typer takes pydantic to show a command's options, which costs it 20 ms; we take it for configs.
_HEAVY = {"torch", "numpy", "sentencepiece", "yaml", "pydantic", "tokenizers", "datasets", "pyarrow", "zstandard"}


@pytest.mark.parametrize(
    "words",
    [
        *(["--help"], ["train", "--help"], ["generate", "--help"], ["tokenizer", "train", "--help"]),
        *(["doctor", "--help"], ["slurm", "submit", "--help"], ["slurm", "status", "--help"]),
        *(["tokenize", "--help"], ["data", "inspect", "--help"], ["data", "verify", "--help"]),
    ],
)
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
        *("launch.train", "launch.finish", "launch.local", "launch.tokenizer", "data.readers", "data.tokenizer"),
        *("launch.tokenize", "launch.data", "launch.sweep", "launch.sweep_tasks", "scaling.sweepfile"),
        *("launch.doctor", "launch.slurm.submit", "launch.slurm.status"),
    ]
    heavy = {"torch", "tokenizers", "datasets", "pyarrow", "zstandard", "pandas", "matplotlib"}
    code = f"import {', '.join(modules)}, sys\nprint(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_jobs_script_needs_only_what_python_has() -> None:
    """It runs on the host where processes are in a container."""
    code = f"import launch.slurm.job, sys\nprint(sorted({_HEAVY | {'typer', 'rich'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_streamed_dataset_imports_no_torch(tmp_path: Path) -> None:
    """Which `datasets` would on its own."""
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    code = (
        "import sys; from data.readers import Source\n"
        "texts = [d.text for d in Source(['hf:' + sys.argv[1]]).documents()]\n"
        "print(texts, 'datasets' in sys.modules, 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, env=environment(HF_HUB_OFFLINE="1"), capture_output=True, text=True)
    assert done.stdout == "['a'] True False\n", done.stderr
