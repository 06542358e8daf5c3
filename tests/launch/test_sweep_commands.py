"""`gramian sweep`: runs that are killed and go on, shared prefixes, what is held out, failures, status, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.files import read_json_lines
from launch.cli import app
from launch.sweep_local import LocalExecutor
from launch.sweep_tasks import Result, SweepFolder, Task, plan_tasks
from scaling.design import design, trunks
from scaling.sweepfile import load_sweep
from tests.launch.commands import BIN, environment
from tests.launch.conftest import Ended
from tests.runs import exit_code_of
from tests.scaling.data import ROOT
from trainer.rundir import RunDirectory

pytestmark = pytest.mark.timeout(240)
TINY = ROOT / "configs" / "sweeps" / "tiny.yaml"
# Of a record, what another start may change.
TIMES = ("seconds", "flops_per_second", "time", "command")


def write(folder: Path, corpus: Path, name: str, **changes: Any) -> Path:
    """The project's smallest sweep with a corpus of the test's, and its runs in the folder."""
    tree = yaml.safe_load(TINY.read_text(encoding="utf-8"))
    tree |= {"name": name, "dir": str(folder), "base": str(ROOT / "configs" / "tiny.yaml"), **changes}
    tree["overrides"] = {**tree["overrides"], "data.corpus": str(corpus), **changes.get("overrides", {})}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def records(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """Without times, by cell; each was written once."""
    rows = read_json_lines(folder / name / "records.jsonl")
    assert len({row["cell"] for row in rows}) == len(rows)
    return {row["cell"]: {key: value for key, value in row.items() if key not in TIMES} for row in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweeps")


@pytest.fixture(scope="module")
def killed(folder: Path, corpus: Path) -> Path:
    """Killed with its workers in the middle, after the prediction; then run to its end."""
    file = write(folder, corpus, "killed")
    process = subprocess.Popen(
        [str(BIN / "gramian"), "sweep", "run", str(file)], env=environment(), stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while len(records(folder, "killed")) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert len(records(folder, "killed")) < 6
    assert sweep_run(file) == 0
    return file


@pytest.fixture(scope="module")
def whole(folder: Path, corpus: Path) -> Path:
    """The same sweep in one go, without shared prefixes: every run from its beginning."""
    file = write(folder, corpus, "whole", execution={"parallel": 2, "share_prefix": False})
    assert sweep_run(file) == 0
    return file


def sweep_run(file: Path) -> int:
    """`gramian sweep run` in this process, whose workers are processes; its exit code."""
    return exit_code_of(app, ["sweep", "run", str(file)], False)


def test_killed_and_restarted_ends_with_the_same_records(killed: Path, whole: Path, folder: Path) -> None:
    """And so do runs that branch off a trunk: the same bits of the loss as runs from the beginning."""
    ours, theirs = records(folder, "killed"), records(folder, "whole")
    assert len(ours) == 6
    assert ours == theirs
    assert {path.name.split("-")[0] for path in (folder / "killed" / "runs").iterdir()} == {
        "trunk",
        "w16",
        "w32",
        "w64",
    }
    assert not list((folder / "whole" / "runs").glob("trunk*"))


def test_a_trunk_saves_its_part_of_the_work(killed: Path, folder: Path) -> None:
    for trunk in trunks(design(load_sweep(killed))):
        for cell in trunk.cells:
            rows = RunDirectory(folder / "killed" / "runs" / cell.name).read_metrics()
            assert rows[0]["step"] == (cell.decay_start or 0) + 1


def test_the_prediction_is_older_than_what_it_predicts(killed: Path, folder: Path) -> None:
    said = json.loads((folder / "killed" / "prediction.json").read_text(encoding="utf-8"))
    held_out = {cell.id: cell.name for cell in design(load_sweep(killed)) if cell.held_out}
    assert said.keys() == held_out.keys()
    events = read_json_lines(folder / "killed" / "events.jsonl")
    starts = [event["time"] for event in events if event["event"] == "start" and event["run"] in held_out.values()]
    assert len(starts) >= 3
    for one in said.values():  # made once, though the sweep was killed after it and there were more records then
        assert one["records"] == 3
        assert "3 records, where the hoffmann form" in one["refused"]
        assert one["time"] <= min(starts)


def test_what_is_done_is_not_made_again(killed: Path, folder: Path, gramian: Callable[..., Ended]) -> None:
    before = (folder / "killed" / "records.jsonl").read_bytes()
    events = len(read_json_lines(folder / "killed" / "events.jsonl"))
    ended = gramian("sweep", "run", killed)
    assert (ended.code, ended.err) == (0, "")
    assert (folder / "killed" / "records.jsonl").read_bytes() == before
    assert len(read_json_lines(folder / "killed" / "events.jsonl")) == events


def test_a_new_value_runs_only_what_is_new(killed: Path, folder: Path, corpus: Path) -> None:
    """A longer budget goes on with the trunks, a shorter one that they have passed is run from the beginning."""
    file = write(folder, corpus, "killed", budgets={"flops": [4e9, 5e9, 1.5e10, 2e10]})
    sweep = load_sweep(file)
    cells, of = design(sweep), SweepFolder(sweep.folder)
    tasks = plan_tasks(of, cells, cells, share_prefix=True)
    assert {task.cell.budget for task in tasks if task.cell} == {repr(4e9), repr(2e10)}
    for task in tasks:
        resumed = any(word.startswith("checkpoint.resume=") for word in task.words)
        assert resumed == (task.cell is not None and task.cell.budget == repr(2e10))
    assert sum(task.cell is None for task in tasks) == 3
    write(folder, corpus, "killed")


def test_status_and_dry_run(killed: Path, folder: Path, corpus: Path, gramian: Callable[..., Ended]) -> None:
    told = json.loads(gramian("sweep", "status", killed, "--json", "-").out)["runs"]
    assert [row["state"] for row in told] == ["done"] * 6
    assert {row["loss"] for row in told} == {record["loss"] for record in records(folder, "killed").values()}
    assert "6 done" in gramian("sweep", "status", killed).out
    new = write(folder, corpus, "new", execution={"price_per_hour": 2.0, "flops_per_second": 1e9})
    ended = gramian("sweep", "run", new, "--dry-run", "--json", "-")
    table = json.loads(ended.out)
    assert len(table["runs"]) == 6
    assert table["hours"] == pytest.approx(table["flops"] / 1e9 / 3600)
    assert table["cost"] == pytest.approx(2 * table["hours"])
    assert table["flops"] < 0.9 * table["flops_unshared"]
    shown = gramian("sweep", "run", new, "--dry-run").out
    assert "6 of 6 runs left" in shown
    assert "held out" in shown
    assert not (folder / "new").exists()
    told = json.loads(gramian("sweep", "status", new, "--json", "-").out)["runs"]
    assert {row["state"] for row in told} == {"planned"}


def test_fit_of_a_sweep_and_its_report(killed: Path, folder: Path, gramian: Callable[..., Ended]) -> None:
    """Six runs are too few for a surface: it is refused, by itself with exit code 2, and the report says so."""
    found = json.loads(gramian("sweep", "fit", killed, "--bootstrap", "20", "--json", "-").out)["variants"]["all"]
    assert "6 records, where the hoffmann form" in found["refused"]["hoffmann"]
    ended = gramian("sweep", "fit", killed, "--approach", "3")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1)
    assert gramian("sweep", "report", killed, "--bootstrap", "20").code == 0
    page = (folder / "killed" / "report" / "report.html").read_text(encoding="utf-8")
    assert "The largest budget, predicted before it was run" in page


def test_a_failing_run_is_retried_and_told(folder: Path, corpus: Path, gramian: Callable[..., Ended]) -> None:
    """A size whose run cannot be written; the other is made, and the exit code says that not all is well."""
    sizes = {"widths": [16, 32], "layers": 2, "head_dim": 16}
    file = write(folder, corpus, "failing", sizes=sizes, budgets={"tokens": [2e4]}, hold_out_largest=False)
    (blocked, _) = design(load_sweep(file))
    place = folder / "failing" / "runs" / blocked.name
    place.parent.mkdir(parents=True)
    place.write_text("a file where the run's folder should be", encoding="utf-8")
    ended = gramian("sweep", "run", file)
    assert ended.code == 1
    assert len(ended.err.splitlines()) == 1
    assert f"1 of 2 runs failed; {blocked.name}: " in ended.err
    assert "the same command tries them again" in ended.err
    assert len(records(folder, "failing")) == 1
    rows = {row["run"]: row for row in json.loads(gramian("sweep", "status", file, "--json", "-").out)["runs"]}
    assert rows[blocked.name]["state"] == "failed"
    assert rows[blocked.name]["reason"] in ended.err
    place.unlink()
    assert gramian("sweep", "run", file).code == 0
    assert len(records(folder, "failing")) == 2


def test_diverged_runs_are_told_and_not_tried_again(folder: Path, corpus: Path, gramian: Callable[..., Ended]) -> None:
    changes = {"optim.lr": 1e30, "train.max_skipped_steps": 2}
    one = {"sizes": {"widths": [16], "layers": 2, "head_dim": 16}, "budgets": {"tokens": [4e4]}}
    file = write(folder, corpus, "diverging", overrides=changes, hold_out_largest=False, **one)
    assert gramian("sweep", "run", file).code == 0
    assert [record["loss"] for record in records(folder, "diverging").values()] == [None]
    events = read_json_lines(folder / "diverging" / "events.jsonl")
    assert [event["event"] for event in events] == ["start"]
    ended = gramian("sweep", "fit", file)
    assert ended.code == 2
    assert "all 1 runs diverged; lower the learning rate" in ended.err


def test_a_worker_that_is_killed_is_replaced(folder: Path, corpus: Path) -> None:
    """Its run goes on in another process; without a retry it is told as failed, and what follows it too."""
    file = write(folder, corpus, "one-killed", hold_out_largest=False)
    sweep = load_sweep(file)
    cells, of = design(sweep), SweepFolder(sweep.folder)
    for retries in (0, 1):
        results: list[Result] = []
        executor = LocalExecutor(of, 1, 1, retries)
        kill_at_first_start(executor)
        chain = [task for task in plan_tasks(of, cells, cells, True) if "w32" in task.key]
        executor.run(chain[: 4 - 3 * retries], results.append)
        if retries:
            assert [(result.task.key, result.code) for result in results] == [(chain[0].key, 0)]
        else:
            assert results[0].code == -signal.SIGKILL
            assert "ended by SIGKILL" in results[0].reason
            followers = {result.task.key for result in results if "branches off, failed" in result.reason}
            assert followers == {task.key for task in chain[1:]}


def test_a_worker_that_stops_by_itself_is_told_to_go_on(tmp_path: Path) -> None:
    """As at the end of `train.max_hours`: exit code 75, without a signal to the sweep. After the retries it failed, and
    what follows it is not waited for."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "for line in sys.stdin:\n"
        "    left = pathlib.Path(json.loads(line)['config'])\n"
        "    times = int(left.read_text())\n"
        "    left.write_text(str(times - 1))\n"
        "    print(json.dumps({'code': 75 if times > 0 else 0}), flush=True)\n"
        "    if times > 0:\n"
        "        sys.exit(75)\n",
        encoding="utf-8",
    )
    folder = SweepFolder(tmp_path / "sweep")
    for stops, codes in ((1, {"first": 0, "second": 0}), (2, {"first": 75, "second": 1})):
        base, results = tmp_path / "stops", list[Result]()
        base.write_text(str(stops), encoding="utf-8")
        executor = LocalExecutor(folder, 2, 1, retries=1)
        executor.words = (str(script),)
        first = Task("first", base, (), folder.run_of("first"), 1.0)
        second = Task("second", base, (), folder.run_of("second"), 2.0, after="first")
        executor.run([second, first], results.append)
        assert {result.task.key: result.code for result in results} == codes


