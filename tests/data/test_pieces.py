"""Byte-level BPE piece by piece gives the library's ids, for any text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from data.tokenizers import pieces
from data.tokenizers.huggingface import HuggingFaceTokenizer
from data.tokenizers.pieces import PieceEncoder
from tests.data.tokenizers_of_every_kind import byte_level_bpe

# As Llama 3's, and as GPT-4o's.
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(library: tokenizers.Tokenizer, pattern: str) -> tokenizers.Tokenizer:
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return library


@pytest.fixture(scope="module", params=["gpt2", "llama", "gpt4o"])
def tokenizer(request: pytest.FixtureRequest, texts: list[str]) -> HuggingFaceTokenizer:
    library = byte_level_bpe(texts)
    if request.param != "gpt2":
        split_by(library, LLAMA if request.param == "llama" else GPT_4O)
    return HuggingFaceTokenizer(library.to_str().encode("utf-8"))


def test_real_texts_are_encoded_by_pieces(tokenizer: HuggingFaceTokenizer, texts: list[str]) -> None:
    expected = tokenizer.encode(texts)
    assert tokenizer._pieces is not None
    for _ in range(2):  # not known, known
        assert tokenizer.encode(texts, threads=1) == expected
        assert [tokenizer._pieces.encode(text) for text in texts] == expected


characters = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(
        "aAzZ1!'_/ \t\n\r\x00\x0b\x1c\x1f\x85\xa0\u1680\u2028\u3000\u0301\u0345\u017f\u212a\u01c5\u02b0²Ⅷ٣"
    ),
)


@settings(max_examples=400, deadline=None)
@given(st.text(characters, max_size=40))
@example("I'll don'T we'Re it'\u017f 'lL  \u00a0 x\u0301y 12345 \x1c\x1fa \r\n\r\n  b")
@example("\U0001e6c0\U00010d4a \U00031350 \u0378 \U0001fae8")  # of recent Unicode, or of none
@example("<|endoftext|> <|user|>")
def test_any_text_has_the_library_s_ids(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    assert tokenizer.encode([text, text + text], threads=1) == tokenizer.encode([text, text + text])


@settings(max_examples=60, deadline=None)
@given(st.text("ab 1!'\n\t.é\u00a0s", max_size=60))
def test_a_pattern_that_another_engine_reads_otherwise_changes_nothing(text: str) -> None:
    """Were it misread, both engines would be seen to differ, and the library would do the work."""
    library = byte_level_bpe(["some words, and some more 12 words!"] * 3)
    tokenizer = HuggingFaceTokenizer(library.to_str().encode("utf-8"))
    for wrong in (r"\S+|\s+", r"[\s\S]", r" ?\p{L}+|[^\p{L}]+", r"\p{L}+"):
        tokenizer.__dict__["_pieces"] = PieceEncoder(library, wrong, [])
        assert tokenizer.encode([text], threads=1) == tokenizer.encode([text])


def test_characters_that_the_engines_cut_otherwise_are_left_to_the_library(
    tokenizer: HuggingFaceTokenizer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = PieceEncoder.of(json.loads(tokenizer._content), tokenizer._tokenizer)
    assert encoder is not None
    real = encoder._library_cut
    monkeypatch.setattr(encoder, "_library_cut", lambda text: real(text.replace("z", " 1")))
    assert encoder.encode("a word") is not None
    for _ in range(2):
        assert encoder.encode("another zword") is None
        assert encoder._distrusted == {"z"}
    assert encoder.encode("another word") is not None


def test_what_is_known_is_bounded(
    tokenizer: HuggingFaceTokenizer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_MOST_WEIGHT", 20_000)
    encoder = PieceEncoder.of(json.loads(tokenizer._content), tokenizer._tokenizer)
    assert encoder is not None
    expected = tokenizer.encode(texts)
    for text, ids in zip(texts, expected, strict=True):
        assert encoder.encode(text) == ids
        assert len(encoder._known) <= len(set(text.split())) * 4 + 70


@pytest.mark.parametrize(
    "change",
    [
        lambda library: setattr(library, "normalizer", normalizers.NFC()),
        lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda library: setattr(
            library, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ),
        lambda library: setattr(
            library,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ),
        lambda library: setattr(library, "pre_tokenizer", None),
        lambda library: setattr(library, "model", models.WordLevel({"a": 0})),
        lambda library: setattr(library.model, "dropout", 0.1),
    ],
)
def test_a_tokenizer_that_does_more_is_left_to_the_library(
    texts: list[str], change: Callable[[tokenizers.Tokenizer], Any]
) -> None:
    library = byte_level_bpe(texts)
    assert PieceEncoder.of(json.loads(library.to_str()), library) is not None
    change(library)
    assert PieceEncoder.of(json.loads(library.to_str()), library) is None


def test_added_tokens_are_the_library_s(texts: list[str]) -> None:
    library = byte_level_bpe(texts)
    library.add_tokens(["    ", "def f"])
    tokenizer = HuggingFaceTokenizer(library.to_str().encode("utf-8"))
    for text in ("x     y", "def f(x):", "def g(x):"):
        assert tokenizer.encode([text], threads=1) == tokenizer.encode([text])
    assert tokenizer._pieces is not None
    assert [tokenizer._pieces.encode(text) is None for text in ("x     y", "def f(x):", "def g(x):")] == [1, 1, 0]
