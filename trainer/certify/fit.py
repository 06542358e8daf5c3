"""Whether one process can hold the whole model, and a smaller one in its place if not."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import UserError
from models.config import ModelConfig
from models.flops import parameter_counts
from trainer.layout import Layout

# Bytes per parameter of the plain process: weight, gradient, the weight before the update, two numbers of optimizer
# state, all fp32; and as much again for half-precision copies and for one parameter's differences in float64.
_REFERENCE = 32
# Of the layout: weight, gradient and state, sharded; and a block's parameters gathered.
_LAYOUT = 20
_USED = 0.8  # of what is free
_MIN_LAYERS, _MIN_WIDTH = 2, 8


def memory_needed(model: ModelConfig, layout: Layout, ranks_here: int) -> int:
    """Bytes that certifying takes where `ranks_here` ranks share one memory with the plain process: an upper estimate.

    Activations are counted as Korthikanti et al. 2023 (section 4.1) count them, without the attention matrix.
    """
    parameters = parameter_counts(model)["total"]
    stages = layout.stages or (layout,)
    tokens = max(stage.micro_batch_size * stage.seq_len for stage in stages)
    hidden = model.d_ff
    if (moe := model.moe) is not None:
        hidden = max(hidden, (moe.top_k + moe.n_shared_experts) * model.d_ff_expert)
    width = 16 * model.d_model + 4 * hidden
    activations = tokens * (4 * model.n_layers * width + 4 * 4 * model.vocab)
    return (
        _REFERENCE * parameters
        + _LAYOUT * parameters * ranks_here // layout.dp_shard
        + activations * (1 + ranks_here)
        + 16 * max(stage.global_batch_size * stage.seq_len for stage in stages)
    )


def model_that_fits(model: ModelConfig, layout: Layout, ranks_here: int, memory: int, may_shrink: bool) -> ModelConfig:
    """The model itself, or the largest of a row of smaller ones that fits: fewer layers first, then narrower.

    Heads, vocabulary and everything else stay, so that what the layout divides is still divisible.

    Raises:
        UserError: it does not fit and may not be shrunken, or no smaller one fits either.
    """

    def fits(candidate: ModelConfig) -> bool:
        return memory_needed(candidate, layout, ranks_here) <= _USED * memory

    if fits(model):
        return model
    need = memory_needed(model, layout, ranks_here)
    if not may_shrink:
        raise UserError(
            f"the whole model does not fit in one process beside its ranks: it takes about {_gib(need)} and "
            f"{_gib(memory)} are free; leave --no-shrink out, or set model.n_layers or train.micro_batch_size to less"
        )
    smaller = _smaller(model, fits)
    if smaller is None:
        raise UserError(
            f"no smaller model of this vocabulary fits in the {_gib(memory)} that are free; "
            f"set train.micro_batch_size, train.global_batch_size or data.seq_len to less"
        )
    return smaller


def _smaller(model: ModelConfig, fits: Callable[[ModelConfig], bool]) -> ModelConfig | None:
    layers, width, hidden, head = model.n_layers, model.d_model, model.d_ff, model.d_head
    while True:
        if layers > _MIN_LAYERS:
            layers = max(_MIN_LAYERS, layers // 2)
        elif width % 2 == 0 and hidden % 2 == 0 and head % 4 == 0 and width // 2 >= _MIN_WIDTH:
            width, hidden, head = width // 2, hidden // 2, head // 2
        else:
            return None
        tree = model.model_dump() | {"n_layers": layers, "d_model": width, "d_ff": hidden, "head_dim": head}
        if model.moe is not None:
            dense = min(model.moe.n_dense_layers, layers - 1)
            tree["moe"] |= {"d_ff": max(1, model.d_ff_expert * hidden // model.d_ff), "n_dense_layers": dense}
        candidate = ModelConfig.model_validate(tree)
        if fits(candidate):
            return candidate


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
