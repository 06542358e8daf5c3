"""Text from a checkpoint, in one process: prompts side by side, each continued as if it were alone.

Shapes: B prompt, T position, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from data.tokenizer import Tokenizer, load_tokenizer
from models.cache import KVCache
from models.config import ModelConfig
from models.transformer import Transformer
from trainer.load import load_weights
from trainer.manifest import TOKENIZER, read_trainer_state
from trainer.sampling import sample


@dataclass(frozen=True)
class Settings:
    """How prompts are continued."""

    max_tokens: int
    """New tokens at most; fewer when the document ends, a stop text comes or the model's length is reached."""
    temperature: float
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None
    """Sample among this many likeliest tokens; None: all."""
    seed: int
    """Prompt i, from 0, is drawn with `seed + i`: as it would be alone with that seed."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens whose probability reaches this; 1: all. See `sampling.py`."""
    stop: tuple[str, ...] = ()
    """A continuation ends before the first of these texts that appears in it whole. None is empty."""


class Continuation(NamedTuple):
    """What came of one prompt."""

    prompt: str
    text: str
    """The continuation alone."""
    tokens: list[int]
    """What was drawn; those of a stop text too, but no end of document."""
    finish: str
    """Why it ends: `length` (as many tokens as were asked for, or as the model can hold), `stop` (a stop text) or `end`
    (of the document)."""


@dataclass
class _Row:
    """A prompt while it is continued."""

    prompt: str
    ids: list[int]
    n_prompt: int
    """How many of the ids are the prompt's."""
    length: int
    """How many ids there may be."""
    start: int
    """Where the continuation starts in the decoded ids."""
    generator: torch.Generator
    end: int | None = None
    """Where it ends in the decoded continuation; None: at its end."""
    finish: str = ""

    def add(self, token: int, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """Take one more token, and see whether it is the last."""
        if token == tokenizer.eos_id:
            self.finish = "end"
            return
        self.ids.append(token)
        if len(self.ids) == self.length:
            self.finish = "length"
        if stop:
            text = self.text(tokenizer)
            found = [place for place in map(text.find, stop) if place >= 0]
            if found:
                self.finish, self.end = "stop", min(found)

    def text(self, tokenizer: Tokenizer) -> str:
        """The continuation."""
        return tokenizer.decode(self.ids)[self.start :][: self.end]


def generate(checkpoint: Path, prompts: Sequence[str], settings: Settings) -> list[Continuation]:
    """Continue each prompt with the model of a committed checkpoint folder, on the GPU if there is one, in fp32."""
    config = ModelConfig.model_validate(read_trainer_state(checkpoint)["model"])
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    load_weights(checkpoint, model)
    return continue_prompts(model, load_tokenizer(checkpoint / TOKENIZER), prompts, settings)


@torch.no_grad()
def continue_prompts(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[str], settings: Settings
) -> list[Continuation]:
    """Continue each prompt. What comes of one does not depend on the others, but for rounding in its logits.

    Raises:
        UserError: a prompt leaves no room in the model; the line says which.
    """
    rows, longest, device = [], model.config.max_seq_len, model.embedding.weight.device
    for i, (prompt, ids) in enumerate(zip(prompts, tokenizer.encode(prompts), strict=True)):
        ids = ids or [tokenizer.eos_id]
        if len(ids) >= longest:
            which = "" if len(prompts) == 1 else f" {i + 1} of {len(prompts)} ({prompt[:20]!r}...)"
            raise UserError(
                f"--prompt{which} is {len(ids)} tokens long but the model's length is {longest} (model.max_seq_len); "
                f"shorten the prompt"
            )
        generator = torch.Generator(device=device).manual_seed((settings.seed + i) % 2**63)
        length = min(len(ids) + settings.max_tokens, longest)
        rows.append(_Row(prompt, ids, len(ids), length, len(tokenizer.decode(ids)), generator))
    while unfinished := [row for row in rows if not row.finish]:
        _continue(model, tokenizer, unfinished, settings)
    return [Continuation(r.prompt, r.text(tokenizer), r.ids[r.n_prompt :], r.finish) for r in rows]


def _continue(model: Transformer, tokenizer: Tokenizer, rows: list[_Row], settings: Settings) -> None:
    """Go on with all rows until they are finished, or one is as long as the model: the rest then starts anew.

    Rows are filled up at their left, so the place of a short row's last token is that of the longest row's.
    """
    device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
    longest = max(len(row.ids) for row in rows)
    room = min(longest + max(row.length - len(row.ids) for row in rows), model.config.max_seq_len)
    padding = [longest - len(row.ids) for row in rows]
    padding_B = torch.tensor(padding, device=device) if any(padding) else None
    cache = KVCache(model.config, len(rows), room, dtype, device, padding_B)
    fresh = [[tokenizer.eos_id] * n + row.ids for n, row in zip(padding, rows, strict=True)]
    while cache.length < room and not all(row.finish for row in rows):
        logits_BTV = model(torch.tensor(fresh, device=device), cache=cache)
        assert isinstance(logits_BTV, Tensor)
        # A model's vocabulary may be padded; ids above the tokenizer's stand for nothing.
        logits_BV = logits_BTV[:, -1, : tokenizer.vocab_size]
        for row, logits_1V in zip(rows, logits_BV.split(1), strict=True):
            if not row.finish:
                token = sample(logits_1V, settings.temperature, settings.top_k, settings.top_p, row.generator)
                row.add(int(token), tokenizer, settings.stop)
        # A finished row goes on with what does not matter.
        fresh = [row.ids[-1:] for row in rows]
