"""How a start ends when a worker fails or someone stops it: told once, and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults import patched_when_imported
from tests.gang import _free_port
from tests.launch.commands import BIN, assert_refused, command, environment, tiny
from tests.runs import TINY
from trainer.rundir import RunDirectory
from trainer.stop import STARTED

# Rank 1 fails inside the loop, where rank 0 waits for it.
_RANK_1_FAILS = """
import os

def patch(loop):
    def step(*_):
        if os.environ["FAULT"] == "user error":
            from common.errors import UserError
            raise UserError("'data.corpus': only this rank sees it; mend it")
        raise RuntimeError("boom")
    if os.environ.get("RANK") == "1":
        loop.train_step = step
"""


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("fault", ["user error", "fault"])
def test_what_one_rank_alone_sees_is_told_once(corpus: Path, tmp_path: Path, fault: str) -> None:
    """The other rank's error, that its peer is gone, is a consequence and is not shown."""
    patched_when_imported(tmp_path, "trainer.loop", _RANK_1_FAILS)
    words = tiny(corpus, tmp_path / "runs", "--nproc", "2")
    result = command(*words, PYTHONPATH=str(tmp_path), FAULT=fault)
    outcome = json.loads((tmp_path / "runs" / "tiny" / "outcome.json").read_text())
    expected = (
        ("bad_input", 2, "'data.corpus': only this rank")
        if fault == "user error"
        else ("fault", 1, "RuntimeError: boom")
    )
    assert (outcome["outcome"], outcome["exit_code"], outcome["reason"][: len(expected[2])]) == expected
    if fault == "user error":
        assert_refused(result, "gramian [rank 1]: 'data.corpus': only this rank sees it; mend it")
        return
    assert result.returncode == 1
    *trace, last = result.stderr.splitlines()
    assert trace[-1] == "RuntimeError: boom"
    assert result.stderr.count("Traceback") == 1
    assert last.startswith("gramian: rank 1 failed with this error; its output is in ")
    assert (Path(last.rpartition(" ")[2]) / "stderr.log").exists()


@dataclass(frozen=True)
class _Failure:
    """What torch elastic tells of a worker that ended."""

    exitcode: int


@pytest.mark.parametrize(
    ("exits", "reports", "expected"),
    [
        # A worker that a signal ended leaves no report; the others report that it is gone.
        ({0: 1, 1: -signal.SIGKILL}, {0: (1, "lost peer\n")}, (1, "gramian: rank 1 was ended by SIGKILL, perhaps")),
        # A worker that reports and is then ended by its own libraries, which cannot take down what waits for peers.
        ({0: -signal.SIGABRT}, {0: (1, "boom\n")}, (1, "boom\ngramian: rank 0 failed with this error")),
        # The rest of the gang is ended by SIGTERM, and that is no cause.
        ({0: -signal.SIGTERM, 1: 1}, {1: (1, "boom\n")}, (1, "boom\ngramian: rank 1 failed with this error")),
        # The earlier report is the cause, unless there is bad input.
        ({0: 1, 1: 1}, {1: (1, "boom\n"), 0: (1, "lost peer\n")}, (1, "boom\ngramian: rank 1")),
        ({0: 1, 1: 2}, {0: (1, "lost peer\n"), 1: (2, "gramian [rank 1]: bad")}, (2, "gramian [rank 1]: bad")),
        # They were told to stop, and one of them was slower to go.
        ({0: 75, 1: -signal.SIGKILL}, {0: (75, "gramian: stopped")}, (75, "gramian: stopped")),
        # A rank that hangs is ended by the launcher; the one that names it tells.
        ({0: 70, 1: -signal.SIGKILL}, {0: (70, "gramian: no progress")}, (70, "gramian: no progress")),
        # Workers that ended before they could report, as an interpreter does that does not find a module.
        ({1: 1}, {}, (1, "gramian: rank 1 failed with exit code 1")),
    ],
)
def test_which_failure_is_told(
    tmp_path: Path, exits: dict[int, int], reports: dict[int, tuple[int, str]], expected: tuple[int, str]
) -> None:
    from launch.local import _judge

    for moment, (rank, (code, message)) in enumerate(reports.items()):
        file = tmp_path / "run" / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"message": message, "exit_code": code}))
        os.utime(file, ns=(moment, moment))
    ended = _judge(tmp_path, 0, {rank: _Failure(code) for rank, code in exits.items()}, None)  # type: ignore[misc]
    assert ended.exit_code == expected[0]
    assert ended.message.startswith(expected[1])
    # Without a run nobody knows of steps made: only what died or hung may do better.
    assert ended.retry == (ended.exit_code == 70 or "ended by SIGKILL" in ended.message)


def test_what_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error after the first step of an attempt, but not a run that gave up."""
    from launch.local import _judge

    monkeypatch.setenv(STARTED, "0")
    run = RunDirectory(tmp_path / "run")

    def retry(attempt: int, whole: bool) -> bool:
        file = tmp_path / "logs" / f"attempt_{attempt}" / "0" / "error.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"message": "boom\n", "exit_code": 1, "whole": whole}))
        return _judge(tmp_path / "logs", attempt, {0: _Failure(1)}, run).retry  # type: ignore[dict-item]

    assert not retry(0, whole=False)
    run.events.record("running", attempt=0, step=1)
    assert retry(0, whole=False)
    assert not retry(0, whole=True)
    assert not retry(1, whole=False)


def _children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c(corpus: Path, tmp_path: Path, processes: int) -> None:
    """One line and the exit code of what is to go on, no worker left; the steps that were made are saved."""
    words = tiny(corpus, tmp_path, "--nproc", str(processes), "train.steps=100000", "checkpoint.every=2")
    words += ["eval.batches=0", "log.every=1000"]
    # A shell's background jobs ignore the signal, and what they start would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [str(BIN / "gramian"), *words], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("tiny/checkpoints/*/COMMIT")) and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = _children(process.pid) if processes > 1 else []
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 75
    step = max(RunDirectory(tmp_path / "tiny").committed())
    assert error == f"gramian: interrupted: saved at step {step}; the same command goes on\n"
    assert json.loads((tmp_path / "tiny" / "outcome.json").read_text())["outcome"] == "requeue"
    assert len(workers) >= processes - 1
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(tmp_path.glob("tiny/checkpoints/*/COMMIT"))


@pytest.mark.parametrize("words", [["-m", "launch.worker", TINY], ["-m", "gramian", "certify", TINY, "--steps", "1"]])
def test_a_worker_ends_without_taking_the_interpreter_apart(corpus: Path, tmp_path: Path, words: list[str]) -> None:
    """Threads of torch's that outlive the process group would abort it now and then, when all is done."""
    (tmp_path / "sitecustomize.py").write_text("import atexit; atexit.register(print, 'taken apart')")
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    keys = [f"data.corpus={corpus}", f"run.dir={tmp_path}", "train.steps=1", "eval.batches=0"]
    result = command(*words, *keys, program="python", PYTHONPATH=str(tmp_path), **variables)
    assert result.returncode == 0, result.stderr
    assert "step " in result.stdout
    assert "taken apart" not in result.stdout
    refused = command(*words, "modle.x=1", program="python", PYTHONPATH=str(tmp_path), **variables)
    assert_refused(refused, "did you mean 'model'?")
    assert "taken apart" not in refused.stdout
