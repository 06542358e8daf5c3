from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gang import Gang
from tests.models.families.references import make_reference
from tests.runs import TINY, train_worker
from trainer.rundir import RunDirectory


@pytest.fixture(scope="package")
def run(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of the tiny config, sharded over two ranks, of four steps with a checkpoint each two."""
    folder = tmp_path_factory.mktemp("runs")
    keys = [f"data.corpus={corpus}", f"run.dir={folder}", "train.steps=4", "checkpoint.every=2", "eval.batches=0"]
    assert gang.run(train_worker, [TINY, *keys], world=2) == [0, 0]
    return RunDirectory(folder / "tiny")


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder that transformers wrote of a tiny model with random weights; see `references.CASES`."""
    folders: dict[str, Path] = {}

    def save(case: str) -> Path:
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp(case)
            make_reference(case).save_pretrained(folders[case])
        return folders[case]

    return save
