"""`gramian tokenizer train`: what it writes and prints, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data.config import TokenizerConfig
from data.tokenizer import SentencePieceTokenizer, load_tokenizer
from data.tokenizers.training import train_sentencepiece
from launch.cli import app
from tests.launch.commands import assert_refused, command


def train(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Run `gramian tokenizer train` in this process: exit code, output, errors."""
    try:
        app(["tokenizer", "train", *map(str, words)], standalone_mode=False)
        code = 0
    except SystemExit as end:
        code = int(str(end.code))
    out, err = capfd.readouterr()
    return code, out, err


def test_the_command(corpus: Path, tmp_path: Path) -> None:
    """As a user gives it; and the file is the one that a training run would make of the same texts."""
    out = tmp_path / "new" / "my.model"
    words = ["tokenizer", "train", "--input", corpus, "--vocab-size", "600", "--out", out, "--special", "<|user|>"]
    result = command(*words, "--special", "<|tool|>")
    assert (result.returncode, result.stderr) == (0, "")
    tokenizer = load_tokenizer(out)
    assert tokenizer.special_tokens == {"</s>": 1, "<|user|>": 2, "<|tool|>": 3}
    assert (tokenizer.vocab_size, tokenizer.exact) == (600, True)
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.iterdir())]
    assert out.read_bytes() == train_sentencepiece(texts, 600, special=["<|user|>", "<|tool|>"])
    printed = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert printed["tokenizer"] == f"{out}, {out.stat().st_size:,} bytes, hash {tokenizer.hash[:16]}"
    assert printed["pieces"] == "600 (bpe); special: </s> 1, <|user|> 2, <|tool|> 3"
    n_bytes = sum(len(text.encode()) for text in texts)
    assert printed["sample"] == f"{n_bytes:,} bytes of {len(texts)} records"
    per_token = n_bytes / sum(len(ids) for ids in tokenizer.encode(texts))
    assert float(printed["compression"].split()[0]) == pytest.approx(per_token, rel=0.01)
    assert load_tokenizer(Path(TokenizerConfig(path=str(out)).path or "")).hash == tokenizer.hash


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_same_texts_give_the_same_file(
    kind: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In whatever files they come, and wherever."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.iterdir())][:5]
    lines = [json.dumps({"body": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines[:2]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[2:]).encode()))
    common = ["--vocab-size", "400", "--kind", kind, "--text-field", "body", "--out"]
    words = (
        ["--input", tmp_path / "a.jsonl", "--input", tmp_path / "b.jsonl.gz", *common, tmp_path / "1"],
        ["--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", *common, tmp_path / "2"],
        ["--input", tmp_path / "*.jsonl*", *common, tmp_path / "3"],
    )
    for some in words:
        assert train(capfd, *some)[0] == 0
    files = [(tmp_path / name).read_bytes() for name in "123"]
    assert files[0] == files[1] == files[2]
    assert files[0] == train_sentencepiece(texts, 400, "unigram" if kind == "unigram" else "bpe")


def test_a_bounded_sample(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    common = ["--input", corpus, "--vocab-size", "400", "--out", tmp_path / "x.model"]
    code, out, _ = train(capfd, *common, "--sample-bytes", "50000")
    assert code == 0
    (sample,) = (line for line in out.splitlines() if line.startswith("sample"))
    assert 20_000 < int(sample.split()[1].replace(",", "")) <= 50_000
    assert sample.endswith("bytes of 12 records")
    assert SentencePieceTokenizer((tmp_path / "x.model").read_bytes()).vocab_size == 400


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--input {corpus} --vocab-size 100 --out {out}", ["--vocab-size: 100 is too small", "give 300 or more"]),
        ("--input {corpus} --vocab-size 60000 --out {out}", ["--vocab-size: 60000 is too large", "set it to"]),
        ("--input {corpus} --vocab-size 400 --out {out} --kind word", ["--kind: 'word'", "give bpe or unigram"]),
        ("--input {corpus} --vocab-size 400 --out {folder}", ["--out:", "is a folder", "tokenizer.model"]),
        ("--input {corpus} --vocab-size 400 --out {file}/x", ["--out:", "file is not a folder"]),
        ("--input {corpus} --vocab-size 400 --out {out} --special </s>", ["'</s>' cannot be a special token"]),
        ("--input {corpus} --vocab-size 400 --out {out} --special a --special a", ["'a' cannot be a special token"]),
        ("--input {folder}/no --vocab-size 400 --out {out}", ["--input:", "no does not exist", "python-stdlib"]),
        ("--input {empty} --vocab-size 400 --out {out}", ["--input: no document with any text"]),
        ("--input {little} --vocab-size 400 --out {out}", ["--input: too little text"]),
        ("--input {lines} --vocab-size 400 --out {out}", ["x.jsonl:1: no field 'text'", "set --text-field", "'body'"]),
        ("--input {cut} --vocab-size 400 --out {out}", ["x.jsonl.gz: cut short or damaged after"]),
    ],
)
def test_wrong_input(
    words: str, parts: list[str], corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    places = {name: folder / name for name in ("file", "empty.txt", "little.txt", "x.jsonl", "x.jsonl.gz")}
    places["file"].touch()
    places["empty.txt"].write_text(" \n")
    places["little.txt"].write_text("ab")
    places["x.jsonl"].write_text('{"body": "x"}\n')
    places["x.jsonl.gz"].write_bytes(gzip.compress(b'{"text": "x"}\n' * 100)[:-9])
    names = {"file": "file", "empty": "empty.txt", "little": "little.txt", "lines": "x.jsonl", "cut": "x.jsonl.gz"}
    filled = words.format(
        corpus=corpus, folder=folder, out=tmp_path / "out.model", **{key: places[name] for key, name in names.items()}
    )
    code, out, err = train(capfd, *filled.split())
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for part in parts:
        assert part in err
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert set(folder.iterdir()) == set(places.values())


def test_words_that_are_missing_or_unknown(corpus: Path) -> None:
    assert_refused(command("tokenizer", "train", "--vocab-size", "400"), "Missing option", "tokenizer train --help")
    assert_refused(command("tokenizer", "trian"), "trian", "see gramian tokenizer --help")
    words = ["--input", corpus, "--vocab-size", "many", "--out", "y"]
    assert_refused(command("tokenizer", "train", *words), "--vocab-size", "tokenizer train --help")


def test_help_lists_the_options() -> None:
    result = CliRunner().invoke(app, ["tokenizer", "train", "--help"])
    for option in ("--input", "--vocab-size", "--out", "--kind", "--text-field", "--sample-bytes", "--special"):
        assert option in result.output
