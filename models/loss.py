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
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, mask_N: Tensor, max_logits: int = MAX_LOGITS
) -> Tensor:
    """Sum over the tokens whose mask is true of `-log softmax(W h)[target]`: an fp32 scalar (fp64 for fp64 inputs).

    Logits are taken in chunks of at most `max_logits` numbers (but at least one token). Several chunks are each
    recomputed in the backward pass (Chen et al. 2016), so that one chunk's logits are alive at a time; a single chunk
    that fits is kept. Targets where the mask is false are not looked at. `targets_N` is int64, `mask_N` bool.
    """
    targets_N = targets_N.masked_fill(~mask_N, _IGNORED)
    n_tokens, n_vocab = hidden_ND.shape[0], weight_VD.shape[0]
    size = max(1, max_logits // n_vocab)
    if n_tokens <= size:
        return _chunk_loss(hidden_ND, weight_VD, targets_N)
    total = hidden_ND.new_zeros((), dtype=compute_dtype(hidden_ND.dtype))
    # Autograd adds up the chunks' gradients in the type of the tensor that the chunks share, so that is an fp32 one.
    weight_VD = weight_VD.to(compute_dtype(weight_VD.dtype))
    for h, t in zip(hidden_ND.split(size), targets_N.split(size), strict=True):
        total = total + checkpoint(_chunk_loss, h, weight_VD, t, use_reentrant=False, preserve_rng_state=False)
    return total


def _chunk_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    logits_NV = F.linear(hidden_ND, weight_VD.to(hidden_ND.dtype))
    logits_NV = logits_NV.to(compute_dtype(logits_NV.dtype))
    return F.cross_entropy(logits_NV, targets_N, ignore_index=_IGNORED, reduction="sum")
