from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from common.files import hash_file
from data import prepare as module
from data.config import DataConfig, TokenizerConfig
from data.corpus import Corpus
from data.manifest import FORMAT, listed_files, write_manifest
from data.prepare import PreparedData, prepare
from data.split import Split


def in_cache(config: DataConfig, cache: Path, **changes: Any) -> DataConfig:
    return DataConfig.model_validate({**config.model_dump(), "cache_dir": str(cache), **changes})


def make_nothing(folder: Path, *_: Any) -> None:
    """In place of the work: an empty dataset."""
    none = {"documents": 0, "tokens": 0, "bytes": 0, "shards": []}
    tokenizer = {"file": "tokenizer.model", "bytes": 0, "blocks": []}
    content = {"format": FORMAT, "dtype": "uint16", "tokenizer": tokenizer, "splits": {"train": none, "eval": none}}
    (folder / "tokenizer.model").touch()
    write_manifest(folder, content)


def test_token_files_decode_to_the_corpus(prepared: PreparedData, config: DataConfig) -> None:
    tokenizer = prepared.tokenizer()
    documents = list(Corpus(config).documents())
    expected = list(Split.plan(documents, config.eval_fraction).apply(documents))
    for name, tokens, held_out in (("train", prepared.train, False), ("eval", prepared.eval, True)):
        texts = [text for held, text in expected if held == held_out]
        read = [tokens.document(i) for i in range(tokens.n_documents)]
        assert texts
        assert [tokenizer.decode(ids[:-1]) for ids in read] == texts
        assert all(ids[-1] == tokenizer.eos_id for ids in read)
        n_bytes = sum(len(text.encode()) for text in texts)
        counts = {"documents": len(texts), "tokens": tokens.n_tokens, "bytes": n_bytes}
        assert counts.items() <= prepared.manifest["splits"][name].items()
        assert tokenizer.token_bytes[tokens.slice(0, tokens.n_tokens)].sum() == n_bytes


def test_manifest(prepared: PreparedData, config: DataConfig) -> None:
    manifest = json.loads((prepared.folder / "manifest.json").read_text())
    assert {**prepared.manifest, "hash": manifest["hash"]} == manifest
    assert (manifest["dtype"], manifest["vocab_size"], manifest["eos_id"]) == ("uint16", 600, 1)
    assert prepared.train.dtype == np.uint16
    assert prepared.vocab_size == prepared.tokenizer().vocab_size == 600
    assert prepared.tokenizer_hash == prepared.tokenizer().hash == hash_file(prepared.tokenizer_path)
    assert manifest["job"]["corpus_fingerprint"] == Corpus(config).fingerprint()
    assert set(listed_files(manifest)) == {path.name for path in prepared.folder.iterdir()} - {"manifest.json"}
    for name, entry in listed_files(manifest).items():
        path = prepared.folder / name
        assert entry == {"bytes": path.stat().st_size, "blocks": [hash_file(path)]}


def test_caches_are_identical(prepared: PreparedData, config: DataConfig, tmp_path: Path) -> None:
    other = prepare(in_cache(config, tmp_path))
    assert other.folder == tmp_path / prepared.folder.name
    assert other.data_hash == prepared.data_hash
    for path in prepared.folder.iterdir():
        assert hash_file(other.folder / path.name) == hash_file(path)


