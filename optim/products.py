"""Matrix products of rules: in full precision, of symmetric results only half, and the same bits in any batch.

A CPU's products round by a matrix' address and by whether it is in a batch; so each is taken alone, where it is aligned
as memory of its own would be. On a GPU they go in batches, and are the same up to rounding.

Shapes: B matrices, M x K and K x N factors; S x S symmetric products of S x K.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Rows from which on, on a CPU, half of a symmetric product's blocks and mirroring beat the whole product: by a seventh
# at 384 rows, by a third at 1024. Elsewhere it is not measured, and products are whole.
_WORTH_SPLITTING = 256
# Products of a CPU round by a matrix' address. This many bytes are what torch aligns memory to, and a register.
_ALIGNMENT = 64


def product(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """Matrix products in the precision of their factors, never TF32: it gives Gram matrices negative eigenvalues."""
    if a_BMK.is_cuda:
        with full_precision():
            return a_BMK @ b_BKN
    result_BMN = a_BMK.new_empty(len(a_BMK), a_BMK.shape[1], b_BKN.shape[2])
    for a_MK, b_KN, result_MN in zip(a_BMK, b_BKN, result_BMN, strict=True):
        if _is_alone(result_MN):
            torch.mm(_alone(a_MK), _alone(b_KN), out=result_MN)
        else:
            result_MN.copy_(_alone(a_MK) @ _alone(b_KN))
    return result_BMN


def accumulate_gram(total_BMM: Tensor, a_BMK: Tensor, beta: float) -> None:
    """In place: total <- beta total + (1 - beta) A A^T, or total + A A^T if beta is 1; in full precision too."""
    alpha = 1.0 if beta == 1.0 else 1.0 - beta
    if a_BMK.is_cuda:
        with full_precision():
            total_BMM.baddbmm_(a_BMK, a_BMK.mT, beta=beta, alpha=alpha)
        return
    for total_MM, a_MK in zip(total_BMM, a_BMK, strict=True):
        total_1MM, a_1MK = total_MM[None], _alone(a_MK)[None]
        out_1MM = total_1MM if _is_alone(total_MM) else total_1MM.clone()
        total_1MM.copy_(symmetric_product(a_1MK, a_1MK, out_1MM, beta, alpha, out_1MM))


def symmetric_product(
    x_BSK: Tensor,
    y_BSK: Tensor,
    z_BSS: Tensor | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
    out_BSS: Tensor | None = None,
) -> Tensor:
    """beta Z + alpha X Y^T where that is symmetric: large blocks above the diagonal are mirrored, not computed."""
    s = x_BSK.shape[1]
    if s < _WORTH_SPLITTING or not x_BSK.is_cpu:
        return _product(x_BSK, y_BSK, z_BSS, beta, alpha, out_BSS)
    if out_BSS is None:
        out_BSS = x_BSK.new_empty(len(x_BSK), s, s)
    top, bottom = slice(0, s // 2), slice(s // 2, s)
    for half in (top, bottom):
        z = None if z_BSS is None else z_BSS[:, half, half]
        symmetric_product(x_BSK[:, half], y_BSK[:, half], z, beta, alpha, out_BSS[:, half, half])
    z = None if z_BSS is None else z_BSS[:, bottom, top]
    below_BSS = _product(x_BSK[:, bottom], y_BSK[:, top], z, beta, alpha, out_BSS[:, bottom, top])
    out_BSS[:, top, bottom] = below_BSS.mT
    return out_BSS


def symmetric_product_flops(s: int, k: int) -> float:
    """Floating-point operations of `symmetric_product` for one matrix of s x k on a CPU."""
    if s < _WORTH_SPLITTING:
        return 2.0 * s * s * k
    top, bottom = s // 2, s - s // 2
    return symmetric_product_flops(top, k) + symmetric_product_flops(bottom, k) + 2.0 * top * bottom * k


@contextmanager
def full_precision() -> Iterator[None]:
    """Without TF32 inside, which gives Gram matrices negative eigenvalues."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def _is_alone(a_MK: Tensor) -> bool:
    """Whether a CPU's products round as they do where the matrix has memory of its own, out of any batch."""
    return a_MK.data_ptr() % _ALIGNMENT == 0 and (a_MK.is_contiguous() or a_MK.mT.is_contiguous())


def _alone(a_MK: Tensor) -> Tensor:
    return a_MK if _is_alone(a_MK) else a_MK.clone()


def _product(
    x_BSK: Tensor, y_BTK: Tensor, z_BST: Tensor | None, beta: float, alpha: float, out_BST: Tensor | None
) -> Tensor:
    """beta Z + alpha X Y^T."""
    if z_BST is None:
        return torch.bmm(x_BSK, y_BTK.mT, out=out_BST)
    return torch.baddbmm(z_BST, x_BSK, y_BTK.mT, beta=beta, alpha=alpha, out=out_BST)
