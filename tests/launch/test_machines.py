"""Launchers of several machines, here all on one: they train together, and end and begin anew together."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UserError
from common.nodes import Nodes, parse_nodes
from tests.gang import Gang, _free_port
from tests.killing import KEYS, STEPS, Launched, assert_ended_alike
from tests.launch.commands import assert_refused, command, tiny
from tests.runs import TINY, train_worker
from trainer.config import load_config
from trainer.layout import plan_layout
from trainer.outcome import read_outcome
from trainer.rundir import RunDirectory

HSDP = "parallel.dp_replicate=2"


def machines(corpus: Path, folder: Path, name: str, *more: str) -> list[Launched]:
    """Two launchers of one process each, that have a run's folder together."""
    options = ("--nproc", "1", "--nnodes", "2", "--rdzv", f"127.0.0.1:{_free_port()}")
    by = [("gramian", "train", *options, "--node-rank", str(rank)) for rank in (0, 1)]
    return [Launched(corpus, folder, name, *more, by=words, output=f"{name}-{rank}") for rank, words in enumerate(by)]


@pytest.fixture(scope="module")
def unbroken(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("unbroken")
    words = [TINY, f"data.corpus={corpus}", f"run.dir={folder}", HSDP, *KEYS]
    assert gang.run(train_worker, words, world=2) == [0, 0]
    return RunDirectory(folder / "tiny")


@pytest.fixture(scope="module")
def pair(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Launched]]:
    """A run of two machines: the second's worker is killed, the first is told to stop, both are started anew."""
    pair = machines(corpus, tmp_path_factory.mktemp("machines"), "pair")
    first, second = (launched.start() for launched in pair)
    try:
        saved(first, 0)
        (worker,) = second.workers().values()
        os.kill(worker, signal.SIGKILL)
        first.until(lambda: any(event["attempt"] == 1 for event in first.events("running")))
        first.process.send_signal(signal.SIGTERM)
        assert [launched.process.wait(60) for launched in pair] == [75, 75], first.output + second.output
        outcome = read_outcome(first.run)
        assert outcome is not None
        assert outcome["outcome"] == "requeue"
        for launched in pair:
            launched.start()
        assert [launched.process.wait(90) for launched in pair] == [0, 0], first.output + second.output
        yield pair
    finally:
        for launched in pair:
            launched.end()


def saved(launched: Launched, before: int) -> None:
    assert launched.until(lambda: launched.committed() > before), launched.output


def test_the_bits_are_those_of_a_run_that_nothing_happened_to(pair: list[Launched], unbroken: RunDirectory) -> None:
    assert_ended_alike(pair[0].run, unbroken)
    assert max(pair[0].run.committed()) == STEPS


def test_what_happened_is_told_on_every_machine(pair: list[Launched]) -> None:
    first, second = pair
    host = socket.gethostname()
    assert "gramian: rank 1 was ended by SIGKILL, perhaps because memory ran out" in second.output
    assert f"gramian: machine 1 ({host}): rank 1 was ended by SIGKILL" in first.output
    for launched in pair:
        assert "gramian: restart 1 of 3, from step " in launched.output
        assert "stopped by SIGTERM to rank 0: saved at step " in launched.output
    (restart,), starts = first.events("restart"), first.events("start")
    assert (restart["attempt"], restart["rank"], restart["how"], restart["host"]) == (1, 1, "SIGKILL", host)
    assert [event["attempt"] for event in starts] == [0, 1, 0]


@pytest.mark.verify
def test_a_launcher_that_comes_back(corpus: Path, tmp_path: Path, unbroken: RunDirectory) -> None:
    """Alone, after it was killed: the other one begins anew with it, and it meets the attempt of the other."""
    pair = machines(corpus, tmp_path, "pair")
    first, second = (launched.start() for launched in pair)
    try:
        saved(first, 0)
        second.process.kill()
        second.process.wait()
        second.start()
        assert [launched.process.wait(90) for launched in pair] == [0, 0], first.output + second.output
        assert [event["attempt"] for event in first.events("start")] == [0, 1]
        assert_ended_alike(first.run, unbroken)
    finally:
        for launched in pair:
            launched.end()


def test_the_layout_follows_the_machines_and_says_so(pair: list[Launched]) -> None:
    assert "fsdp: 2 ranks = dp_replicate 2 x dp_shard 1\n       one replica on each machine; " in pair[0].output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (2, 4, True)),
        (["parallel.dp_replicate=1"], (1, 8, False)),
        (["parallel.dp_shard=8"], (1, 8, False)),
        (["parallel.engine=ddp"], (8, 1, False)),
        (["parallel.tp=2"], (2, 2, True)),
        (["parallel.ep=4", "model.moe={n_experts: 8}"], (2, 4, True)),
        (["parallel.ep=8", "model.moe={n_experts: 8}"], (1, 8, False)),  # the experts go round all
        (["parallel.tp=8", "parallel.tp_across_nodes=true", "model.n_heads=8", "model.n_kv_heads=8"], (1, 1, False)),
    ],
)
def test_replicas_follow_machines_where_nothing_else_is_said(words: list[str], expected: tuple[int, int, bool]) -> None:
    config = load_config(TINY, [*words, "train.micro_batch_size=4"])
    layout = plan_layout(config, 8, 4)
    assert (layout.dp_replicate, layout.dp_shard, layout.by_machine) == expected
    assert ("one replica on each machine" in layout.describe()) == expected[2]
    alone = plan_layout(config, 8)  # nobody tells of machines
    assert not alone.by_machine


