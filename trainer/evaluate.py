"""Loss on held-out documents, in nats per token and bits per byte."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from data.loader import Batches
from trainer.batch import micro_batches
from trainer.config import TrainingConfig
from trainer.runtime import Runtime


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Batches, token_bytes: np.ndarray, runtime: Runtime, config: TrainingConfig
) -> dict[str, float]:
    """Evaluate the first `eval.batches` global batches of the held-out split; the same rows at every layout.

    Args:
        token_bytes: bytes of text that each token id stands for, (V,). Bits per byte divides by the bytes of the
            predicted tokens, so that tokenizers can be compared.

    Raises:
        Stopping: a rank was told to stop.
    """
    loss, tokens, text_bytes = 0.0, 0, 0
    for batch in batches.eval_batches(config.eval.batches, runtime.data_rank, runtime.data_ranks):
        runtime.pulse.at("evaluation")
        runtime.count()
        tokens += int(batch.mask.sum())
        text_bytes += int(token_bytes[batch.targets[batch.mask]].sum())
        for micro in micro_batches(batch, config.train.micro_batch_size, runtime.device):
            loss += float(model(*micro).cross_entropy.double())
    loss, n_tokens, n_bytes = (runtime.sum(value) for value in (loss, tokens, text_bytes))
    return {
        "eval_loss": loss / max(1.0, n_tokens),
        "eval_bits_per_byte": loss / math.log(2) / max(1.0, n_bytes),
        "eval_tokens": n_tokens,
    }
