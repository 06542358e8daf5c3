"""Small tokenizers of every kind, made from a few texts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer
from data.tokenizers.training import train_sentencepiece


def bpe(texts: Sequence[str]) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(train_sentencepiece(texts, 600))


def unigram(texts: Sequence[str]) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(train_sentencepiece(texts[:6], 500, "unigram", special=["<|user|>"]))


def byte_level_bpe(texts: Sequence[str], prefix_space: bool = False, **options: Any) -> tokenizers.Tokenizer:
    """As GPT-2's, with two special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def hugging_face(texts: Sequence[str]) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(byte_level_bpe(texts).to_str().encode("utf-8"))


def byte_fallback_bpe() -> tokenizers.Tokenizer:
    """As Llama 2's: a space is U+2581, one is put in front, and bytes stand for what is no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcde<s>/", "ab", "\u2581a"]
    merges = [("a", "b"), ("\u2581", "a")]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def normalising_sentencepiece(texts: Sequence[str], **options: Any) -> bytes:
    """A model file as SentencePiece's defaults have it: NFKC, a space in front, spaces merged, no bytes."""
    model = io.BytesIO()
    lines = [line for text in texts for line in text.splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        minloglevel=2,
        **{"model_type": "bpe", "vocab_size": 300, **options},
    )
    return model.getvalue()
