"""From logits to a drawn token: temperature, then top-k, then top-p (nucleus).

Shapes: B independent draws, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator
) -> Tensor:
    """Draw a token id for each row from `probabilities`; temperature 0 takes the likeliest, and nothing is drawn."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    return torch.multinomial(probabilities(logits_BV, temperature, top_k, top_p), 1, generator=generator)[:, 0]


def probabilities(logits_BV: Tensor, temperature: float, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """The distribution that tokens are drawn from, float64 `(B, V)`.

    1. softmax(logits / temperature).
    2. Top-k: of the `top_k` likeliest tokens, renormalised (Fan et al. 2018).
    3. Top-p: of the smallest set of likeliest tokens whose probability after step 2 reaches `top_p`, renormalised
       (Holtzman et al. 2020, the nucleus).

    Of equally likely tokens the lower id counts as the likelier one, as `argmax` has it. So top-k keeps exactly `top_k`
    tokens, a nucleus is never larger than needed, and `top_k=1` is temperature 0. (The processors of Hugging Face's
    transformers come in this order too, but their top-k keeps all tokens that tie with the last.)

    Args:
        temperature: above 0.
        top_k: at least 1; None: no restriction.
        top_p: above 0 and at most 1; 1: no restriction.
    """
    logits_BV = logits_BV.double()
    # The largest becomes 0 first, so that a tiny temperature gives minus infinities and no infinity.
    scaled_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature
    if top_k is None and top_p >= 1.0:
        return scaled_BV.softmax(dim=-1)
    sorted_BK, ids_BK = scaled_BV.sort(dim=-1, descending=True, stable=True)
    sorted_BK, ids_BK = sorted_BK[:, :top_k], ids_BK[:, :top_k]
    likeliest_BK = sorted_BK.softmax(dim=-1)
    if top_p < 1.0:
        # A token is in the nucleus as long as those before it do not reach top_p without it: the first always is.
        before_BK = likeliest_BK.cumsum(dim=-1) - likeliest_BK
        likeliest_BK = likeliest_BK.masked_fill(before_BK >= top_p, 0.0)
        likeliest_BK = likeliest_BK / likeliest_BK.sum(dim=-1, keepdim=True)
    return torch.zeros_like(scaled_BV).scatter(-1, ids_BK, likeliest_BK)