def test_a_dry_run_is_that_of_all_machines() -> None:
    result = command("train", TINY, "--dry-run", "--nproc", "2", "--nnodes", "2")
    assert "4 ranks = dp_replicate 2 x dp_shard 2\n       one replica on each machine" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, None, None), "--nnodes 2 needs --node-rank, 0 to 1, another on every machine, and --rdzv HOST:PORT"),
        ((1, None, "a:1"), "--node-rank and --rdzv are for several machines; add --nnodes"),
        ((2, 2, "a:1"), "--node-rank is 2 but --nnodes 2: machines are numbered 0 to 1"),
        ((2, 0, "a"), "must be HOST:PORT"),
        ((2, 0, "a:70000"), "must be HOST:PORT"),
        ((2, 0, "fd00::1:29400"), "put an IPv6 address in brackets"),
    ],
)
def test_wrong_addresses(arguments: tuple[int, int | None, str | None], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_nodes(*arguments)
    assert message in str(caught.value)


def test_addresses() -> None:
    assert parse_nodes(1, None, None) == Nodes()
    assert parse_nodes(2, 1, "[fd00::1]:29400") == Nodes(2, 1, "fd00::1", 29400)


@pytest.mark.usefixtures("trained")
def test_a_port_that_is_taken(corpus: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::", 0))
        holder.listen()
        port = holder.getsockname()[1]
        words = tiny(corpus, tmp_path, "--nproc", "1", "--nnodes", "2", "--node-rank", "0")
        taken = command(*words, "--rdzv", f"127.0.0.1:{port}")
    assert_refused(taken, f"--rdzv: cannot listen on port {port}: it is taken", "choose another port")


def meet(monkeypatch: pytest.MonkeyPatch, *nodes: tuple[Nodes, int]) -> list[BaseException | None]:
    """What comes of machines with so many processes each that meet; each is a thread."""
    from launch import meeting

    monkeypatch.setattr(meeting, "JOIN_SECONDS", 1.5)
    ends: list[BaseException | None] = [None] * len(nodes)
    there = [meeting.Meeting(each, nproc, lambda: False) for each, nproc in nodes]

    def join(place: int) -> None:
        try:
            there[place].next_rendezvous()
        except BaseException as error:
            ends[place] = error

    threads = [threading.Thread(target=join, args=(place,)) for place in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ends


def test_machines_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _free_port()
    ends = meet(monkeypatch, (Nodes(2, 0, "127.0.0.1", port), 2), (Nodes(2, 1, "127.0.0.1", port), 1))
    assert all("start all with the same" in str(end) for end in ends)


def test_machines_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    (alone,) = meet(monkeypatch, (Nodes(2, 0, "127.0.0.1", _free_port()), 1))
    assert "--rdzv: machines [1] have not come for 2 s; start the same command on all 2 machines" in str(alone)
    (alone,) = meet(monkeypatch, (Nodes(2, 1, "127.0.0.1", port := _free_port()), 1))
    assert f"nothing answers at 127.0.0.1:{port} for 2 s" in str(alone)
    assert time.monotonic() - begin < 30
    (lost,) = meet(monkeypatch, (Nodes(2, 1, "no-such-host.invalid", 29400), 1))
    assert "the name no-such-host.invalid does not resolve here; give the first machine's address" in str(lost)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_verdicts_are_exchanged(address: str) -> None:
    """And the cause is the one of which the others are consequences, on whichever machine; also over IPv6."""
    from launch import elastic, meeting

    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {address}")
    port = _free_port()
    ends: dict[int, elastic.Ended] = {}

    def run(rank: int, mine: elastic.Ended) -> None:
        agent = object.__new__(elastic.Agent)
        agent._meeting = meeting.Meeting(Nodes(2, rank, address, port), 1, lambda: False)
        agent._meeting.next_rendezvous()
        ends[rank] = agent._agreed_on(mine)

    lost = elastic.Ended(0, "exit code 1", "lost peer", 1, True, 1.0)
    bad = elastic.Ended(1, "exit code 2", "mend it", 2, False, 2.0)
    threads = [threading.Thread(target=run, args=arguments) for arguments in ((0, lost), (1, bad))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ends[0] == ends[1] == bad._replace(node=1, host=socket.gethostname())


def test_shared_folders_are_checked(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """Ranks whose run.dir is another folder, as on machines without a shared file system."""
    ends = gang.run(_train_apart, str(corpus), str(tmp_path), world=2)
    assert [code for code, _ in ends] == [2, 2]
    for _, outcome in ends:
        assert outcome is None or "is not the same folder on" in json.loads(outcome)["reason"]
    assert ends[0][1] is not None


def _train_apart(corpus: str, folder: str) -> tuple[int, str | None]:
    place = Path(folder, os.environ["RANK"])
    code = train_worker([TINY, f"data.corpus={corpus}", f"run.dir={place}"])
    file = place / "tiny" / "outcome.json"
    return code, file.read_text() if file.exists() else None
