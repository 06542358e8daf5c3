"""Parameters and floating-point operations of a model, from its config alone. Imports torch only to count."""

from __future__ import annotations

from typing import NamedTuple

from models.config import ModelConfig

PARTS = ("embedding", "attention", "mlp", "router", "experts", "shared", "norms", "head")


class Part(NamedTuple):
    """Parameters of one kind, in one block and in the model."""

    name: str
    """Of `PARTS`, or `final norm`: the one of `norms` that is outside the blocks."""
    in_block: int
    """Of each block that has any, which are all alike; 0 for what is outside the blocks."""
    blocks: int
    """How many blocks have any."""
    total: int
    active: int
    """Those that one token uses: of experts the share that it goes to, of all else everything."""


def parameter_parts(config: ModelConfig) -> list[Part]:
    """What the model consists of, in the order of `PARTS`; what it does not have is left out.

    Learned positions belong to the embedding, sinks and relative positions to attention, its norms to the norms.
    Buffers, such as the bias for selecting experts, are no parameters. Counted on the meta device, so no memory is
    used, whatever the size.
    """
    import torch

    from models.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(config)
    counts: dict[str, dict[str, int]] = {name: {} for name in (*PARTS[:-1], "final norm", "head")}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        block = words[1] if words[0] == "blocks" else ""
        of_part = counts[_part(words[2:] if block else words, inside=bool(block))]
        of_part[block] = of_part.get(block, 0) + parameter.numel()
    parts = []
    for name, by_block in counts.items():
        if by_block:
            inside, total = [n for block, n in by_block.items() if block], sum(by_block.values())
            assert len(set(inside)) <= 1
            moe = config.moe if name == "experts" else None
            active = total if moe is None else total * moe.top_k // moe.n_experts
            parts.append(Part(name, inside[0] if inside else 0, len(inside), total, active))
    return parts


def _part(words: list[str], inside: bool) -> str:
    if any(word.endswith("norm") for word in words):
        return "norms" if inside else "final norm"
    if words[0] == "moe":
        return words[1]
    return words[0] if words[0] in ("attention", "mlp", "head") else "embedding"


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by part (`PARTS`; the head is 0 if tied), `total`, and `active`: those that one token uses."""
    parts = parameter_parts(config)
    counts = {name: sum(part.total for part in parts if part.name == name) for name in PARTS}
    counts["norms"] += sum(part.total for part in parts if part.name == "final norm")
    counts["total"] = sum(part.total for part in parts)
    counts["active"] = sum(part.active for part in parts)
    return counts


def forward_flops_per_token(config: ModelConfig, seq_len: int, causal: bool) -> int:
    """Operations (a multiply and an add are two) of one token's forward pass in a sequence of T = `seq_len` tokens.

    Two per weight of every matrix product (Kaplan et al. 2020, table 1): the head included and the embedding's lookup
    not, in a block with experts the router, the `top_k` experts of a token and the shared ones. And
    `4 n_heads head_dim` per key for scores and values (Narayanan et al. 2021, appendix), where a token has

    - T keys if not `causal`: the full square of positions, which is what kernels without knowledge of the mask
      multiply and torch's counter counts;
    - else, in the mean over positions, as many as it sees: `w - w^2 / 2T`, where w is the block's window or T, which is
      T / 2 without a window: the usual convention, `w / 2T` of a key less than exact.

    An upper bound where less is done: in a row of several documents that are kept apart, and of tokens that exceed an
    expert's capacity. Both depend on the batch and not on the config.
    """
    width, gates = config.d_model, 3 if config.gated else 2
    weights, keys = width * config.vocab, 0.0
    for layer in range(config.n_layers):
        weights += 2 * width * (config.n_heads + config.kv_heads) * config.d_head
        if config.moe is not None and config.is_sparse(layer):
            experts = config.moe.top_k + config.moe.n_shared_experts
            weights += width * (config.moe.n_experts + gates * config.d_ff_expert * experts)
        else:
            weights += gates * width * config.d_ff
        window = min(seq_len, config.window_of(layer) or seq_len)
        keys += window - window**2 / (2 * seq_len) if causal and seq_len else seq_len
    return 2 * weights + round(4 * config.n_heads * config.d_head * keys)


def training_flops_per_token(config: ModelConfig, seq_len: int, causal: bool) -> int:
    """Forward and backward: the backward pass has two products for each one of the forward, so three times that."""
    return 3 * forward_flops_per_token(config, seq_len, causal)
