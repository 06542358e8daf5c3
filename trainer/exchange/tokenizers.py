"""Tokenizer files that transformers reads, with the ids of ours."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from common.errors import UserError
from data.readers import Source
from data.tokenizer import Tokenizer
from data.tokenizers.byte import N_BYTES
from data.tokenizers.common import probes
from data.tokenizers.huggingface import FILE_NAME, HuggingFaceTokenizer
from data.tokenizers.sentencepieces import SentencePieceTokenizer

_SPACE = "\u2581"  # SentencePiece writes a space inside pieces as this character
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # kinds of its pieces, sentencepiece_model.proto


# A name under which transformers does not look for a model of SentencePiece, of which it would make a tokenizer itself.
ORIGINAL = "original.sentencepiece.model"
_SAMPLE_DOCUMENTS, _SAMPLE_CHARS = 40, 10_000


def tokenizer_files(tokenizer: Tokenizer, content: bytes, max_length: int) -> tuple[dict[str, bytes], list[str]]:
    """Files by name from which `AutoTokenizer` makes a tokenizer with the same ids, and what there is to know of them.

    If there is no such tokenizer.json, as trying some texts tells, there is none among the files.

    Args:
        content: of the tokenizer's own file.
        max_length: longest sequence of the model.
    """
    files, notes = {}, []
    eos = next(name for name, token in tokenizer.special_tokens.items() if token == tokenizer.eos_id)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        files[FILE_NAME] = content
        if added := _added_by(json.loads(content).get("post_processor")):
            notes = [f"transformers puts {', '.join(added)} around each text, as {FILE_NAME} says; training did not"]
    else:
        if isinstance(tokenizer, SentencePieceTokenizer):
            files[ORIGINAL] = content
            pieces = _read_model(content)
            if tokenizer.encode([_SPACE]) == tokenizer.encode([" "]):
                pieces = pieces._replace(normalizers=(_replace(_SPACE, " "), *pieces.normalizers))
        else:
            names = [f"<0x{byte:02X}>" for byte in range(N_BYTES)]
            pieces = _Pieces([*names, eos], [0.0] * (N_BYTES + 1), [_BYTE] * N_BYTES + [_CONTROL])
        tree = json.dumps(_tree(pieces), ensure_ascii=False, indent=1).encode("utf-8")
        if not _is_same(tokenizer, tree, eos, pieces):
            return files, [f"no {FILE_NAME} gives the ids of this tokenizer; the folder has it as {ORIGINAL} alone"]
        if pieces.unigram:
            notes = ["of two ways to cut a text that are equally likely, transformers may take the other one"]
        files[FILE_NAME] = tree
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    files["tokenizer_config.json"] = json.dumps(settings, indent=2).encode("utf-8") + b"\n"
    return files, notes


def _added_by(post_processor: Any) -> list[str]:
    """Names of the tokens that a tokenizer.json adds to each text."""
    if not post_processor:
        return []
    names = [name for part in post_processor.get("processors", []) for name in _added_by(part)]
    single = post_processor.get("single")
    parts = single if isinstance(single, list) else []  # of a template
    names += [part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part]
    return names + [post_processor[end][0] for end in ("cls", "sep") if end in post_processor]  # of BERT and RoBERTa


def _is_same(ours: Tokenizer, tree: bytes, eos: str, pieces: _Pieces) -> bool:
    """Whether a tokenizer.json gives our ids, and our texts from them, of texts that are hard and of real ones.

    SentencePiece adds up a unigram model's scores in single precision, so that it is chance which of two equally likely
    ways to cut a text it takes. There the sums of scores must agree.
    """
    try:
        theirs = HuggingFaceTokenizer(tree, eos)
    except UserError:
        return False
    texts = [*probes(), *_sample()]
    for a, b in zip(ours.encode(texts), theirs.encode(texts), strict=True):
        if theirs.decode(b) != ours.decode(a):
            return False
        if a != b and not (pieces.unigram and _nearly(pieces.scores, a, b)):
            return False
    return True


def _nearly(scores: Sequence[float], a: Sequence[int], b: Sequence[int]) -> bool:
    first, second = (sum(scores[token] for token in ids) for ids in (a, b))
    return abs(first - second) <= 1e-5 * abs(first)


def _sample() -> list[str]:
    """Beginnings of sources of Python's library, which are there on every machine, or nearly."""
    try:
        documents = Source(["python-stdlib"]).documents()
        return [document.text[:_SAMPLE_CHARS] for document in itertools.islice(documents, _SAMPLE_DOCUMENTS)]
    except UserError:
        return []


