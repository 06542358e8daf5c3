"""Text from models and checkpoints: prompts side by side, ends of all kinds, odd vocabularies and odd prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from models.config import ModelConfig
from models.transformer import Transformer
from tests.gang import Gang
from tests.runs import TINY, train_worker
from trainer.generate import Continuation, Settings, continue_prompts, generate
from trainer.rundir import RunDirectory

LENGTH = 24  # of the models below
FAMILIES: dict[str, dict[str, Any]] = {
    "rope, grouped": {"n_kv_heads": 2},
    "learned positions": {"position": "learned", "norm": "layernorm", "attention_bias": True},
    "sinusoidal, post-norm": {"position": "sinusoidal", "norm_placement": "post"},
    "windows": {"attention_window": 4, "attention_global_every": 2, "rope_theta_local": 100.0, "qk_norm": True},
    "sinks": {"attention_sinks": True, "attention_window": 3, "attention_global_every": 2},
    "relative, softcap": {"position": "relative", "relative_clip": 5, "attention_softcap": 2.0, "logit_softcap": 3.0},
    "experts": {"moe": {"n_experts": 4, "top_k": 2, "n_shared_experts": 1}},
    "experts with a capacity": {"moe": {"n_experts": 4, "top_k": 1, "normalize": False, "capacity_factor": 0.5}},
}
# From empty to nearly all that a model can hold.
PROMPTS = ["abc", "", "the quick brown fox is", "zz top", "abc"]
GREEDY = Settings(max_tokens=12, temperature=0.0, top_k=None, seed=0)
SAMPLED = replace(GREEDY, temperature=1.0)


class Letters:
    """A tokenizer of letters, spaces and a few longer pieces, which no prompt is encoded to."""

    pieces = ("", *"abcdefghijklmnopqrstuvwxyz ", "xyz", "ab ", "th", " a")
    vocab_size = len(pieces)

    def __init__(self, eos_id: int = 0) -> None:
        self.eos_id = eos_id

    def encode(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        return [[self.pieces.index(letter) for letter in text] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in ids if token != self.eos_id)


def _model(seed: int = 0, **keys: Any) -> Transformer:
    """Random in all parameters, and in float64, where a batch's rounding decides no token."""
    config = ModelConfig(
        vocab_size=40, n_layers=2, d_model=32, n_heads=4, d_ff=48, max_seq_len=LENGTH, **keys
    )  # more rows than tokens
    model = Transformer(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=generator) + (p.ndim == 1))
    return model


def _continue(model: Transformer, prompts: Sequence[str], settings: Settings, eos: int = 0) -> list[Continuation]:
    return continue_prompts(model, Letters(eos), prompts, settings)  # type: ignore[arg-type]


def _piece(one: Continuation, place: int) -> str:
    return Letters.pieces[one.tokens[place]] if place < len(one.tokens) else ""


@torch.no_grad()
def _recomputed(model: Transformer, prompt: str, n: int) -> list[int]:
    """The likeliest tokens, from a full forward for each."""
    ids = Letters().encode([prompt])[0] or [0]
    start = len(ids)
    while len(ids) < min(start + n, LENGTH):
        token = int(model(torch.tensor([ids]))[0, -1, : Letters.vocab_size].argmax())
        if token == 0:
            break
        ids.append(token)
    return ids[start:]


@pytest.mark.parametrize("keys", FAMILIES.values(), ids=FAMILIES)
def test_greedy_side_by_side_is_greedy_alone_and_without_a_cache(keys: dict[str, Any]) -> None:
    """Also where rows reach the model's length one after the other."""
    model = _model(**keys)
    # Capacity is for rows, and so for training alone.
    dropless = _model(**{**keys, "moe": {**keys["moe"], "capacity_factor": None}}) if "moe" in keys else model
    for n in (1, 12, 100):
        settings = replace(GREEDY, max_tokens=n)
        together = _continue(model, PROMPTS, settings)
        assert together == [_continue(model, [prompt], settings)[0] for prompt in PROMPTS]
        assert [one.tokens for one in together] == [_recomputed(dropless, prompt, n) for prompt in PROMPTS]
        assert [one.prompt for one in together] == PROMPTS
        assert together[0] == together[4]
    whole = [(len(one.prompt) or 1) + len(one.tokens) == LENGTH for one in together]
    assert whole == [one.finish == "length" for one in together]
    assert sum(whole) >= 3
    assert len({tuple(one.tokens) for one in together}) == 4


def test_draws_depend_on_a_prompts_place_and_on_no_other_prompt() -> None:
    model = _model()
    together = _continue(model, PROMPTS, SAMPLED)
    for i, prompt in enumerate(PROMPTS):
        assert _continue(model, [prompt], replace(SAMPLED, seed=i)) == [together[i]]
    assert together[:3] == _continue(model, [*PROMPTS[:3], "quite", "other"], SAMPLED)[:3]
    assert together[0].tokens != together[4].tokens
    assert together != _continue(model, PROMPTS, replace(SAMPLED, seed=9))
    _continue(model, PROMPTS, replace(SAMPLED, seed=2**63 - 1))  # the largest seed has one after it


