from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.config import TokenizerConfig
from data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer, train_sentencepiece

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # every character but surrogates, which UTF-8 cannot hold
# What SentencePiece treats specially: spaces, its space mark, its unknown marks, newlines, NUL, names of its pieces.
TRICKY = st.lists(
    st.sampled_from(
        [" ", "  ", "\u2581", "\u2585", "\u2047", "\n", "\r\n", "\t", "\0", "</s>", "<unk>", "<0x41>", "\ufffd"]
    )
    | ANY_TEXT
).map("".join)


@pytest.fixture(scope="session")
def texts(corpus: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(corpus.iterdir())]


def train(texts: list[str], vocab_size: int = 600) -> bytes:
    return train_sentencepiece(texts, sum(len(t.encode()) for t in texts), TokenizerConfig(vocab_size=vocab_size))


@given(text=TRICKY)
@settings(max_examples=300, deadline=None)
def test_round_trip_and_bytes_are_exact(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.eos_id not in ids
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_every_character_of_unicode_comes_back(tokenizer: Tokenizer) -> None:
    everything = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    lines = ["".join(everything[i : i + 4096]) for i in range(0, len(everything), 4096)]
    for line, ids in zip(lines, tokenizer.encode(lines), strict=True):
        assert tokenizer.decode(ids) == line
        assert tokenizer.token_bytes[ids].sum() == len(line.encode())


def test_corpus_round_trip_and_batching(tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = tokenizer.encode(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert encoded == [tokenizer.encode([text])[0] for text in texts]
    assert tokenizer.encode([]) == []
    assert tokenizer.encode(["", "a", ""])[::2] == [[], []]


def test_special_tokens_stand_for_nothing(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode(["a", "b"])
    assert tokenizer.decode([*a, 0, tokenizer.eos_id, *b]) == "ab"
    assert tokenizer.token_bytes[[0, tokenizer.eos_id]].tolist() == [0, 0]
    assert sorted(tokenizer.token_bytes)[2] == 1
    with pytest.raises(IndexError):
        tokenizer.decode([tokenizer.vocab_size])


def test_newlines_are_learned(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode([":\n"])[0]) == 1


def test_training_is_deterministic_and_ignores_the_machine(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(texts)
    monkeypatch.setattr("data.tokenizer.available_cores", lambda: 7)
    assert train(texts) == first
    encoded = SentencePieceTokenizer(first).encode(texts)
    monkeypatch.setattr("data.tokenizer.available_cores", lambda: 1)
    assert SentencePieceTokenizer(first).encode(texts) == encoded


def test_a_bounded_sample_is_spread_over_the_corpus(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = sentencepiece.SentencePieceTrainer.train

    def spy(**options: Any) -> None:
        seen.extend(options["sentence_iterator"])
        real(**{**options, "sentence_iterator": iter(seen)})

    monkeypatch.setattr("data.tokenizer.sentencepiece.SentencePieceTrainer.train", spy)
    train(texts)
    assert "".join(seen) == "".join(texts).replace("\0", "")  # nothing is lost when all of it is used
    assert max(len(sentence) for sentence in seen) <= 2000
    total = sum(map(len, seen))
    seen.clear()
    monkeypatch.setattr("data.tokenizer.SAMPLE_BYTES", 60_000)
    train(texts)
    assert 0.1 < sum(map(len, seen)) / total < 60_000 / total * 1.1
    assert any(sentence in texts[0] for sentence in seen)
    assert any(sentence in texts[-1] for sentence in seen)


def test_a_long_line_and_reserved_characters_are_trained_on() -> None:
    line = "lorem ipsum " * 3000
    model = SentencePieceTokenizer(train([f"{line}\0\u2585\u2581{line}" + "".join(map(chr, range(32, 127)))], 320))
    assert len(model.encode(["lorem ipsum"])[0]) < len("lorem ipsum")


def test_vocabulary_sizes_that_do_not_fit_the_corpus_name_one_that_does(texts: list[str]) -> None:
    few = [text[:3000] for text in texts[:3]]
    with pytest.raises(
        UserError, match=r"data\.tokenizer\.vocab_size: 40000 is too large .*; set it to \d+ or less"
    ) as e:
        train(few, 40_000)
    largest = int(str(e.value).split("set it to ")[1].split()[0])
    assert SentencePieceTokenizer(train(few, largest)).vocab_size == largest
    with pytest.raises(UserError, match="too large"):
        train(few, largest + 1)
    many = ["".join(chr(0x4E00 + i) for i in range(1000))]
    with pytest.raises(
        UserError, match=r"data\.tokenizer\.vocab_size: 300 is too small .*; set it to \d+ or more"
    ) as e:
        train(many, 300)
    smallest = int(str(e.value).split("set it to ")[1].split()[0])
    assert SentencePieceTokenizer(train(many, smallest)).vocab_size == smallest


@pytest.mark.parametrize("text", ["ab", "\u2581"])
def test_too_little_text(text: str) -> None:
    with pytest.raises(UserError, match=r"data\.corpus: too little text"):
        train([text])


def test_training_is_quiet(texts: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    train(texts)
    assert capfd.readouterr() == ("", "")


def test_files_that_are_no_tokenizer_are_named(tmp_path: Path) -> None:
    (tmp_path / "junk.model").write_bytes(b"junk")
    for name, message in (("junk.model", "not a SentencePiece model"), ("none.model", "cannot read the tokenizer")):
        with pytest.raises(UserError, match=rf"{name}: {message}"):
            load_tokenizer(tmp_path / name)