class _Pieces(NamedTuple):
    """What decides the ids of a tokenizer whose pieces are put together from characters, or from bytes.

    A space stays a space in the names, where SentencePiece has U+2581: so no text has to be changed for the pieces to
    be found in it, and a U+2581 of the text becomes its three bytes, as it does in our own encoding.
    """

    names: list[str]  # by id
    scores: list[float]
    kinds: list[int]
    unigram: bool = False
    normalizers: tuple[dict[str, Any], ...] = ()
    prefix: bool = False  # whether a space is put before a text


def _replace(what: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": what}, "content": by}


def _read_model(model: bytes) -> _Pieces:
    names, scores, kinds = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(model):
        if number == 1:
            piece = dict(_fields(value))
            names.append(piece.get(1, b"").decode("utf-8").replace(_SPACE, " "))
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            kinds.append(piece.get(3, _NORMAL))
        elif number == 2:
            trainer |= dict(_fields(value))
        elif number == 3:
            normalizer |= dict(_fields(value))
    steps: list[dict[str, Any]] = []
    if charsmap := normalizer.get(2):
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode("ascii")})
    if normalizer.get(4, 1):
        steps.append({"type": "Replace", "pattern": {"Regex": "^ +| +$"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    prefix = bool(normalizer.get(3, 1))
    if prefix:
        steps.append({"type": "Prepend", "prepend": " "})
    return _Pieces(names, scores, kinds, trainer.get(3, 1) == 1, tuple(steps), prefix)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            yield key >> 3, message[at : at + size]
            at += size


def _tree(pieces: _Pieces) -> dict[str, Any]:
    fallback = _BYTE in pieces.kinds
    # Where bytes stand for the rare, no text encodes to the unknown piece, and its name is a text like any other.
    added = (_CONTROL, _USER_DEFINED) if fallback else (_UNKNOWN, _CONTROL, _USER_DEFINED)
    unknown = pieces.kinds.index(_UNKNOWN) if _UNKNOWN in pieces.kinds else None
    model: dict[str, Any]
    if pieces.unigram:
        model = {"type": "Unigram", "unk_id": unknown, "vocab": _scored(pieces), "byte_fallback": fallback}
    else:
        model = {
            "type": "BPE",
            "vocab": {name: i for i, name in enumerate(pieces.names)},
            "merges": _merges(pieces),
            "unk_token": None if unknown is None else pieces.names[unknown],
            "fuse_unk": True,
            "byte_fallback": fallback,
        }
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": name,
                "special": kind != _USER_DEFINED,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
            for i, (name, kind) in enumerate(zip(pieces.names, pieces.kinds, strict=True))
            if kind in added
        ],
        "normalizer": {"type": "Sequence", "normalizers": list(pieces.normalizers)} if pieces.normalizers else None,
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if pieces.prefix else []),
            ],
        },
        "model": model,
    }


def _merges(pieces: _Pieces) -> list[list[str]]:
    """Pairs of pieces whose join is a piece, best score first; what SentencePiece would join first comes first."""
    normal = {n: s for n, s, kind in zip(pieces.names, pieces.scores, pieces.kinds, strict=True) if kind == _NORMAL}
    found = [
        (-score, -cut, name)
        for name, score in normal.items()
        for cut in range(1, len(name))
        if name[:cut] in normal and name[cut:] in normal
    ]
    return [[name[:-cut], name[-cut:]] for _, cut, name in sorted(found)]


def _scored(pieces: _Pieces) -> list[list[Any]]:
    """Pieces with scores. No text may be read as the name of a byte or a control piece, so these get a score that
    loses against any reading of it letter by letter."""
    lowest = min(s for s, kind in zip(pieces.scores, pieces.kinds, strict=True) if kind == _NORMAL)
    return [
        [name, score if kind in (_NORMAL, _USER_DEFINED) else lowest * (len(name) + 4)]
        for name, score, kind in zip(pieces.names, pieces.scores, pieces.kinds, strict=True)
    ]
