"""A model is never whole in memory: not when it is exported, nor imported, nor when an export is planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.config import ModelConfig
from tests.trainer.exchange.checkpoints import PEAK, random_checkpoint, sparse_checkpoint, tree

ROOT = Path(__file__).resolve().parent.parent.parent.parent
CODE = f"""
import json, sys
from pathlib import Path
from trainer.exchange.export import export, plan_export
from trainer.exchange.importing import import_folder
from models.families import family_for
{PEAK}
for folder in map(Path, sys.argv[1:]):
    checkpoint, out, back = (folder / name for name in ("checkpoint", "out", "back"))
    plan = plan_export(checkpoint, "bf16", 50_000_000)  # once before, for what is imported on the way
    print(json.dumps({{
        "planning": peak_of(lambda: plan_export(checkpoint, "bf16", 50_000_000)),
        "exporting": peak_of(lambda: export(plan, out)),
        "importing": peak_of(lambda: import_folder(out, back)),
    }}), flush=True)
"""
MB = 10**6


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Also where matrices are turned and joined."""
    keys: dict[str, Any] = {"vocab_size": 16_000, "d_model": 384, "n_heads": 6, "d_ff": 768, "n_layers": 24}
    folders = [tmp_path / preset for preset in ("llama-8m", "gpt2-124m")]
    for folder in folders:
        checkpoint = random_checkpoint(folder / "checkpoint", preset=folder.name, **keys, max_seq_len=64)
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        assert size > 130 * MB
    words = [sys.executable, "-c", CODE, *map(str, folders)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    largest = 4 * 16_000 * 384
    for peaks in map(json.loads, done.stdout.splitlines()):
        assert peaks["planning"] < largest, peaks
        for what in ("exporting", "importing"):
            assert largest < peaks[what] < 2 * largest + 20 * MB < size / 1.8, peaks


def test_a_large_model_is_planned_from_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 405 billion parameters; `make verify` counts the memory that it takes."""
    from launch.cli import app

    checkpoint = sparse_checkpoint(tmp_path / "checkpoint", 3, ModelConfig(preset="llama3-405b"))
    assert sum(path.stat().st_size for path in checkpoint.iterdir()) > 3 * 4 * 405_853_388_800
    before = tree(tmp_path)
    words = ["checkpoint", "export", str(checkpoint), "--to", "hf", "--out", str(tmp_path / "out"), "--dtype", "bf16"]
    app([*words, "--dry-run", "--json", "-"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == 405_853_388_800
    weights = [file for file in report["files"] if file["name"].endswith(".safetensors")]
    assert 2 * 405_853_388_800 < sum(file["bytes"] for file in weights) < 2 * 405_853_388_800 + 10 * MB
    assert max(file["bytes"] for file in weights) < 5_001 * MB
    assert [file["name"] for file in weights][:2] == [
        f"model-{i:05d}-of-{len(weights):05d}.safetensors" for i in (1, 2)
    ]
    assert {"config.json", "model.safetensors.index.json"} <= {file["name"] for file in report["files"]}
    assert tree(tmp_path) == before