def test_a_second_call_does_no_work(
    prepared: PreparedData, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("work was done again")

    for name in ("train_sentencepiece", "write_dataset", "locked"):
        monkeypatch.setattr(module, name, forbidden)
    monkeypatch.setattr(Corpus, "documents", forbidden)
    assert prepare(config).folder == prepared.folder


def test_what_decides_the_tokens_decides_the_folder(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_make", make_nothing)
    base: dict[str, Any] = {"corpus": str(corpus / "heapq.txt"), "cache_dir": str(tmp_path)}

    def folder(**changes: Any) -> str:
        return prepare(DataConfig.model_validate({**base, **changes})).folder.name

    same = [folder(), folder(seq_len=8), folder(packing="pad"), folder(dtype="uint16")]
    assert len(set(same)) == 1
    others = [
        folder(corpus=str(corpus / "copy.txt")),
        folder(tokenizer={"vocab_size": 500}),
        folder(dtype="int32"),
        folder(eval_fraction=0.1),
        folder(text_field="body"),
    ]
    assert len({*same, *others}) == 6


def _prepare(config: DataConfig, start: Any, results: Any) -> None:
    work: list[str] = []
    make = module._make
    module._make = lambda *arguments: (work.append("done"), make(*arguments))[1]  # type: ignore[func-returns-value]
    start.wait()
    found = prepare(config)
    results.put((str(found.folder), found.data_hash, len(work)))


def test_processes_that_ask_at_once_get_one_folder(config: DataConfig, prepared: PreparedData, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_prepare, args=(in_cache(config, tmp_path), start, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert {place[:2] for place in found} == {(str(tmp_path / prepared.folder.name), prepared.data_hash)}
    assert sum(worked for *_, worked in found) == 1
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".lock"}


def test_what_a_killed_process_left_is_made_anew(prepared: PreparedData, config: DataConfig, tmp_path: Path) -> None:
    name = prepared.folder.name
    for leftover in (f"{name}.partial", name):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "train.bin").write_bytes(b"half")
    assert prepare(in_cache(config, tmp_path)).data_hash == prepared.data_hash
    assert not (tmp_path / f"{name}.partial").exists()


def test_a_failure_leaves_nothing_behind(config: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.tokenizer\.vocab_size: 60000 is too large"):
        prepare(in_cache(config, tmp_path, tokenizer={"vocab_size": 60_000}))
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}


def test_a_corpus_that_changes_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    text = tmp_path / "a.txt"
    text.write_text((corpus / "heapq.txt").read_text())
    real = module.write_dataset

    def meddle(*arguments: Any) -> Any:
        text.write_text("something else")
        return real(*arguments)

    monkeypatch.setattr(module, "write_dataset", meddle)
    with pytest.raises(UserError, match=r"data\.corpus: its files changed"):
        prepare(DataConfig(corpus=str(text), tokenizer=TokenizerConfig(vocab_size=400), cache_dir=str(tmp_path / "c")))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "train-00000.bin").write_bytes(b""), r"train-00000\.bin: missing or not \d+ bytes"),
        (lambda folder: (folder / "eval-00000.idx").unlink(), r"eval-00000\.idx: missing or not"),
        (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json: damaged: .*"),
    ],
)
def test_damage_is_named(
    damage: Callable[[Path], object], message: str, prepared: PreparedData, config: DataConfig, tmp_path: Path
) -> None:
    folder = tmp_path / prepared.folder.name
    folder.mkdir()
    for path in prepared.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    assert prepare(in_cache(config, tmp_path)).data_hash == prepared.data_hash
    damage(folder)
    with pytest.raises(UserError, match=f"{message}.* delete {folder} to have it made again$"):
        prepare(in_cache(config, tmp_path))


def test_a_cache_that_cannot_be_written_is_named(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"data\.cache_dir: cannot write .*file.*; set data\.cache_dir or .*GRAMIAN_CACHE"
    ):
        prepare(in_cache(config, tmp_path / "file"))


def test_the_environment_names_the_cache(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    monkeypatch.setattr(module, "_make", make_nothing)
    monkeypatch.setenv("GRAMIAN_CACHE", str(tmp_path / "elsewhere"))
    assert prepare(config).folder.parent == tmp_path / "elsewhere"
    monkeypatch.delenv("GRAMIAN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prepare(config).folder.parent == tmp_path / "home/.cache/gramian"


def test_one_document_is_enough(tmp_path: Path, corpus: Path) -> None:
    config = DataConfig(
        corpus=str(corpus / "argparse.txt"), tokenizer=TokenizerConfig(vocab_size=400), cache_dir=str(tmp_path)
    )
    found = prepare(config)
    assert (found.train.n_documents, found.eval.n_documents) == (1, 1)
    texts = [found.tokenizer().decode(tokens.document(0)) for tokens in (found.train, found.eval)]
    assert "".join(texts) == (corpus / "argparse.txt").read_text(encoding="utf-8")


def test_progress_is_shown_when_asked_for(
    config: DataConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(in_cache(config, tmp_path / "quiet"))
    assert capfd.readouterr() == ("", "")
    prepare(in_cache(config, tmp_path / "loud"), show_progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "encoding" in err
