"""Cross-entropy that never holds the logits of all tokens.

Shapes: N tokens (batch and position flattened), D width of the residual stream, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.layers import compute_dtype

# 128 MiB of fp32; a chunk has about three such tensors at its peak (logits, log-probabilities, their gradient).
MAX_LOGITS = 2**25
_IGNORED = -100


def summed_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    mask_N: Tensor,
    max_logits: int = MAX_LOGITS,
    softcap: float | None = None,
) -> Tensor:
    """Sum over the tokens whose mask is true of `-log softmax(W h)[target]`: an fp32 scalar (fp64 for fp64 inputs).

    With a `softcap`, of `-log softmax(cap(W h))[target]`; see `capped`.

    Logits are taken in chunks of at most `max_logits` numbers (but at least one token). Several chunks are each
    recomputed in the backward pass (Chen et al. 2016), so that one chunk's logits are alive at a time; a single chunk
    that fits is kept. Targets where the mask is false are not looked at. `targets_N` is int64, `mask_N` bool.
    """
    targets_N = targets_N.masked_fill(~mask_N, _IGNORED)
    n_tokens, n_vocab = hidden_ND.shape[0], weight_VD.shape[0]
    size = max(1, max_logits // n_vocab)
    if n_tokens <= size:
        return _chunk_loss(hidden_ND, weight_VD, targets_N, softcap)
    total = hidden_ND.new_zeros((), dtype=compute_dtype(hidden_ND.dtype))
    # Autograd adds up the chunks' gradients in the type of the tensor that the chunks share, so that is an fp32 one.
    weight_VD = weight_VD.to(compute_dtype(weight_VD.dtype))
    for h, t in zip(hidden_ND.split(size), targets_N.split(size), strict=True):
        total = total + checkpoint(_chunk_loss, h, weight_VD, t, softcap, use_reentrant=False, preserve_rng_state=False)
    return total


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """`c tanh(logits / c)` (Gemma Team 2024, section 2), or the logits themselves."""
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def _chunk_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None) -> Tensor:
    logits_NV = F.linear(hidden_ND, weight_VD.to(hidden_ND.dtype))
    logits_NV = capped(logits_NV.to(compute_dtype(logits_NV.dtype)), softcap)
    return F.cross_entropy(logits_NV, targets_N, ignore_index=_IGNORED, reduction="sum")