def test_the_end_of_a_document_ends_one_row() -> None:
    model = _model()
    plain = _continue(model, PROMPTS[:4], GREEDY)
    drawn = [set(one.tokens) for one in plain]
    in_prompts = {token for ids in Letters().encode(PROMPTS) for token in ids}
    (eos, row), *_ = [
        (token, row)
        for row, tokens in enumerate(drawn)
        for token in tokens
        if sum(token in others for others in drawn) == 1 and token not in in_prompts and token != plain[row].tokens[0]
    ]
    # The empty prompt starts with the end of a document, and so is another one now.
    rows = [i for i, prompt in enumerate(PROMPTS[:4]) if prompt]
    ended = _continue(model, [PROMPTS[i] for i in rows], GREEDY, eos)
    assert row in rows
    for i, one in zip(rows, ended, strict=True):
        if i == row:
            assert one.tokens == plain[i].tokens[: plain[i].tokens.index(eos)]
            assert (one.finish, len(one.tokens) > 0) == ("end", True)
        else:
            assert one == plain[i]


def test_stop_texts() -> None:
    """Wherever in a continuation they start and end, within tokens and across them; the first to appear counts."""
    model = _model(seed=2)
    plain = _continue(model, PROMPTS, GREEDY)
    assert any(len(Letters.pieces[token]) > 1 for one in plain for token in one.tokens)
    for row in (0, 3):
        text = plain[row].text
        for start in range(len(text)):
            for stop in (text[start : start + 1], text[start : start + 4]):
                found = _continue(model, PROMPTS, replace(GREEDY, stop=("no such text", stop)))
                for other, cut in zip(plain, found, strict=True):
                    place = other.text.find(stop)
                    assert cut.text == (other.text if place < 0 else other.text[:place])
                    assert cut.finish == (other.finish if place < 0 else "stop")
                    assert cut.tokens == other.tokens[: len(cut.tokens)]
                    assert Letters().decode(cut.tokens).startswith(cut.text)
                assert found[row].finish == "stop"
    text = plain[0].text
    assert _continue(model, PROMPTS, replace(GREEDY, stop=(text[6:8], text[2:4])))[0].text == text[:2]
    assert text.index(text[6:8]) == 6
    # Two that are whole with the same token.
    row, before = next((i, k) for i, one in enumerate(plain) for k in range(1, 9) if len(_piece(one, k)) > 1)
    end = len(Letters().decode(plain[row].tokens[:before])) + 1
    text = plain[row].text[:end]
    assert _continue(model, PROMPTS, replace(GREEDY, stop=(text[1:], text)))[row].text == ""


def test_a_stop_text_of_the_prompt_does_not_count() -> None:
    model = _model(seed=2)
    (plain,) = _continue(model, ["quick"], GREEDY)
    for stop in ("qui", "quick", "ck" + plain.text[:1]):
        assert stop not in plain.text
        assert _continue(model, ["quick"], replace(GREEDY, stop=(stop,))) == [plain]


def test_a_prompt_that_leaves_no_room_is_named() -> None:
    with pytest.raises(UserError, match=r"^--prompt 2 of 3 \('xxxxxxxxxxxxxxxxxxxx'\.\.\.\) is 24 tokens long but "):
        _continue(_model(), ["a", "x" * LENGTH, "b"], GREEDY)
    with pytest.raises(UserError, match=r"^--prompt is 24 tokens long but the model's length is 24 \(model\.max"):
        _continue(_model(), ["x" * LENGTH], GREEDY)
    assert len(_continue(_model(), ["x" * (LENGTH - 1)], GREEDY)[0].tokens) <= 1


@pytest.fixture(scope="module")
def checkpoint(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with 4096 rows for 512 tokens, hardly trained: seven of eight draws would be of no token."""
    folder = tmp_path_factory.mktemp("padded")
    keys = ["model.vocab_size=4096", "train.steps=1", "eval.batches=0"]
    assert gang.run(train_worker, [TINY, f"data.corpus={corpus}", f"run.dir={folder}", *keys], world=1) == [0]
    return RunDirectory(folder / "tiny").checkpoint(1)


def test_padding_of_the_vocabulary_is_never_drawn(checkpoint: Path) -> None:
    (one,) = generate(checkpoint, ["def "], Settings(40, temperature=1.0, top_k=None, seed=0))
    assert (len(one.tokens), one.finish) == (40, "length")
    assert max(one.tokens) < 512


def test_any_prompt(checkpoint: Path) -> None:
    """An empty one, and what the tokenizer writes in bytes; in fp32, as the command does."""
    settings = Settings(5, temperature=1.0, top_k=None, seed=0)
    prompts = ["", "\u00e9\u2581\0", "def f(x):"]
    found = generate(checkpoint, prompts, settings)
    for i, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
        assert (one.prompt, len(one.tokens), one.finish) == (prompt, 5, "length")
        assert [one] == generate(checkpoint, [prompt], replace(settings, seed=i))
