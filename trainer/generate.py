"""Text from a checkpoint, in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from common.errors import UserError
from data.tokenizer import load_tokenizer
from models.cache import KVCache
from models.config import ModelConfig
from models.transformer import Transformer
from trainer.checkpoint import load_weights
from trainer.manifest import read_trainer_state
from trainer.sampling import sample


@torch.no_grad()
def generate(
    checkpoint: Path,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    top_p: float = 1.0,
) -> str:
    """Continue `prompt` and return the whole text.

    Args:
        checkpoint: committed checkpoint folder.
        max_tokens: new tokens at most; fewer when the end-of-document token comes or the model's length is reached.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among this many likeliest tokens; None: all.
        seed: of the sampling.
        top_p: sample among the fewest likeliest tokens whose probability reaches this; 1: all. See `sampling.py`.
    """
    state = read_trainer_state(checkpoint)
    config = ModelConfig.model_validate(state["model"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device)
    load_weights(checkpoint, model)
    tokenizer = load_tokenizer(checkpoint / "tokenizer.model")
    ids = tokenizer.encode([prompt])[0] or [tokenizer.eos_id]
    if len(ids) >= config.max_seq_len:
        raise UserError(
            f"--prompt is {len(ids)} tokens long but the model's length is {config.max_seq_len} (model.max_seq_len); "
            f"shorten the prompt"
        )
    generator = torch.Generator(device=device).manual_seed(seed)
    length = min(len(ids) + max_tokens, config.max_seq_len)
    cache = KVCache(config, batch=1, max_len=length, dtype=torch.float32, device=device)
    fresh = ids
    while len(ids) < length:
        logits_BTV = model(torch.tensor([fresh], device=device), cache=cache)
        # A model's vocabulary may be padded; ids above the tokenizer's stand for nothing.
        logits_BV = logits_BTV[:, -1, : tokenizer.vocab_size]
        token = int(sample(logits_BV, temperature, top_k, top_p, generator))
        if token == tokenizer.eos_id:
            break
        ids.append(token)
        fresh = [token]
    return tokenizer.decode(ids)
