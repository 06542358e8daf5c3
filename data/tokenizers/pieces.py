"""Byte-level BPE piece by piece: the ids of the `tokenizers` library in a fraction of its time.

Such a tokenizer cuts a text by a pattern (at words, numbers, spaces) and then encodes each piece without a look at the
others. The same pieces occur over and over. So the text is cut here, by the same pattern in the `regex` library, and
the ids of a piece are asked of the library once and kept.

The ids are always the library's own. What could differ is the cut: two regex engines know two versions of Unicode. So

- a tokenizer whose file asks for anything else (normalisation, dropout, another cut) is left to the library;
- a character is trusted only once both engines have cut it alike in all surroundings that a pattern can tell apart;
- a piece is kept only if to the library it is a single piece;
- a text with anything else in it is left to the library as a whole.
"""

from __future__ import annotations

import itertools
from typing import Any

import regex

# GPT-2's pattern, which `use_regex` stands for.
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What a character is tried between: of each class that patterns speak of one, and what they look for besides.
_BEFORE = ("a", "A", "1", "!", "'", " ", "  ", "\n")
_AFTER = ("a", "A", "1", "!", " ", "\n", "ll", "")  # nothing: the next one's `_BEFORE`
_WEIGHT_OF_A_PIECE = 300  # bytes that a piece takes in memory, beside its characters and ids
_MOST_WEIGHT = 64_000_000  # then all is forgotten, and the frequent pieces are soon back


class PieceEncoder:
    """Encodes texts as `tokenizer` does, without special tokens. Made by `of`."""

    def __init__(self, tokenizer: Any, pattern: str, added: list[str]) -> None:
        self._tokenizer, self._pattern, self._added = tokenizer, regex.compile(pattern), added
        self._known: dict[str, list[int]] = {}
        self._weight = 0
        self._trusted: set[str] = set()
        self._distrusted: set[str] = set()

    @classmethod
    def of(cls, tree: dict[str, Any], tokenizer: Any) -> PieceEncoder | None:
        """An encoder for a tokenizer.json, given as plain data and as the library's object; None if it does more than
        to cut and to merge."""
        model, pattern = tree.get("model") or {}, _pattern(tree.get("pre_tokenizer"))
        if tree.get("normalizer") or model.get("type") != "BPE" or model.get("dropout") or pattern is None:
            return None
        added = [token["content"] for token in tree.get("added_tokens") or () if not token["special"]]
        try:
            return cls(tokenizer, pattern, added)
        except regex.error:
            return None

    def encode(self, text: str) -> list[int] | None:
        """Ids of a text; None if it must be left to the library."""
        if any(name in text for name in self._added):
            return None
        pieces = self._pattern.findall(text)
        if sum(map(len, pieces)) != len(text):  # what no part of the pattern matches
            return None
        try:
            return list(itertools.chain.from_iterable(map(self._known.__getitem__, pieces)))
        except KeyError:
            pass
        if self._weight > _MOST_WEIGHT:
            self._known, self._weight = {}, 0
        if not self._learn(set(pieces) - self._known.keys()):
            return None
        return list(itertools.chain.from_iterable(map(self._known.__getitem__, pieces)))

    def _learn(self, new: set[str]) -> bool:
        """Ask the library for pieces; False if it does not take each of them for a piece, or cuts its characters
        otherwise."""
        unknown = set().union(*new) - self._trusted
        if unknown & self._distrusted:
            return False
        if not self._agree(unknown):
            for character in unknown:
                (self._trusted if self._agree({character}) else self._distrusted).add(character)
            return False
        self._trusted |= unknown
        ordered = list(new)
        if any(len(self._library_cut(piece)) != 1 for piece in ordered):
            return False
        encoded = self._tokenizer.encode_batch_fast(ordered, add_special_tokens=False)
        for piece, encoding in zip(ordered, encoded, strict=True):
            ids = encoding.ids
            self._known[piece] = ids
            self._weight += _WEIGHT_OF_A_PIECE + len(piece) + 8 * len(ids)
        return True

    def _agree(self, characters: set[str]) -> bool:
        """Whether both engines cut all of these characters alike, in all surroundings and in pairs."""
        surroundings = [f"{before}%s{after}" for before in _BEFORE for after in _AFTER] + [" %s%sa %s%s\n"]
        template = "".join(surroundings)
        text = "".join(template.replace("%s", character) for character in sorted(characters))
        return self._library_cut(text) == [match.span() for match in self._pattern.finditer(text)]

    def _library_cut(self, text: str) -> list[tuple[int, int]]:
        """Where the library's pieces begin and end."""
        return [span for _, span in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _pattern(pre_tokenizer: Any) -> str | None:
    """The pattern that a pre-tokenizer cuts by, if that and writing bytes as characters is all it does."""
    steps = (
        [pre_tokenizer] if not pre_tokenizer or "pretokenizers" not in pre_tokenizer else pre_tokenizer["pretokenizers"]
    )
    if not steps or not steps[-1] or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return _BYTE_LEVEL if steps[0].get("use_regex", True) else None
    split = steps[0]
    if len(steps) != 2 or steps[1].get("use_regex", True) or split["type"] != "Split":
        return None
    if split["behavior"] != "Isolated" or split["invert"]:
        return None
    pattern: str | None = split["pattern"].get("Regex")
    return pattern
