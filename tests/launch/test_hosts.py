"""Two hosts with a link between them train together, also when it was cut for a while."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gang import Gang
from tests.killing import KEYS, Launched, assert_ended_alike
from tests.launch.hosts import missing, two_hosts
from tests.launch.needs import skip_or_fail
from tests.runs import TINY, train_worker
from trainer.rundir import RunDirectory

HANG = 4.0  # seconds


@pytest.fixture(scope="module")
def unbroken(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("unbroken")
    words = [TINY, f"data.corpus={corpus}", f"run.dir={folder}", "parallel.dp_replicate=2", *KEYS]
    assert gang.run(train_worker, words, world=2) == [0, 0]
    return RunDirectory(folder / "tiny")


@pytest.fixture(scope="module")
def pair(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Launched]]:
    """A run whose link is cut for longer than the time-out: both hosts end, and are started again with the link up."""
    if (reason := missing()) is not None:
        skip_or_fail(f"no network namespaces here: {reason}")
    folder = tmp_path_factory.mktemp("hosts")
    keys = (f"train.hang_minutes={HANG / 60}", "launch.max_restarts=0")
    with two_hosts() as hosts:
        options = ("--nproc", "1", "--nnodes", "2", "--rdzv", "10.99.0.1:29400")
        pair = [
            Launched(
                *(corpus, folder, "pair", *keys),
                by=("gramian", "train", *options, "--node-rank", str(rank)),
                before=hosts.words(rank),
                output=f"pair-{rank}",
            )
            for rank in (0, 1)
        ]
        try:
            for launched in pair:
                launched.start()
            assert pair[0].until(pair[0].committed), pair[0].output
            hosts.link("down")
            ends = [launched.process.wait(90) for launched in pair]
            assert ends == [70, 70], "\n".join(launched.output for launched in pair)
            hosts.link("up")
            for launched in pair:
                launched.start()
            assert [launched.process.wait(90) for launched in pair] == [0, 0], pair[0].output + pair[1].output
            yield pair
        finally:
            for launched in pair:
                launched.end()


def test_both_hosts_name_the_other(pair: list[Launched]) -> None:
    """gloo's own errors name nobody."""
    first, second = (launched.output for launched in pair)
    assert "gramian: no progress: rank 1 on b gave no sign of life for " in first
    assert "gramian: no progress: rank 0, or who else keeps the ranks' store at 10.99.0.1, does not answer" in second


def test_the_restart_ends_with_the_bits_of_a_run_that_nothing_happened_to(
    pair: list[Launched], unbroken: RunDirectory
) -> None:
    assert_ended_alike(pair[0].run, unbroken)
    starts = pair[0].events("start")
    assert [start["hosts"] for start in starts] == [{"a": 1, "b": 1}] * 2
    assert starts[1]["step"] > 0