def kill_at_first_start(executor: LocalExecutor) -> None:
    """End the first worker as it starts."""
    start, killed = executor._start, []

    def and_kill(*arguments: Any) -> Any:
        worker = start(*arguments)
        if not killed:
            killed.append(worker)
            os.kill(worker.process.pid, signal.SIGKILL)
        return worker

    executor._start = and_kill  # type: ignore[method-assign]


def test_a_signal_saves_what_was_begun(folder: Path, corpus: Path, gramian: Callable[..., Ended]) -> None:
    file = write(
        folder,
        corpus,
        "stopped",
        budgets={"tokens": [3e6]},
        sizes={"widths": [64], "layers": 2, "head_dim": 16},
        hold_out_largest=False,
    )
    process = subprocess.Popen(
        [str(BIN / "gramian"), "sweep", "run", str(file)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    (cell,) = design(load_sweep(file))
    run = RunDirectory(folder / "stopped" / "runs" / cell.name)
    deadline = time.monotonic() + 90
    while not run.read_metrics():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    busy = gramian("sweep", "run", file)
    assert busy.code == 2
    assert "is in use by another `gramian sweep run`" in busy.err
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "stopped by SIGTERM; what was begun is saved, and the same command goes on" in errors
    assert run.committed()
    told = json.loads(gramian("sweep", "status", file, "--json", "-").out)["runs"]
    assert [row["state"] for row in told] == ["planned"]
    assert 0 < told[0]["step"] < told[0]["steps"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["fit"], ["give a sweep's file, or records of others with --from FILE"]),
        (["fit", str(TINY), "--from", "x.csv"], ["one of the two"]),
        (["fit", "--from", "none.csv"], ["none.csv: no such file"]),
        (["fit", "--from", "{csv}", "--column", "params"], ["--column params: give it as OURS=THEIRS"]),
        (["fit", "--from", "{csv}", "--approach", "4"], ["--approach 4: choose 1, 2, 3, kaplan or all"]),
        (["fit", "--from", "{csv}", "--budgets", "1e18,x"], ["--budgets: 'x' is no number of FLOPs"]),
        (["fit", "--from", "{csv}", "--count-flops", "6nd"], ["N and C are what the columns hold"]),
        (["fit", "--from", "{csv}", "--approach", "2"], ["budget of 1.20e+14 FLOPs has 2 sizes"]),
        (["fit", "--from", "{csv}", "--approach", "3"], ["2 records, where the hoffmann form"]),
        (["fit", str(TINY), "--count-params", "some"], ["--count-params some: choose active, total"]),
        (["predict", "--from", "{csv}", "--flops", "-1"], ["--flops -1: give a compute budget above 0"]),
        (["predict", "--from", "{csv}", "--flops", "1e20", "--variant", "a"], ["--variant a"]),
        (["predict", "--from", "{csv}", "--flops", "1e20", "--out", "c.yaml"], ["--out needs a sweep"]),
        (["report", "--from", "{csv}"], ["say with --out DIR where the report goes"]),
        (["run", "none.yaml"], ["none.yaml"]),
        (["status", "none.yaml"], ["none.yaml"]),
    ],
)
def test_wrong_words(
    words: list[str], parts: list[str], tmp_path: Path, gramian: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    csv = tmp_path / "few.csv"
    csv.write_text("params,tokens,loss\n1e6,2e7,3.1\n2e6,1e7,3.2\n", encoding="utf-8")
    ended = gramian("sweep", *(word.format(csv=csv) if word == "{csv}" else word for word in words))
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1, ended.err
    for part in parts:
        assert part in ended.err
