"""The tokenizer files of an export: transformers reads the ids from them that we do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from data.readers import Source
from data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from data.tokenizers.byte import CONTENT, ByteTokenizer
from data.tokenizers.common import probes
from data.tokenizers.training import train_sentencepiece
from tests.data.tokenizers_of_every_kind import byte_fallback_bpe, byte_level_bpe, normalising_sentencepiece
from trainer.exchange import tokenizers
from trainer.exchange.tokenizers import ORIGINAL, tokenizer_files


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Sources of Python's library, 1.5 MB of them."""
    kept, size = [], 0
    for document in Source(["python-stdlib"]).documents():
        kept.append(document.text)
        size += len(document.text)
        if size > 1_500_000:
            return kept
    raise AssertionError("too little text")


@pytest.fixture(scope="module")
def bpe(texts: list[str]) -> bytes:
    return train_sentencepiece(texts, 2000, special=["<|user|>"], sample_bytes=1_000_000)


@pytest.fixture(scope="module")
def unigram(texts: list[str]) -> bytes:
    return train_sentencepiece(texts, 1000, "unigram", sample_bytes=200_000)


def theirs_of(folder: Path, files: dict[str, bytes], model_type: str = "llama") -> AutoTokenizer:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return AutoTokenizer.from_pretrained(folder)


def assert_same(ours: Tokenizer, theirs: AutoTokenizer, texts: Sequence[str], **options: bool) -> None:
    """Ids and text; without options, what a user gets who asks for nothing special."""
    encoded = ours.encode(texts)
    for text, ids in zip(texts, encoded, strict=True):
        assert theirs(text, **options)["input_ids"] == ids
        assert theirs.decode(ids) == text


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "gemma2", "gemma3_text", "mixtral", "gpt_oss"])
def test_bpe(bpe: bytes, texts: list[str], tmp_path: Path, model_type: str) -> None:
    """Whatever the model: transformers has tokenizers of its own for some, which are not ours."""
    ours = SentencePieceTokenizer(bpe)
    files, notes = tokenizer_files(ours, bpe, 77)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", ORIGINAL}
    assert files[ORIGINAL] == bpe
    assert notes == []
    theirs = theirs_of(tmp_path, files, model_type)
    some = texts if model_type == "llama" else texts[:3]
    assert_same(ours, theirs, some)
    assert (theirs.eos_token, theirs.eos_token_id, theirs.bos_token) == ("</s>", ours.eos_id, None)
    assert theirs.model_max_length == 77
    # Special tokens are what they spell, as is usual there; here they are text.
    assert theirs("<|user|>a</s>")["input_ids"] == [
        ours.special_tokens["<|user|>"],
        *ours.encode(["a"])[0],
        ours.eos_id,
    ]
    assert theirs.decode([*ours.encode(["a"])[0], ours.eos_id], skip_special_tokens=True) == "a"
    assert_same(ours, theirs, [text for text in probes() if text != "</s>"])
    assert_same(ours, theirs, probes(), split_special_tokens=True)


def test_unigram(unigram: bytes, texts: list[str], tmp_path: Path) -> None:
    """The same ids, but where two ways to cut a text have the same probability; then one of these."""
    ours = SentencePieceTokenizer(unigram)
    files, notes = tokenizer_files(ours, unigram, 77)
    assert notes == ["of two ways to cut a text that are equally likely, transformers may take the other one"]
    theirs = theirs_of(tmp_path, files)
    scores = [score for _, score in json.loads(files["tokenizer.json"])["model"]["vocab"]]
    differ = 0
    for text, a in zip(texts, ours.encode(texts), strict=True):
        b = theirs(text)["input_ids"]
        assert theirs.decode(b) == text
        assert sum(scores[i] for i in b) == pytest.approx(sum(scores[i] for i in a), rel=1e-5)
        differ += a != b
    assert differ < len(texts) / 2
    lines = [line for text in texts[:20] for line in text.splitlines(keepends=True)]
    encoded = ours.encode(lines)
    assert sum(theirs(line)["input_ids"] != ids for line, ids in zip(lines, encoded, strict=True)) < len(lines) / 500


def test_bytes(texts: list[str], tmp_path: Path) -> None:
    ours = ByteTokenizer()
    files, notes = tokenizer_files(ours, CONTENT, 77)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert notes == []
    theirs = theirs_of(tmp_path, files)
    assert_same(ours, theirs, [*texts[:3], *(p for p in probes() if "</s>" not in p)])
    assert len(theirs) == 257
    assert theirs.eos_token_id == 256


