"""What the kinds share: which token ends a document, and whether a tokenizer loses anything."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer

# Names that widely used tokenizers give their end of document, in the order in which they are looked for.
COMMON_EOS = ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>")


def choose_eos(given: str | None, special: Iterable[str], where: str) -> str:
    """The name of the token that ends a document: the one given, else a common one.

    Raises `UserError` if it is none of the `special` tokens, which alone no text encodes to.
    """
    names = list(special)
    eos = given if given is not None else next((name for name in COMMON_EOS if name in names), None)
    if eos in names:
        return str(eos)
    what = f"'{eos}' is no special token" if eos is not None else "it does not tell which token ends a document"
    if not names:
        raise UserError(f"{where}: {what}, and it has no special token that could; give another tokenizer")
    known = ", ".join(names)
    raise UserError(f"{where}: {what}; choose one of these with --eos or data.tokenizer.eos: {known}")


@functools.cache
def probes() -> tuple[str, ...]:
    """Texts that tell whether a tokenizer is exact: what is treated specially somewhere, and random characters.

    Between them they have every byte that UTF-8 can have.
    """
    tricky = (
        *("a", " a", "a ", "  a  b  ", "\n", "a\n\nb\n", "\r\n", "\ta", "\0", "\u00a0a", "\u2581", "a\u2581b"),
        *("\u2585", "\u2047", "\ufeffa", "\ufffd", "e\u0301", "\u00e9", "\uac00", "\u1100\u1161", "\ufb01", "\u2126"),
        *("\uff21", "A", "\u0130", "x\u200bz", "\u2028", "don't", "1234567", "...", "'s", " ,", " .", "##ing", "</w>"),
        *("<unk>", "<s>", "</s>", "[UNK]", "<0x41>", "<|endoftext|>", "\U0001f468\u200d\U0001f469"),
        *("".join(map(chr, range(start, start + 32))) for start in range(0, 0x300, 32)),
        # A character of every first byte of two, three and four.
        "".join(map(chr, range(0x300, 0x800, 0x40))),
        "".join(map(chr, (0x800, *range(0x1000, 0xD000, 0x1000), 0xD000, 0xE000, 0xF000))),
        "".join(map(chr, (0x10000, 0x40000, 0x80000, 0xC0000, 0x100000, sys.maxunicode))),
    )
    generator = random.Random(0)
    everything = [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]
    return tricky + tuple("".join(map(chr, generator.choices(everything, k=k))) for k in range(1, 33))


def round_trips(tokenizer: Tokenizer, texts: Sequence[str]) -> bool:
    """Whether each of `texts` comes back from its ids."""
    encoded = tokenizer.encode(texts, threads=1)
    return all(tokenizer.decode(ids) == text for text, ids in zip(texts, encoded, strict=True))


def is_exact(tokenizer: Tokenizer) -> bool:
    """Whether the probes come back from their ids, and have as many bytes as their ids stand for."""
    sizes = tokenizer.token_bytes
    encoded = tokenizer.encode(probes(), threads=1)
    return round_trips(tokenizer, probes()) and all(
        int(sizes[ids].sum()) == len(text.encode("utf-8")) for text, ids in zip(probes(), encoded, strict=True)
    )
