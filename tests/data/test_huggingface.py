"""tokenizer.json files: which token ends a document, text that spells special tokens, bytes, and what is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from common.errors import UserError
from data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from tests.data import tokenizers_of_every_kind as kinds


@pytest.fixture(scope="module")
def original(texts: list[str]) -> tokenizers.Tokenizer:
    """The library's own."""
    return kinds.byte_level_bpe(texts)


def of(original: tokenizers.Tokenizer, eos: str | None = None) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(original.to_str().encode("utf-8"), eos)


def copy_of(original: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(original.to_str())


def test_ids_are_those_of_the_library(original: tokenizers.Tokenizer, texts: list[str]) -> None:
    expected = [original.encode(text, add_special_tokens=False).ids for text in texts]
    assert of(original).encode(texts) == expected
    assert of(original).encode(texts, threads=1) == expected


def test_what_a_file_asks_for_beside_its_ids_is_not_done(original: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Truncation, padding and templates belong to other uses; a document must stay whole."""
    other = copy_of(original)
    other.enable_truncation(10)
    other.enable_padding(length=1000)
    other.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|user|>", special_tokens=[("<|endoftext|>", 0), ("<|user|>", 1)]
    )
    assert other.encode(texts[0]).ids != of(original).encode([texts[0]])[0]
    documents = [*texts, "a"]  # longer and shorter than all that
    assert of(other).encode(documents) == of(original).encode(documents)


def test_text_that_spells_a_special_token_is_text(original: tokenizers.Tokenizer) -> None:
    """Which the library alone would not have it be."""
    assert 0 in original.encode("a<|endoftext|>b", add_special_tokens=False).ids
    for text in ("a<|endoftext|>b", "<|user|>", "<|endoftext|><|endoftext|>"):
        (ids,) = of(original).encode([text])
        assert not {0, 1} & set(ids)
        assert of(original).decode(ids) == text


def unigram_with_special_pieces() -> tokenizers.Tokenizer:
    """Special tokens that are pieces of the model as well, as T5's are."""
    pieces = [("<unk>", 0.0), ("</s>", -1.0), ("<pad>", -1.0), *((c, -5.0) for c in "\u2581ab</s>pd")]
    tokenizer = tokenizers.Tokenizer(models.Unigram(list(dict(pieces).items()), 0))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
        decoders.Metaspace(prepend_scheme="never", split=False),
    )
    tokenizer.add_special_tokens(["<unk>", "</s>", "<pad>"])
    return tokenizer


def test_a_special_token_that_is_a_piece_is_kept_out_of_texts() -> None:
    original = unigram_with_special_pieces()
    plain = copy_of(original)
    plain.encode_special_tokens = True
    assert 1 in plain.encode("ab</s> a").ids  # the model sees the piece
    tokenizer = of(original)
    for text in ("ab</s> a", "</s>", "</s></s>", "<pad></s>b"):
        (ids,) = tokenizer.encode([text])
        assert not {0, 1, 2} & set(ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text)
    (ids,) = tokenizer.encode(["a\u4e00b"])  # what is unknown stays
    assert ids.count(0) == 1
    assert not tokenizer.exact


def test_an_end_of_document_that_texts_encode_to_is_refused() -> None:
    tokenizer = of(unigram_with_special_pieces(), "<unk>")
    assert tokenizer.encode(["ab"]) == of(unigram_with_special_pieces()).encode(["ab"])
    with pytest.raises(UserError, match="'<unk>' ends a document and is also what some text encodes to; name another"):
        tokenizer.encode(["ab", "\u4e00"])


def test_the_end_of_document_is_found_or_chosen(original: tokenizers.Tokenizer, tmp_path: Path) -> None:
    content = original.to_str().encode("utf-8")
    (tmp_path / "in.json").write_bytes(content)
    found, chosen = load_tokenizer(tmp_path / "in.json"), load_tokenizer(tmp_path / "in.json", "<|user|>")
    assert (found.eos_id, chosen.eos_id) == (0, 1)
    assert found.hash != chosen.hash
    assert load_tokenizer(tmp_path / "in.json", "<|endoftext|>").hash == found.hash
    found.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == content  # as it was given
    chosen.save(tmp_path)
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.eos_id, loaded.hash, loaded.special_tokens) == (1, chosen.hash, found.special_tokens)
    assert loaded.encode(["a b"]) == found.encode(["a b"])
    tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))  # still what others read
    back = load_tokenizer(tmp_path / "tokenizer.json", "<|endoftext|>")
    back.save(tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer.json").eos_id == 0
    for eos in ("nope", "a"):
        with pytest.raises(UserError, match=rf"in.json: '{eos}' is no special token; .*: <\|endoftext\|>, <\|user\|>$"):
            load_tokenizer(tmp_path / "in.json", eos)


def test_common_names_are_looked_for_in_order(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    trained = kinds.byte_level_bpe(texts[:1])
    trained.add_special_tokens(["<|end_of_text|>", "</s>"])
    before = of(trained)
    assert before.eos_id == trained.token_to_id("</s>")
    with monkeypatch.context() as patch:  # as a later version might have it: the same file, but other ids
        patch.setattr("data.tokenizers.common.COMMON_EOS", ("<|endoftext|>", "</s>"))
        assert of(trained).eos_id == 0
        assert of(trained).hash != before.hash
    tree = json.loads(trained.to_str())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] == "<|user|>"]
    with pytest.raises(
        UserError, match=r"it does not tell which token ends a document; choose .* --eos .*: <\|user\|>"
    ):
        HuggingFaceTokenizer(json.dumps(tree).encode())
    tree["added_tokens"] = []
    with pytest.raises(UserError, match="it has no special token that could"):
        HuggingFaceTokenizer(json.dumps(tree).encode())


