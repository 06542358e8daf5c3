"""Products of rows with one matrix out of several, behind operators of our own.

torch's `grouped_mm`, which nothing else here calls, takes bf16 alone once it is compiled or on fake tensors, is wrong
with incoming gradients of stride 0, leaves rows without a matrix uninitialised, and counts no operations. These do all
of that; they compute with it where it is fast, and with a loop over experts elsewhere.

Shapes: N rows, sorted by expert, K inner width, M outer width, E expert. Rows `ends[e-1]:ends[e]` are expert e's, those
from `ends[-1]` on nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_torch_grouped_mm = getattr(F, "grouped_mm", None)
# The fused kernel wants rows of a multiple of 16 bytes, which are eight numbers, and matrices that start at one.
_ALIGN = 8


@torch.library.custom_op("gramian::grouped_mm", mutates_args=())
def grouped_mm(
    x_NK: Tensor, w_EMK: Tensor, ends_E: Tensor, bias_EM: Tensor | None = None, whole: bool = False
) -> Tensor:
    """`y[n] = w[e] x[n] + bias[e]` with e the row's expert, `(N, M)` in x's type; zero in rows of no expert.

    Differentiable once in x, w and bias. Counted as `2 N K M` operations, which is right when each row has an expert
    and else too many: how many have one is not known without looking.

    Args:
        x_NK: as w and bias in fp64, fp32, bf16 or fp16, contiguous or not.
        ends_E: int32 or int64, non-decreasing, on x's device, where the loop waits for them.
        whole: the caller's word that `ends[-1]` is N. Spares the fused kernel a pass that fills the rest with zeros.
    """
    if _is_fused(x_NK, w_EMK):
        y_NM = _fused(x_NK.contiguous(), _dense(w_EMK).mT, ends_E)
        if whole and bias_EM is None:
            return y_NM
        expert_N = torch.searchsorted(ends_E, torch.arange(len(x_NK), device=x_NK.device), right=True)
        if bias_EM is not None:
            y_NM += F.pad(bias_EM, (0, 0, 0, 1))[expert_N]
        return y_NM if whole else y_NM.masked_fill_((expert_N == len(ends_E))[:, None], 0)
    y_NM = x_NK.new_empty(len(x_NK), w_EMK.shape[1])
    filled = 0
    for e, rows in _groups(ends_E):
        if bias_EM is None:
            torch.mm(x_NK[rows], w_EMK[e].t(), out=y_NM[rows])
        else:
            torch.addmm(bias_EM[e], x_NK[rows], w_EMK[e].t(), out=y_NM[rows])
        filled = rows.stop
    y_NM[filled:] = 0
    return y_NM


@torch.library.custom_op("gramian::grouped_outer", mutates_args=())
def grouped_outer(y_NM: Tensor, x_NK: Tensor, ends_E: Tensor) -> Tensor:
    """`(E, M, K)`: for each expert the sum of `y[n] x[n]^T` over its rows, zero if it has none."""
    if _is_fused(y_NM, x_NK):
        return _fused(y_NM.contiguous().t(), x_NK.contiguous(), ends_E)
    w_EMK = y_NM.new_empty(len(ends_E), y_NM.shape[1], x_NK.shape[1])
    for e, rows in _groups(ends_E):
        torch.mm(y_NM[rows].t(), x_NK[rows], out=w_EMK[e])  # of no rows it is zero
    return w_EMK


@torch.library.custom_op("gramian::grouped_sum", mutates_args=())
def grouped_sum(y_NM: Tensor, ends_E: Tensor) -> Tensor:
    """`(E, M)`: for each expert the sum of its rows, added up in fp32 or wider, and always in one order."""
    ones_NK = y_NM.new_ones(len(y_NM), _ALIGN)
    if _is_fused(y_NM, ones_NK):
        return _fused(y_NM.contiguous().t(), ones_NK, ends_E)[..., 0].contiguous()
    sums_EM = y_NM.new_zeros(len(ends_E), y_NM.shape[1])
    for e, rows in _groups(ends_E):
        torch.sum(y_NM[rows], dim=0, out=sums_EM[e])
    return sums_EM


def _is_fused(a: Tensor, b: Tensor) -> bool:
    """Whether torch's kernel for a GPU takes these two."""
    if _torch_grouped_mm is None or not a.is_cuda or a.dtype != torch.bfloat16 or a.shape[0] == 0:
        return False
    widths = (*a.shape[1:], *b.shape[1:])
    return all(t.data_ptr() % (2 * _ALIGN) == 0 for t in (a, b)) and all(width % _ALIGN == 0 for width in widths)


def _fused(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    assert _torch_grouped_mm is not None
    return _torch_grouped_mm(a, b, offs=ends_E.to(torch.int32))


def _dense(w_EMK: Tensor) -> Tensor:
    """With the numbers of each matrix side by side, by rows or by columns."""
    return w_EMK if w_EMK.is_contiguous() or w_EMK.mT.is_contiguous() else w_EMK.contiguous()


def _groups(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert and its rows, which may be none."""
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        yield e, slice(start, end)
        start = end


@grouped_mm.register_fake
def _(x_NK: Tensor, w_EMK: Tensor, ends_E: Tensor, bias_EM: Tensor | None = None, whole: bool = False) -> Tensor:
    return x_NK.new_empty(x_NK.shape[0], w_EMK.shape[1])


@grouped_outer.register_fake
def _(y_NM: Tensor, x_NK: Tensor, ends_E: Tensor) -> Tensor:
    return y_NM.new_empty(ends_E.shape[0], y_NM.shape[1], x_NK.shape[1])


@grouped_sum.register_fake
def _(y_NM: Tensor, ends_E: Tensor) -> Tensor:
    return y_NM.new_empty(ends_E.shape[0], y_NM.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_NK, w_EMK, ends_E, _, ctx.whole = inputs
    ctx.save_for_backward(x_NK, w_EMK, ends_E)


def _backward(ctx: Any, dy_NM: Tensor) -> tuple[Tensor | None, ...]:
    x_NK, w_EMK, ends_E = ctx.saved_tensors
    x_wanted, w_wanted, _, *bias_wanted = ctx.needs_input_grad  # without the arguments that have their defaults
    return (
        grouped_mm(dy_NM, w_EMK.mT, ends_E, None, ctx.whole) if x_wanted else None,
        grouped_outer(dy_NM, x_NK, ends_E) if w_wanted else None,
        None,
        grouped_sum(dy_NM, ends_E) if any(bias_wanted) else None,
        None,
    )


grouped_mm.register_autograd(_backward, setup_context=_setup)


@register_flop_formula([torch.ops.gramian.grouped_mm, torch.ops.gramian.grouped_outer])
def _flops(a_NK: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Of both products: b's second dimension is the width that a does not have."""
    return 2 * a_NK[0] * a_NK[1] * b[1]
