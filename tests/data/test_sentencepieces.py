"""Training SentencePiece models, and using those of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer
from data.tokenizers.training import sampled, train_sentencepiece
from tests.data import tokenizers_of_every_kind as kinds

both_models = pytest.mark.parametrize("model", ["bpe", "unigram"])
Model = Literal["bpe", "unigram"]


def train(texts: list[str], vocab_size: int = 600, model: Model = "bpe", **options: Any) -> bytes:
    return train_sentencepiece(texts, vocab_size, model, **options)


def test_newlines_are_learned(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode([":\n"])[0]) == 1


@both_models
def test_training_is_deterministic_and_ignores_the_machine(
    texts: list[str], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = texts[:4]
    first = train(texts, 400, model)
    monkeypatch.setattr("data.tokenizers.sentencepieces.available_cores", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert train(texts, 400, model) == first
    encoded = SentencePieceTokenizer(first).encode(texts)
    monkeypatch.setattr("data.tokenizers.sentencepieces.available_cores", lambda: 1)
    assert SentencePieceTokenizer(first).encode(texts) == encoded


def test_the_models_are_what_they_are_called(texts: list[str]) -> None:
    from_bpe, from_unigram = train(texts[:4], 400), train(texts[:4], 400, "unigram")
    assert len(from_bpe) != len(from_unigram)
    pieces = [sentencepiece.SentencePieceProcessor(model_proto=m) for m in (from_bpe, from_unigram)]
    # Scores of BPE are ranks, those of unigram are logarithms of probabilities.
    scores = [[p.get_score(i) for i in range(260, p.vocab_size())] for p in pieces]
    assert all(score == int(score) for score in scores[0])
    assert not all(score == int(score) for score in scores[1])


def test_a_bounded_sample_is_spread_over_the_corpus(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = sentencepiece.SentencePieceTrainer.train

    def spy(**options: Any) -> None:
        seen.extend(options["sentence_iterator"])
        real(**{**options, "sentence_iterator": iter(seen)})

    monkeypatch.setattr("data.tokenizers.training.sentencepiece.SentencePieceTrainer.train", spy)
    train(texts)
    assert "".join(seen) == "".join(texts).replace("\0", "")  # nothing is lost when all of it is used
    assert max(len(sentence) for sentence in seen) <= 2000
    total = sum(map(len, seen))
    seen.clear()
    train(texts, sample_bytes=60_000)
    assert 0.4 * 60_000 < sum(map(len, seen)) <= 60_000 < total
    assert any(sentence in texts[0] for sentence in seen)
    assert any(sentence in texts[-1] for sentence in seen)


@given(chunks=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1)), n_bytes=st.integers(1, 200))
@settings(deadline=None)
def test_samples_are_evenly_spaced_and_bounded(chunks: list[str], n_bytes: int) -> None:
    kept = sampled(iter(chunks), n_bytes)

    def size(some: list[str]) -> int:
        return sum(len(chunk.encode()) for chunk in some)

    stride = next(1 << k for k in range(64) if size(chunks[:: 1 << k]) <= n_bytes or len(chunks) <= 1 << k)
    assert kept == chunks[::stride]


def test_a_sample_takes_no_more_memory_than_it_may() -> None:
    """Of a corpus without an end, so to speak: what is held is bounded at every moment."""
    alive = peak = 0

    class Chunk(str):
        def __new__(cls) -> Chunk:
            nonlocal alive, peak
            alive += 1
            peak = max(peak, alive)
            return super().__new__(cls, "x" * 100)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    kept = sampled((Chunk() for _ in range(100_000)), 10_000)
    assert 50 <= len(kept) <= 100
    assert peak <= 160


def test_a_long_line_and_reserved_characters_are_trained_on() -> None:
    line = "lorem ipsum " * 3000
    model = SentencePieceTokenizer(train([f"{line}\0\u2585\u2581{line}" + "".join(map(chr, range(32, 127)))], 320))
    assert len(model.encode(["lorem ipsum"])[0]) < len("lorem ipsum")


@both_models
def test_vocabulary_sizes_that_do_not_fit_the_corpus_name_one_that_does(texts: list[str], model: Model) -> None:
    few = [text[:3000] for text in texts[:3]]
    with pytest.raises(
        UserError, match=r"data\.tokenizer\.vocab_size: 40000 is too large .*; set it to \d+ or less"
    ) as e:
        train(few, 40_000, model)
    largest = int(str(e.value).split("set it to ")[1].split()[0])
    assert SentencePieceTokenizer(train(few, largest, model)).vocab_size == largest
    with pytest.raises(UserError, match=r"--vocab-size: .* too large"):
        train(few, largest + 1, model, size_name="--vocab-size")
    many = ["".join(chr(0x4E00 + i) for i in range(1000))]
    with pytest.raises(
        UserError, match=r"data\.tokenizer\.vocab_size: 300 is too small .*; set it to \d+ or more"
    ) as e:
        train(many, 300, model)
    smallest = int(str(e.value).split("set it to ")[1].split()[0])
    assert SentencePieceTokenizer(train(many, smallest, model)).vocab_size == smallest


@both_models
@pytest.mark.parametrize("text", ["ab", "\u2581"])
def test_too_little_text(text: str, model: Model) -> None:
    with pytest.raises(UserError, match=r"data\.corpus: too little text"):
        train([text], 600, model)


@both_models
def test_training_is_quiet(texts: list[str], model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    train(texts[:4], 400, model)
    assert capfd.readouterr() == ("", "")


def test_special_tokens_are_given_ids_and_no_text_has_them(texts: list[str]) -> None:
    names = ["<|user|>", "<tool>"]
    tokenizer = SentencePieceTokenizer(train(texts[:4], 400, special=names))
    assert tokenizer.special_tokens == {"</s>": 1, "<|user|>": 2, "<tool>": 3}
    assert tokenizer.vocab_size == 400
    (ids,) = tokenizer.encode(["<|user|>hello<tool></s>"])
    assert tokenizer.decode(ids) == "<|user|>hello<tool></s>"
    assert not {0, 1, 2, 3} & set(ids)
    for wrong in ("", "a b", "</s>", "<0x0A>", "<unk>"):
        with pytest.raises(UserError, match=f"'{wrong}' cannot be a special token"):
            train(texts[:4], special=[wrong])
    with pytest.raises(UserError, match="'<a>' cannot be a special token"):
        train(texts[:4], special=["<a>", "<a>"])


def test_another_end_of_document_travels_with_the_file(texts: list[str], tmp_path: Path) -> None:
    model = train(texts[:4], 400, special=["<|user|>"])
    own, other = SentencePieceTokenizer(model), SentencePieceTokenizer(model, "<|user|>")
    assert (own.eos_id, other.eos_id) == (1, 2)
    assert own.hash != other.hash
    assert SentencePieceTokenizer(model, "</s>").hash == own.hash
    assert other.encode(texts[:2]) == own.encode(texts[:2])
    (tmp_path / "in").write_bytes(model)
    load_tokenizer(tmp_path / "in", "<|user|>").save(tmp_path)
    loaded = load_tokenizer(tmp_path / "tokenizer.model")
    assert (loaded.eos_id, loaded.hash) == (2, other.hash)
    assert load_tokenizer(tmp_path / "tokenizer.model", "</s>").eos_id == 1
    for wrong in ("nope", "<unk>", "<0x41>"):
        with pytest.raises(
            UserError, match=rf"in: '{wrong}' is no special token; .* these with --eos or .*: </s>, <\|u"
        ):
            load_tokenizer(tmp_path / "in", wrong)


def test_models_of_others_load_and_say_that_they_lose_something(texts: list[str], tmp_path: Path) -> None:
    texts = texts[:3]
    tokenizer = SentencePieceTokenizer(kinds.normalising_sentencepiece(texts))
    assert not tokenizer.exact
    assert tokenizer.eos_id == 2
    (ids,) = tokenizer.encode(["the  \ufb01rst  line\u2581\n"])
    assert tokenizer.decode(ids) == "the first line"
    assert tokenizer.token_bytes[ids].sum() == len(" the first line")
    without = kinds.normalising_sentencepiece(texts, eos_id=-1)
    with pytest.raises(UserError, match=r"tokenizer: it does not tell which token ends a document; choose .*: <s>"):
        SentencePieceTokenizer(without)
    assert SentencePieceTokenizer(without, "<s>").eos_id == 1
    nothing = kinds.normalising_sentencepiece(texts, eos_id=-1, bos_id=-1)
    with pytest.raises(UserError, match="it has no special token that could; give another tokenizer"):
        SentencePieceTokenizer(nothing)
    by_name = kinds.normalising_sentencepiece(texts, eos_id=-1, control_symbols=["<|endoftext|>"])
    found = SentencePieceTokenizer(by_name)
    assert found.eos_id == found.special_tokens["<|endoftext|>"]


def test_bytes_without_anything_else_are_not_enough_to_be_exact(texts: list[str]) -> None:
    """As Llama's: with bytes for what is rare, and a space in front of each text, which must not come in twice."""
    options = {"byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 400}
    model = kinds.normalising_sentencepiece(texts, **options)
    tokenizer = SentencePieceTokenizer(model)
    assert not tokenizer.exact
    plain = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert tokenizer.encode(["a\u2581b"]) == [plain.encode("a\u2581b")]
