"""Activation checkpointing: which intermediate results of a block are kept for the backward pass, and which are
computed again there (Chen et al. 2016)."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from models.config import ModelConfig
from models.transformer import Transformer

_aten = torch.ops.aten

# What F.scaled_dot_product_attention dispatches to; its math fallback is two bmm instead.
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
}
_VARLEN = "torch_attn._varlen_attn.default"  # within documents, on a GPU; it exists once models/documents.py has asked
# Tokens on their way to experts and back: in the backward pass they need not travel again.
_TRAVEL = {"_c10d_functional.all_to_all_single.default", "_c10d_functional.wait_tensor.default"}
_LINEAR = {_aten.mm.default, _aten.addmm.default}
# A profiler's labels are no part of a block: around experts of their own mesh FSDP2 sets one more when they are
# computed again, which selective checkpointing would take for an operator that it has not seen.
_profiler = torch.ops.profiler
SAC_IGNORED_OPS.update({_profiler._record_function_enter_new.default, _profiler._record_function_exit._RecordFunction})

# Under torch.compile a policy brings a warning of operators that write in place; a block in training has none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda r: "context_fn is passed" not in r.getMessage())


def checkpoint_blocks(model: Transformer, kind: Literal["full", "selective"], every: int) -> None:
    """Checkpoint blocks 0, `every`, 2 `every`, ... in place; an `every` beyond the last block leaves block 0.

    `full` keeps the input of a block alone. `selective` keeps the outputs of attention and of its four projections too,
    and computes again the MLP's products into `d_ff` and everything elementwise: norms, rotation, activation. (In
    Korthikanti et al. 2022 the word means to compute attention again, for its square of scores; fused kernels keep
    none.) The choice goes by what a kept number saves. For a product with inner width N it is 2N operations, whatever
    the output's width; for causal attention over T positions 2T, in a kernel slower than a plain product; for
    elementwise operators a few. So attention is kept and nothing elementwise is. Products over `d_model` save the same
    for each number; of these the MLP's are left out because they have the most numbers: 2 `d_ff` with SwiGLU, where all
    that is kept is four to six `d_model`. The down projection is last in its block: torch stops before it would be
    computed again, so that keeping its output would save nothing.
    """
    for block in list(model.blocks)[::every]:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # rule 11: nothing is drawn
        if kind == "selective":
            policy = partial(selective_policy, _hidden_widths(model.config))
            options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        block.forward = partial(checkpoint, block.forward, **options)


def _hidden_widths(config: ModelConfig) -> frozenset[int]:
    """Widths inside MLPs: of dense blocks, and of what all tokens go through beside their experts."""
    shared = 0 if config.moe is None else config.moe.n_shared_experts * config.d_ff_expert
    return frozenset({config.d_ff, shared} - {0})


def selective_policy(
    hidden: frozenset[int], context: object, operator: object, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Whether an operator's output is kept under `selective`; what torch asks while it runs or traces a block.

    Products are told apart by their widths: one that touches a `hidden` width is an MLP's; those of experts are another
    operator and not kept either. Of the math fallback's two, the one that does not widen is kept, so that the square of
    scores is not. Where a hidden width is also another width of the block, more is computed again than need be.
    """
    keep = operator in _ATTENTION or str(operator) == _VARLEN or str(operator) in _TRAVEL
    if operator in _LINEAR:
        keep = hidden.isdisjoint(args[-1].shape)
    elif operator is _aten.bmm.default:
        _, inner, outer = args[-1].shape
        keep = outer <= inner
    # MUST: the compiler too has to keep this; what is not kept it may keep where that costs nothing.
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