def test_a_tokenizer_json_goes_out_as_it_is(texts: list[str], tmp_path: Path) -> None:
    content = byte_level_bpe(texts[:20]).to_str().encode("utf-8")
    ours = HuggingFaceTokenizer(content, "<|user|>")  # not the one it would be without a word
    content = (tmp_path / ours.save(tmp_path)).read_bytes()
    files, notes = tokenizer_files(ours, content, 77)
    assert files["tokenizer.json"] == content
    assert notes == []
    theirs = theirs_of(tmp_path, files)
    assert_same(ours, theirs, texts[:5])
    assert theirs.eos_token_id == ours.eos_id == ours.special_tokens["<|user|>"]


@pytest.mark.parametrize("kind", ["template", "bert"])
def test_tokens_that_a_tokenizer_json_adds_are_told(texts: list[str], tmp_path: Path, kind: str) -> None:
    tokenizer = byte_level_bpe(texts[:20])
    ids = {name: tokenizer.token_to_id(name) for name in ("<|user|>", "<|endoftext|>")}
    if kind == "bert":
        added = processors.BertProcessing(("<|endoftext|>", ids["<|endoftext|>"]), ("<|user|>", ids["<|user|>"]))
    else:
        added = processors.TemplateProcessing(single="<|user|> $0", special_tokens=list(ids.items()))
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), added])
    content = tokenizer.to_str().encode("utf-8")
    ours = HuggingFaceTokenizer(content)
    files, (note,) = tokenizer_files(ours, content, 77)
    assert "<|user|>" in note
    assert "as tokenizer.json says; training did not" in note
    theirs = theirs_of(tmp_path, files)
    assert theirs("a")["input_ids"] != ours.encode(["a"])[0]
    assert_same(ours, theirs, texts[:2], add_special_tokens=False)


def test_byte_fallback_of_the_library(tmp_path: Path) -> None:
    content = byte_fallback_bpe().to_str().encode("utf-8")
    ours = HuggingFaceTokenizer(content)
    files, notes = tokenizer_files(ours, content, 77)
    assert (files["tokenizer.json"], notes) == (content, [])
    assert_same(ours, theirs_of(tmp_path, files), ["abc a", "é b"])


BYTES = {"byte_fallback": True, "vocab_size": 600}
PLAIN = {**BYTES, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PLAIN, True),  # as Llama 2's
        ({**PLAIN, "add_dummy_prefix": False, "user_defined_symbols": ["\u2581\u2581", "<mark>"]}, True),  # as Gemma's
        ({}, None),  # SentencePiece's own defaults: NFKC, spaces merged, no bytes for the rare
        (BYTES, None),
        ({"model_type": "unigram"}, None),
        ({"treat_whitespace_as_suffix": True}, False),
    ],
)
def test_models_of_others_are_the_same_or_left_out(
    texts: list[str], tmp_path: Path, options: dict[str, object], expected: bool | None
) -> None:
    """None: either will do, as long as it is the truth."""
    model = normalising_sentencepiece(texts[:5], **options)
    ours = SentencePieceTokenizer(model)
    files, notes = tokenizer_files(ours, model, 77)
    assert files[ORIGINAL] == model
    assert expected in (None, "tokenizer.json" in files)
    if "tokenizer.json" not in files:
        assert notes == [f"no tokenizer.json gives the ids of this tokenizer; the folder has it as {ORIGINAL} alone"]
        assert set(files) == {ORIGINAL}
        return
    theirs = theirs_of(tmp_path, files)
    short = [line for text in texts[:3] for line in text.splitlines()]
    for line, ids in zip(short, ours.encode(short), strict=True):
        assert theirs(line)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_merges", lambda pieces: []),
        ("_nearly", lambda *_: False),
        ("_scored", lambda pieces: [[name, -1.0] for name in pieces.names]),
        ("_tree", lambda pieces, tree=tokenizers._tree: {**tree(pieces), "decoder": {"type": "Fuse"}}),
    ],
)
def test_a_wrong_file_is_left_out(
    bpe: bytes, unigram: bytes, monkeypatch: pytest.MonkeyPatch, name: str, fault: object
) -> None:
    model = bpe if name in ("_merges", "_tree") else unigram
    ours = SentencePieceTokenizer(model)
    monkeypatch.setattr(tokenizers, name, fault)
    files, notes = tokenizer_files(ours, model, 77)
    assert set(files) == {ORIGINAL}
    assert notes == [f"no tokenizer.json gives the ids of this tokenizer; the folder has it as {ORIGINAL} alone"]
