"""The table of parameters of `gramian train --dry-run`; what else is printed is in test_train_command.py."""

from __future__ import annotations

import pytest
from rich.console import Console

from launch.dryrun import parameter_table
from models.config import ModelConfig, preset_names


def _printed(model: ModelConfig, width: int = 80) -> list[list[str]]:
    """The words of each line of the table."""
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(parameter_table(model))
    lines = capture.get().splitlines()
    assert all(len(line) <= width for line in lines)
    return [line.split() for line in lines if line.strip(" ─")]


def _config(preset: str) -> ModelConfig:
    config = ModelConfig(preset=preset)
    return config.with_vocab_size(50257) if config.vocab_size is None else config


def test_a_dense_model() -> None:
    """By hand: attention 2 x 16384 x 128 x (128 + 8), MLP 3 x 16384 x 53248, in each of 126 blocks."""
    assert _printed(_config("llama3-405b")) == [
        ["parameters", "in", "one", "block", "blocks", "in", "all", "share"],
        ["embedding", "2,101,346,304", "0.5%"],
        ["attention", "570,425,344", "126", "71,873,593,344", "17.7%"],
        ["mlp", "2,617,245,696", "126", "329,772,957,696", "81.3%"],
        ["norms", "32,768", "126", "4,128,768", "0.0%"],
        ["final", "norm", "16,384", "0.0%"],
        ["head", "2,101,346,304", "0.5%"],
        ["total", "405,853,388,800", "100.0%"],
    ]


def test_a_sparse_model() -> None:
    assert _printed(_config("moe-8m").model_copy(update={"vocab_size": 4096})) == [
        ["parameters", "in", "one", "block", "blocks", "in", "all", "share", "of", "a", "token"],
        ["embedding,", "head", "1,048,576", "12.9%", "1,048,576"],
        ["attention", "196,608", "4", "786,432", "9.7%", "786,432"],
        ["router", "2,048", "4", "8,192", "0.1%", "8,192"],
        ["experts", "1,572,864", "4", "6,291,456", "77.3%", "1,572,864"],
        ["norms", "512", "4", "2,048", "0.0%", "2,048"],
        ["final", "norm", "256", "0.0%", "256"],
        ["total", "8,136,960", "100.0%", "3,418,368"],
    ]


@pytest.mark.parametrize("preset", preset_names())
def test_every_number_is_whole_on_a_narrow_terminal(preset: str) -> None:
    narrow = _printed(_config(preset), width=80)
    assert narrow == _printed(_config(preset), width=300)
    assert "…" not in str(narrow)