def test_added_tokens_count_for_the_largest_id(original: tokenizers.Tokenizer) -> None:
    tree = json.loads(original.to_str())
    size = original.get_vocab_size(with_added_tokens=False)
    entry = {**tree["added_tokens"][0], "special": False}
    tree["added_tokens"] += [{**entry, "id": size, "content": "    "}, {**entry, "id": size + 1, "content": "<think>"}]
    tokenizer = HuggingFaceTokenizer(json.dumps(tree).encode())
    assert tokenizer.max_id == size + 1
    assert tokenizer.vocab_size == size + 2 == len(tokenizer.token_bytes)
    (ids,) = tokenizer.encode(["a<think>    b"])
    assert {size, size + 1} <= set(ids)  # tokens that are not special are text
    assert tokenizer.decode(ids) == "a<think>    b"
    assert tokenizer.token_bytes[ids].sum() == len("a<think>    b")
    assert tokenizer.exact


def test_gaps_in_the_ids_count(original: tokenizers.Tokenizer, texts: list[str]) -> None:
    """As files have that were mended by hand: there are fewer tokens than the largest id says."""
    tree = json.loads(original.to_str())
    pieces = tree["model"]["vocab"]
    parts = {part for merge in tree["model"]["merges"] for part in merge}
    gone = next(merge for merge in tree["model"]["merges"] if "".join(merge) not in parts)
    tree["model"]["merges"].remove(gone)
    hole = pieces.pop("".join(gone))
    assert hole < max(pieces.values())
    tokenizer = HuggingFaceTokenizer(json.dumps(tree).encode())
    assert tokenizer.max_id == max(pieces.values())
    assert tokenizer.vocab_size == len(pieces) + 1 == len(tokenizer.token_bytes)
    assert tokenizer.token_bytes[hole] == 0
    assert tokenizer.exact
    assert max(max(ids) for ids in tokenizer.encode(texts)) <= tokenizer.max_id


def _word_piece(texts: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _normalised(texts: list[str]) -> tokenizers.Tokenizer:
    tokenizer = kinds.byte_level_bpe(texts)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [_word_piece, _normalised, lambda texts: kinds.byte_level_bpe(texts, True), lambda _: kinds.byte_fallback_bpe()],
    ids=["word pieces", "NFC", "prefix space", "U+2581"],
)
def test_what_loses_something_says_so(make: Callable[[list[str]], Any], texts: list[str]) -> None:
    tokenizer = of(make(texts[:2]))
    assert not tokenizer.exact
    (ids,) = tokenizer.encode([texts[0][:200]])
    assert len(tokenizer.decode(ids)) > 100
    assert tokenizer.token_bytes[ids].sum() > 100


def test_pieces_with_marked_spaces_and_bytes(texts: list[str]) -> None:
    """As Llama 2's: what the ids stand for is the text and the space in front of it."""
    tokenizer = of(kinds.byte_fallback_bpe())
    assert tokenizer.eos_id == 2
    for text in ("ab a b", "d \u00e9 \U0001f600", "</s>"):
        (ids,) = tokenizer.encode([text])
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode()) + 1
        assert 2 not in ids


def test_added_tokens_outside_the_alphabet_keep_their_bytes(original: tokenizers.Tokenizer) -> None:
    other = copy_of(original)
    other.add_tokens([AddedToken("\u4e00\u4e00", normalized=False)])
    tokenizer = of(other)
    (ids,) = tokenizer.encode(["a\u4e00\u4e00"])
    assert tokenizer.token_bytes[ids].tolist() == [1, 6]


def test_files_that_are_none(tmp_path: Path) -> None:
    for content in (b"{}", b'{"added_tokens": 5}', b'{"added_tokens": [{"id": 0}]}', b'{"model": {"type": "None"}}'):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(UserError, match=r"x\.json: not a tokenizer\.json: .*; give another file"):
            load_tokenizer(tmp_path / "x.json")


def test_one_thread_is_one_thread(original: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """In a process that may use two: the library starts no threads of its own, and the environment stays as it was."""
    of(original).save(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; from data.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(Path(sys.argv[1]))\n"
        "tokenizer.encode(['some text'] * 100, threads=int(sys.argv[2]))\n"
        "print(len(os.listdir('/proc/self/task')), os.environ.get('TOKENIZERS_PARALLELISM'))"
    )
    root = Path(__file__).parents[2]
    base = {**os.environ, "PYTHONPATH": str(root), "RAYON_NUM_THREADS": "3"}
    base.pop("TOKENIZERS_PARALLELISM", None)
    counts = []
    for threads in ("1", "3"):
        words = [sys.executable, "-c", code, str(tmp_path), threads]
        done = subprocess.run(words, env=base, cwd=root, capture_output=True, text=True, check=True)
        counts.append(int(done.stdout.split()[0]))
        assert done.stdout.split()[1] == "None"
    assert counts[1] > counts[0]
