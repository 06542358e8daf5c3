"""Experts that cannot be, or not be spread: one line before anything is started, which names the key and the fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch.commands import assert_refused, command, tiny
from tests.runs import TINY
from trainer.config import load_config
from trainer.layout import plan_layout


@pytest.mark.parametrize(
    ("processes", "model", "words", "parts", "fix"),
    [
        # Offered is what divides ranks and experts, and leaves FSDP2 nothing to cut unevenly.
        (3, "n_experts: 8", "parallel.ep=3", ["'parallel.ep' (3)", "8 experts", "3 ranks", "[1]"], "parallel.ep=1"),
        (6, "n_experts: 8", "parallel.ep=4", ["'parallel.ep' (4)", "6 ranks", "[1]"], "parallel.ep=1"),
        (6, "n_experts: 6", "parallel.ep=4 parallel.tp=2", ["6 ranks of 'parallel.dp_shard' x tp"], "parallel.ep=3"),
        (
            4,
            "n_experts: 8",
            "parallel.ep=4 parallel.dp_replicate=2",
            ["'parallel.ep' (4)", "2 ranks", "dp_shard", "[1, 2]"],
            "parallel.ep=2",
        ),
        (2, "n_experts: 4, top_k: 5", "", ["top_k=5", "n_experts=4", "set model.moe.top_k"], "model.moe.top_k=4"),
        (
            2,
            "n_experts: 64, top_k: 2, capacity_factor: 0.4",
            "",
            ["'model.moe.capacity_factor' (0.4)", "less than one token", "row of 64", "set it to 0.5"],
            "model.moe.capacity_factor=0.5",
        ),
        # 4 / 3, rounded so that it is not refused in its turn.
        (
            2,
            "n_experts: 64, top_k: 1, normalize: false, capacity_factor: 1.0",
            "data.seq_len=48",
            ["less than one token", "row of 48", "set it to 1.34"],
            "model.moe.capacity_factor=1.34",
        ),
        (2, "n_experts: 8", "parallel.ep=2 parallel.engine=ddp", ["engine ddp", "remove ep"], "parallel.ep=1"),
        (
            2,
            None,
            "parallel.ep=2",
            ["'parallel.ep'", "the model has none", "set model.moe"],
            "model.moe={n_experts: 8}",
        ),
        (
            2,
            "n_experts: 8, bias_update_rate: 0.01, selection_bias: false",
            "",
            ["bias_update_rate", "leave model.moe.selection_bias out"],
            "model.moe.selection_bias=true",
        ),
        (2, "n_experts: 8, top_k: 1", "", ["top_k=1", "set model.moe.normalize=false"], "model.moe.normalize=false"),
        # Which FSDP2 could not cut evenly.
        (
            12,
            "n_experts: 2, d_ff: 30",
            "parallel.ep=2 parallel.dp_replicate=1",
            ["6 ranks share 1 experts", "d_model (64)", "set parallel.ep to one of [1], or parallel.dp_replicate"],
            "parallel.dp_replicate=3",
        ),
    ],
)
def test_refused(
    corpus: Path, tmp_path: Path, processes: int, model: str | None, words: str, parts: list[str], fix: str
) -> None:
    """By the command; and with the fix that the line tells of, or any that it lists, the config has a layout."""
    keys = ["train.global_batch_size=24", "train.micro_batch_size=1", *words.split()]
    keys += [f"model.moe={{{model}}}"] if model else []
    refused = command(*tiny(corpus, tmp_path / "runs", *keys, "--nproc", str(processes)))
    assert_refused(refused, *parts)
    assert list(tmp_path.iterdir()) == []
    listed = [f"parallel.ep={n}" for group in re.findall(r"\[([\d, ]+)\]", refused.stderr) for n in group.split(", ")]
    for word in (fix, *listed):
        assert plan_layout(load_config(TINY, [*keys, word]), processes).world_size == processes, word


def test_a_dry_run_refuses_too(corpus: Path, tmp_path: Path) -> None:
    """On a machine that need not have the ranks."""
    keys = ["model.moe={n_experts: 8}", "parallel.ep=3", "--nproc", "3", "--dry-run"]
    assert_refused(command(*tiny(corpus, tmp_path / "runs", *keys)), "'parallel.ep' (3)")
    assert list(tmp_path.iterdir()) == []
