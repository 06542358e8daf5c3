"""Parameters and floating-point operations of a model, from its config alone. Imports torch only to count."""

from __future__ import annotations

from models.config import ModelConfig


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part: embedding (with learned positions), attention, mlp, norms, head (0 if tied), and total.

    Counted on the meta device, so no memory is used, whatever the size.
    """
    import torch

    from models.layers import Norm
    from models.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(config)
    counts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head"), 0)
    for path, module in model.named_modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        if isinstance(module, Norm):
            counts["norms"] += own
        elif ".attention." in path:
            counts["attention"] += own
        elif ".mlp." in path:
            counts["mlp"] += own
        elif module is model.head:
            counts["head"] += own
        else:
            counts["embedding"] += own
    counts["total"] = sum(counts.values())
    return counts


def forward_flops_per_token(config: ModelConfig, seq_len: int, causal: bool) -> int:
    """Operations (a multiply and an add are two) of one token's forward pass in a sequence of `seq_len` tokens.

    Two per weight of every matrix product, the head included and the embedding's lookup not, plus
    `4 n_layers n_heads head_dim seq_len` for scores and values over the full square of positions, half of it if
    `causal` (Narayanan et al. 2021, appendix, whose count is the full square). A row of several documents that are kept
    apart needs less than its square, by a factor that is its batch's and not the config's: then this is an upper bound.
    """
    matrices_per_mlp = 3 if config.activation == "swiglu" else 2
    attention = 2 * config.d_model * (config.n_heads + config.kv_heads) * config.d_head
    mlp = matrices_per_mlp * config.d_model * config.d_ff
    weights = config.n_layers * (attention + mlp) + config.d_model * config.vocab
    square = 4 * config.n_layers * config.n_heads * config.d_head * seq_len
    return 2 * weights + (square // 2 if causal else square)


def training_flops_per_token(config: ModelConfig, seq_len: int, causal: bool) -> int:
    """Forward and backward: the backward pass has two products for each one of the forward, so three times that."""
    return 3 * forward_flops_per_token(config, seq_len, causal)
