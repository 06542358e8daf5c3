"""What every kind of tokenizer keeps, and loading one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.files import hash_file
from data.config import TokenizerConfig
from data.tokenizer import FILE_NAMES, ByteTokenizer, Tokenizer, given_tokenizer, load_tokenizer
from data.tokenizers.common import probes
from tests.data import tokenizers_of_every_kind as kinds

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # every character but surrogates, which UTF-8 cannot hold
# What tokenizers treat specially: spaces, SentencePiece's marks, newlines, NUL, accents, names of their special tokens.
TRICKY = st.lists(
    st.sampled_from([" ", "  ", "\u2581", "\u2585", "\u2047", "\n", "\r\n", "\t", "\0", "\ufffd", "e\u0301", "\ufb01"])
    | st.sampled_from(["</s>", "<unk>", "<0x41>", "<|endoftext|>", "<|user|>", "<", "</", "s>"])
    | ANY_TEXT
).map("".join)

MAKERS = {
    "bpe": kinds.bpe,
    "unigram": kinds.unigram,
    "huggingface": kinds.hugging_face,
    "bytes": lambda _: ByteTokenizer(),
}


@pytest.fixture(scope="session")
def one_of_each(texts: list[str]) -> dict[str, Tokenizer]:
    return {name: make(texts) for name, make in MAKERS.items()}  # type: ignore[no-untyped-call]


@pytest.fixture(scope="session", params=MAKERS)
def any_tokenizer(request: pytest.FixtureRequest, one_of_each: dict[str, Tokenizer]) -> Tokenizer:
    return one_of_each[request.param]


@given(text=TRICKY)
@settings(max_examples=200, deadline=None)
def test_round_trip_and_bytes_are_exact(any_tokenizer: Tokenizer, text: str) -> None:
    (ids,) = any_tokenizer.encode([text])
    assert any_tokenizer.decode(ids) == text
    assert any_tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert not set(any_tokenizer.special_tokens.values()) & set(ids)
    assert all(0 <= token <= any_tokenizer.max_id for token in ids)


def test_every_character_of_unicode_comes_back(any_tokenizer: Tokenizer) -> None:
    everything = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    lines = ["".join(everything[i : i + 256]) for i in range(0, len(everything), 256)]
    for line, ids in zip(lines, any_tokenizer.encode(lines), strict=True):
        assert any_tokenizer.decode(ids) == line
        assert any_tokenizer.token_bytes[ids].sum() == len(line.encode())
    assert any_tokenizer.exact


def test_corpus_round_trip_batching_and_threads(any_tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = any_tokenizer.encode(texts)
    assert [any_tokenizer.decode(ids) for ids in encoded] == texts
    assert [any_tokenizer.decode(np.array(ids, dtype=np.uint16)) for ids in encoded] == texts
    assert encoded == [any_tokenizer.encode([text])[0] for text in texts]
    assert encoded == any_tokenizer.encode(texts, threads=1) == any_tokenizer.encode(texts, threads=3)
    assert any_tokenizer.encode([]) == []
    assert any_tokenizer.encode(["", "a", ""])[::2] == [[], []]


def test_special_tokens_stand_for_nothing(any_tokenizer: Tokenizer) -> None:
    special = list(any_tokenizer.special_tokens.values())
    assert any_tokenizer.eos_id in special
    a, b = any_tokenizer.encode(["a", "b"])
    assert any_tokenizer.decode([*a, *special, *b]) == "ab"
    assert not any_tokenizer.token_bytes[special].any()
    assert any_tokenizer.token_bytes.shape == (any_tokenizer.vocab_size,)
    assert any_tokenizer.token_bytes.dtype == np.int64
    assert any_tokenizer.max_id == any_tokenizer.vocab_size - 1
    for outside in (any_tokenizer.vocab_size, -1):
        with pytest.raises(IndexError):
            any_tokenizer.decode([outside])
    assert any_tokenizer.decode([]) == ""


def test_half_a_character_is_replaced(any_tokenizer: Tokenizer) -> None:
    ids = any_tokenizer.encode(["a\U0001fae8"])[0]
    assert len(ids) > 2
    assert set(any_tokenizer.decode(ids[:-1])) == {"a", "\ufffd"}


def test_saved_is_the_same_tokenizer(any_tokenizer: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    name = any_tokenizer.save(tmp_path)
    assert name in FILE_NAMES
    for path in (tmp_path / name, tmp_path):
        loaded = load_tokenizer(path)
        assert (loaded.kind, loaded.hash, loaded.eos_id) == (
            any_tokenizer.kind,
            any_tokenizer.hash,
            any_tokenizer.eos_id,
        )
        assert loaded.encode(texts[:3]) == any_tokenizer.encode(texts[:3])
        loaded.save(tmp_path / "again")
    assert hash_file(tmp_path / "again" / name) == hash_file(tmp_path / name)
    (tmp_path / name).rename(tmp_path / "other.name")  # known by what is in it
    assert load_tokenizer(tmp_path / "other.name").hash == any_tokenizer.hash


def test_hashes_and_kinds_differ(one_of_each: dict[str, Tokenizer]) -> None:
    made = list(one_of_each.values())
    assert [tokenizer.kind for tokenizer in made] == ["sentencepiece", "sentencepiece", "huggingface", "bytes"]
    assert len({tokenizer.hash for tokenizer in made}) == len(made)


def test_probes_have_every_byte_of_utf8() -> None:
    """0xC0, 0xC1 and 0xF5 ... 0xFF are in no UTF-8."""
    assert {byte for text in probes() for byte in text.encode()} == {*range(0xC0), *range(0xC2, 0xF5)}


def test_bytes_are_their_own_ids() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(["a\u00e9"]) == [[97, 0xC3, 0xA9]]
    assert (tokenizer.vocab_size, tokenizer.max_id, tokenizer.eos_id) == (257, 256, 256)
    assert load_tokenizer(Path("bytes")).kind == "bytes"
    assert TokenizerConfig(kind="bytes").known_size == tokenizer.vocab_size


def test_files_that_are_no_tokenizer_are_named(tmp_path: Path) -> None:
    (tmp_path / "junk.model").write_bytes(b"junk")
    (tmp_path / "other.json").write_text('{"kind": "words"}')
    (tmp_path / "half.json").write_text('{"version": "1.0", "model": {')
    (tmp_path / "empty").touch()
    for name, message in (
        ("junk.model", "no tokenizer .neither a SentencePiece model nor a tokenizer.json"),
        ("half.json", "no tokenizer"),
        ("empty", "no tokenizer"),
        ("other.json", "not a tokenizer.json"),
        ("none.model", "cannot read the tokenizer: No such file"),
    ):
        with pytest.raises(UserError, match=rf"{name}: {message}"):
            load_tokenizer(tmp_path / name)
    with pytest.raises(UserError, match="holds no tokenizer file; name the file itself"):
        load_tokenizer(tmp_path)
    for name in FILE_NAMES[:2]:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"holds tokenizer\.model and tokenizer\.json; name the file itself"):
        load_tokenizer(tmp_path)


def test_the_config_names_a_tokenizer(texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_tokenizer(TokenizerConfig()) is None
    kinds.hugging_face(texts).save(tmp_path)
    given = given_tokenizer(TokenizerConfig(path=str(tmp_path / "tokenizer.json"), eos="<|user|>"))
    assert given is not None
    assert given.eos_id == given.special_tokens["<|user|>"]
    monkeypatch.setenv("HOME", str(tmp_path))
    given = given_tokenizer(TokenizerConfig(path="~/tokenizer.json"))
    assert given is not None
    assert given.eos_id == json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"][0]["id"]
    assert given_tokenizer(TokenizerConfig(kind="bytes")) is not None
