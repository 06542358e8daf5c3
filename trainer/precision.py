"""What is computed in which precision. `train.precision` is fp32, bf16 or fp16.

In the config's precision:

    matrix products and attention of the blocks     models/attention.py, models/layers.py
    the head's product                              `_chunk_loss` in models/loss.py, `forward` in models/transformer.py
    activations between them (the residual stream,  models/transformer.py, models/layers.py
      the MLP's nonlinearity) and their gradients
    gathered weights; a weight's gradient of one    `mixed_precision` below
      micro-batch, as it leaves the backward pass

In fp32, whatever the config says:

    master weights and optimizer state              trainer/engines/native.py; the weights are made in fp32
    sums of gradients over micro-batches and ranks  `REDUCE_DTYPE` below
    sums of gradients inside a micro-batch: over    `_embed` in models/transformer.py, `summed_cross_entropy` in
      tokens of one id, over chunks of the head       models/loss.py
    norms                                           `Norm` in models/layers.py
    rotary tables, and the rotation                 models/positions.py
    softmax of attention                            inside torch's kernel; scores never leave it
      where scores are written out                  models/scores.py: from the products on, to the weights
    the router's logits, and all that follows from  models/moe.py
      them; the sum over a token's experts
    softmax and cross-entropy of the logits         `_chunk_loss` in models/loss.py
    the sum of losses of one micro-batch            models/loss.py

In fp64:

    sums of losses over micro-batches and ranks     `train_step` in trainer/loop.py, trainer/evaluate.py
    the gradient norm                               trainer/clip.py

Generation computes in fp32. fp16 cannot hold small gradients, so the loss is scaled: trainer/scaler.py.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# What FSDP2 adds up gradients in, those of micro-batches and those of ranks.
REDUCE_DTYPE = torch.float32


def param_dtype(precision: str) -> torch.dtype:
    """Type of the weights that blocks compute with, and so of their matrix products."""
    return _DTYPES[precision]


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """The policy of every FSDP2 module. In fp32 nothing is cast."""
    # Inputs are not cast, because the rotary table is one of them. Activations have the weights' type from the start.
    return MixedPrecisionPolicy(
        param_dtype=param_dtype(precision), reduce_dtype=REDUCE_DTYPE, cast_forward_inputs=False
    )
