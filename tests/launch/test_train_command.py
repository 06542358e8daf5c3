"""`gramian train` and torchrun do what they say, and show it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch.commands import BIN, command, environment, tiny
from tests.launch.conftest import Trained
from tests.runs import TINY, losses_and_norms, relative_difference
from trainer.config import load_config
from trainer.rundir import RunDirectory


def test_dry_run_prints_the_plan_and_starts_nothing(corpus: Path, tmp_path: Path) -> None:
    words = tiny(corpus, tmp_path / "runs", "parallel.dp_replicate=2", "data.tokenizer.vocab_size=512")
    sizes = ["train.global_batch_size=32", "train.micro_batch_size=2", "train.steps=20"]
    result = command(*words, *sizes, "--dry-run", "--nproc", "4", GRAMIAN_CACHE=str(tmp_path / "cache"))
    assert (result.returncode, result.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
    output = result.stdout
    assert "4 ranks = dp_replicate 2 x dp_shard 2" in output
    assert "32 sequences = 4 ranks x 2 per micro-batch x 4 accumulated" in output
    assert "32 x 64" not in output
    assert "2,048 positions a step" in output
    # By hand: embedding and head 2 x 512 x 64; a block: q, o 2 x 64 x 64, k, v 2 x 64 x 32, mlp 3 x 64 x 128, 2 norms.
    total = 2 * 512 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
    assert re.search(rf"total .* {total:,} ", output)
    # Twice the weights of the blocks and the head; in each block 4 x 64 for each of 32 keys.
    forward = 2 * (512 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)) + 2 * 4 * 64 * 32
    assert (
        f"FLOPs  {forward:,} per token forward, {3 * forward:,} with backward (causal attention, rows of 64)" in output
    )
    assert f"work   40,960 positions in 20 steps = {40_960 * 3 * forward:.3g} FLOPs" in output
    # What it prints first is a config: every key, as the run would write it.
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(output.split("\nmesh ")[0])
    assert load_config(resolved) == load_config(TINY, [*words[2:], *sizes])


def test_two_processes(trained: Trained) -> None:
    """Rank 0 has the terminal, rank 1 a file; the run directory holds what was promised."""
    run, output = trained.run, trained.result.stdout
    assert trained.result.stderr == ""
    assert "\x1b" not in output  # no terminal, so plain lines
    assert re.search(r"^step +6/6  loss \d\.\d+  grad norm .* lr 6.00e-04  [\d,]+ tokens/s  MFU .*left$", output, re.M)
    assert output.count("step      1/6") == 1
    assert "2 ranks = dp_replicate 1 x dp_shard 2" in output
    assert f"sample\n------\n{run.sample_file.read_text()}\n------" in output
    for path in (run.checkpoint(6), run.metrics_file, f"gramian generate {run.path}"):
        assert str(path) in output
    assert [path.parent.name for path in run.path.glob("logs/**/stdout.log")] == ["1"]
    rows = run.read_metrics()
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert rows[0].keys() == {"step", "tokens", "loss", "grad_norm", "lr", "tokens_per_second", "mfu", "seconds"}
    assert {"step", "eval_loss", "eval_bits_per_byte"} <= rows[-1].keys()
    assert load_config(run.config_file) == load_config(TINY, [w for w in trained.words[2:] if "=" in w])


def test_provenance(trained: Trained) -> None:
    start = trained.run.path / "starts" / "0000"
    record = json.loads((start / "provenance.json").read_text())
    assert record["command"].startswith("gramian train ")
    assert "--nproc 2" in record["command"]
    assert record["world_size"] == 2
    assert sum(record["hosts"].values()) == 2
    assert record["versions"]["torch"]
    assert {"time", "python", "git_commit", "git_dirty", "from_step", "device"} <= record.keys()
    assert re.fullmatch("[0-9a-f]{64}", record["tokenizer_hash"])
    assert re.fullmatch("[0-9a-f]{64}", record["data_hash"])
    assert (start / "config.yaml").read_bytes() == trained.run.config_file.read_bytes()
    assert (start / "code.diff").exists() == bool(record["git_dirty"])


@pytest.mark.parametrize("words", [["--nproc", "2"], []])
def test_finished_run_tells_the_ways_on(trained: Trained, words: list[str]) -> None:
    """It changes no file and does not wait for torch, whatever the number of processes."""
    before = {path: path.stat().st_mtime_ns for path in trained.folder.rglob("*")}
    keys = [word for word in trained.words if word not in ("--nproc", "2")]
    result = command(*keys, *words, PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    assert not re.search(r"\| +torch$", result.stderr, re.M)
    assert "is finished: 6 steps" in result.stdout
    assert trained.run.sample_file.read_text() in result.stdout
    assert "train.steps=12" in result.stdout
    assert "run.name=tiny-2" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in trained.folder.rglob("*")} == before


def test_a_missing_sample_and_outcome_are_made_up_for(trained: Trained) -> None:
    """For example when the first start was killed while it generated."""
    sample = trained.run.sample_file.read_text()
    trained.run.sample_file.unlink()
    trained.run.outcome_file.unlink()
    assert sample in command(*trained.words).stdout
    assert trained.run.sample_file.read_text() == sample
    assert json.loads(trained.run.outcome_file.read_text())["outcome"] == "done"


def test_torchrun_trains_the_same(trained: Trained, corpus: Path, tmp_path: Path) -> None:
    words = [TINY, f"data.corpus={corpus}", f"run.dir={tmp_path}", "train.steps=2", "checkpoint.async=false"]
    result = command("--nproc-per-node", "2", "-m", "launch.worker", *words, program="torchrun")
    assert result.returncode == 0, result.stderr
    ours = losses_and_norms(RunDirectory(tmp_path / "tiny"))
    theirs = losses_and_norms(trained.run)[:2]
    assert ours == theirs


def test_terminal_gets_a_live_line(trained: Trained, corpus: Path, tmp_path: Path) -> None:
    """One process under a pseudo-terminal; its losses are those of two processes."""
    main, side = pty.openpty()
    words = tiny(corpus, tmp_path, "train.steps=3", "--nproc", "1")
    variables = environment(TERM="xterm", COLUMNS="150")
    with subprocess.Popen([str(BIN / "gramian"), *words], env=variables, stdout=side, stderr=side) as process:
        os.close(side)
        shown = b""
        while True:
            try:
                piece = os.read(main, 4096)
            except OSError:  # how Linux says that the other end is closed
                break
            if not piece:
                break
            shown += piece
        assert process.wait(60) == 0
    os.close(main)
    text = shown.decode()
    assert re.search(r"step 3/3 .*loss .*tokens/s +MFU .*left", text)
    assert "\x1b[" in text
    assert "step      3/3" not in text  # the plain line
    pairs = zip(losses_and_norms(RunDirectory(tmp_path / "tiny")), losses_and_norms(trained.run)[:3], strict=True)
    assert all(relative_difference(a, b) < 1e-6 for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
