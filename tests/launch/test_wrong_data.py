"""Dataset folders and mixtures that are refused before anything is started, and a run of stages that is finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from data.tokenizers.sentencepieces import SentencePieceTokenizer
from data.tokenizers.training import train_sentencepiece
from tests.datasets import make_dataset, random_texts
from tests.launch.commands import assert_refused, command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset folders: two good ones, one of another tokenizer, one with nothing held out, one with little text."""
    folder = tmp_path_factory.mktemp("data")
    for i, name in enumerate(("one", "two")):
        make_dataset(folder / name, random_texts(i, 40), held_out=0.2)
    texts = random_texts(5, 300)
    other = SentencePieceTokenizer(train_sentencepiece(texts, 300))
    make_dataset(folder / "other", texts, held_out=0.2, tokenizer=other)
    make_dataset(folder / "all", random_texts(2, 10))
    make_dataset(folder / "little", ["abc"])
    return folder


def words(folder: Path, tmp_path: Path, **sections: Any) -> list[str]:
    """`gramian train` of a small model with these sections, their paths relative to the folder of datasets."""
    config = {
        "run": {"dir": str(tmp_path / "runs")},
        "model": {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_seq_len": 16},
        "train": {"global_batch_size": 4, "micro_batch_size": 2},
        "eval": {"batches": 1},
        **sections,
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config).replace("DIR/", f"{folder}/"), encoding="utf-8")
    return ["train", str(path)]


def mixture(*sources: tuple[str, float]) -> dict[str, Any]:
    return {"mixture": [{"path": f"DIR/{name}", "weight": weight} for name, weight in sources], "seq_len": 16}


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ({"path": "DIR/none"}, ["none: no such dataset folder", "gramian tokenize"]),
        ({"path": "DIR/one", "corpus": "DIR/one"}, ["'corpus' does nothing beside 'path'", "remove it"]),
        (mixture(("one", 1), ("two", 0)), ["the weight of", "two must be above 0"]),
        (mixture(("one", 1), ("other", 1)), ["other was made with another tokenizer than", "one; make one"]),
        (mixture(("one", 1), ("little", 1)), ["data.seq_len: a row of 16 tokens", "little/train"]),
        ({"path": "DIR/all", "seq_len": 16}, ["all: no held-out documents", "set eval.batches=0"]),
    ],
)
def test_wrong_sources(folder: Path, tmp_path: Path, data: dict[str, Any], parts: list[str]) -> None:
    assert_refused(command(*words(folder, tmp_path, data=data), "data.seq_len=16", "--nproc", "2"), *parts)
    assert not (tmp_path / "runs").exists()


def test_a_model_with_fewer_ids_than_the_folder(folder: Path, tmp_path: Path) -> None:
    data = {"path": "DIR/one", "seq_len": 16}
    refused = command(*words(folder, tmp_path, data=data), "model.vocab_size=256")
    assert_refused(refused, "model.vocab_size is 256, but the tokenizer has 257 tokens")


def test_sources_of_a_later_stage_are_looked_at_first(folder: Path, tmp_path: Path) -> None:
    stages = [{"tokens": 64}, {"tokens": 64, "data": {"path": "DIR/other"}}]
    refused = command(*words(folder, tmp_path, data={"path": "DIR/one", "seq_len": 16}, stages=stages))
    assert_refused(refused, "other was made with another tokenizer")
    stages[1]["data"] = {"seq_len": 32}
    refused = command(*words(folder, tmp_path, data={"path": "DIR/one", "seq_len": 16}, stages=stages))
    assert_refused(refused, "config.yaml: stages.1: 'data.seq_len' (32) is longer than 'model.max_seq_len' (16)")


def test_a_run_of_stages_tells_what_it_reads_and_how_to_go_on(folder: Path, tmp_path: Path) -> None:
    packed = {**mixture(("one", 3), ("two", 1)), "packing": "best_fit", "document_mask": True}
    stages = [{"tokens": 128}, {"tokens": 64, "data": packed}]
    start = words(folder, tmp_path, data={"path": "DIR/one", "seq_len": 16}, stages=stages)
    plan = command(*start, "--dry-run")
    assert plan.returncode == 0, plan.stderr
    assert "work   128 positions in 2 steps" in plan.stdout
    assert "work   64 positions in 1 steps" in plan.stdout
    first = command(*start)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert sum(line.startswith("data   ") for line in lines) == 2
    (one,) = (line for line in lines if "75.00% of the samples from" in line)
    assert "sequences an epoch, " in one
    assert "sampled " in one
    assert any("best_fit: " in line and "padding, " in line and "documents cut" in line for line in lines)
    again = command(*start)
    assert again.returncode == 0, again.stderr
    assert "is finished: 3 steps are done" in again.stdout
    assert f"with another stage:   under a new name, and checkpoint.resume={tmp_path}/runs/run" in again.stdout
