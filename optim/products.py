"""Matrix products of rules: in full precision, of symmetric results only half, and the same bits in any batch.

A CPU's products may round by a matrix' address and by whether it is in a batch; so each is taken where it is aligned as
memory of its own would be, and in a batch only where a trial shows that this changes nothing. On a GPU all go in
batches, and are the same up to rounding.

Shapes: B matrices, C of them at once, M x K and K x N factors; S x S symmetric products of S x K.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Rows from which on, on a CPU, half of a symmetric product's blocks and mirroring beat the whole product: by a seventh
# at 384 rows, by a third at 1024. Elsewhere it is not measured, and products are whole.
_WORTH_SPLITTING = 256
# Products of a CPU round by a matrix' address. This many bytes are what torch aligns memory to, and a register.
_ALIGNMENT = 64
# A CPU takes small matrices, of so many entries at most, in batches of so many: it saves calls, a twentieth of the time
# at 128 x 256. With larger ones, or more of them, it would only leave the cache.
_SMALL_MATRIX, _BATCH = 1 << 16, 4


def product(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """Matrix products in the precision of their factors, never TF32: it gives Gram matrices negative eigenvalues."""
    if a_BMK.is_cuda:
        with full_precision():
            return a_BMK @ b_BKN
    result_BMN = a_BMK.new_empty(len(a_BMK), a_BMK.shape[1], b_BKN.shape[2])
    sizes = batches(torch.bmm, a_BMK, b_BKN)
    for a_CMK, b_CKN, c_CMN in zip(*(x.split(sizes) for x in (a_BMK, b_BKN, result_BMN)), strict=True):
        if is_alone(c_CMN):
            torch.bmm(_alone(a_CMK), _alone(b_CKN), out=c_CMN)
        else:
            c_CMN.copy_(torch.bmm(_alone(a_CMK), _alone(b_CKN)))
    return result_BMN


def accumulate_gram(total_BMM: Tensor, a_BMK: Tensor, beta: float) -> None:
    """In place: total <- beta total + (1 - beta) A A^T, or total + A A^T if beta is 1; in full precision too."""
    alpha = 1.0 if beta == 1.0 else 1.0 - beta
    if a_BMK.is_cuda:
        with full_precision():
            total_BMM.baddbmm_(a_BMK, a_BMK.mT, beta=beta, alpha=alpha)
        return
    sizes = batches(_accumulated, total_BMM, a_BMK)
    for total_CMM, a_CMK in zip(total_BMM.split(sizes), a_BMK.split(sizes), strict=True):
        if is_alone(total_CMM):
            _accumulated(total_CMM, _alone(a_CMK), beta, alpha)
        else:
            total_CMM.copy_(_accumulated(total_CMM.clone(), _alone(a_CMK), beta, alpha))


def _accumulated(total_BMM: Tensor, a_BMK: Tensor, beta: float = 0.5, alpha: float = 0.5) -> Tensor:
    return symmetric_product(a_BMK, a_BMK, total_BMM, beta, alpha, total_BMM)


def batches(function: Callable[..., Tensor], *operands: Tensor, options: tuple[Hashable, ...] = ()) -> list[int]:
    """How many of these matrices a CPU should take at once, one after the other: some where they are small, which saves
    calls, and where it changes no bit; else one.

    Args:
        function: gives a tensor with a leading dimension of matrices from `operands` and `options`.
    """
    n, chunk = len(operands[0]), 1
    if n >= _BATCH and max(math.prod(x.shape[1:]) for x in operands) <= _SMALL_MATRIX and all(map(is_alone, operands)):
        layouts = tuple((*x.shape[1:], x.is_contiguous()) for x in operands)
        if _is_exact_in_batches(function, layouts, options, operands[0].dtype, torch.get_num_threads()):
            chunk = _BATCH
    return [chunk] * (n // chunk) + [1] * (n % chunk)


@functools.cache
def _is_exact_in_batches(
    function: Callable[..., Tensor],
    layouts: tuple[tuple[int, int, bool], ...],
    options: tuple[Hashable, ...],
    dtype: torch.dtype,
    threads: int,
) -> bool:
    """Whether matrices of a batch get, on this CPU, the bits that they get alone.

    The library chooses its kernels by shapes, addresses and threads, not by values: so one trial tells.
    """
    generator = torch.Generator().manual_seed(0)
    operands = []
    for m, n, contiguous in layouts:
        sides = (m, n) if contiguous else (n, m)
        x = torch.rand(_BATCH, *sides, generator=generator, dtype=torch.float32).div_(math.sqrt(m * n)).to(dtype)
        operands.append(x if contiguous else x.mT)
    alone = [function(*(x[i : i + 1].clone() for x in operands), *options) for i in range(_BATCH)]
    return torch.equal(torch.cat(alone), function(*operands, *options))


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


def is_alone(a_BMK: Tensor) -> bool:
    """Whether a CPU's products round as they do where these matrices have memory of their own."""
    return a_BMK.data_ptr() % _ALIGNMENT == 0 and (a_BMK.is_contiguous() or a_BMK.mT.is_contiguous())


def _alone(a_BMK: Tensor) -> Tensor:
    return a_BMK if is_alone(a_BMK) else a_BMK.clone()


def _product(
    x_BSK: Tensor, y_BTK: Tensor, z_BST: Tensor | None, beta: float, alpha: float, out_BST: Tensor | None
) -> Tensor:
    """beta Z + alpha X Y^T."""
    if z_BST is None:
        return torch.bmm(x_BSK, y_BTK.mT, out=out_BST)
    return torch.baddbmm(z_BST, x_BSK, y_BTK.mT, beta=beta, alpha=alpha, out=out_BST)
