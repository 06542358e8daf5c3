"""Inverse roots, eigenbases and power iterations of symmetric positive semidefinite matrices.

What comes out for a matrix is the same, bit for bit, alone and anywhere in any batch, on a CPU; on a GPU up to the
rounding of batched products.

Shapes: B matrices, N x N, or M x K and K x N factors of a product.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from optim.products import full_precision, product, symmetric_product

# Eigenvalues below minus this part of the largest one are no rounding: the decomposition has failed.
_NEGATIVE = 1e-3
# Rows from which on numpy's eigendecomposition on a CPU is faster than torch's, by a sixth.
_NUMPY_FROM = 192


def eigh(a_NN: Tensor) -> tuple[Tensor, Tensor]:
    """Every eigendecomposition of a rule goes through here, one matrix at a time: one that fails fails alone.

    Raises:
        RuntimeError: it did not converge.
    """
    if a_NN.is_cpu and len(a_NN) >= _NUMPY_FROM:
        try:
            values, vectors = np.linalg.eigh(a_NN.numpy())
        except np.linalg.LinAlgError as error:
            raise RuntimeError(str(error)) from None
        return torch.from_numpy(values), torch.from_numpy(vectors)
    values_N, vectors_NN = torch.linalg.eigh(a_NN)
    return values_N, vectors_NN


def eigenbasis(a_BNN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues `(B, N)`, ascending, eigenvectors `(B, N, N)` as columns, and which matrices `(B,)` have them.

    On a CPU they are found and given in float64; on a GPU in the dtype of `a_BNN`, in float64 if that fails. A matrix
    whose decomposition fails both times, is not finite, or has eigenvalues clearly below zero, gets zeros and identity.
    """
    solved = [_decompose(a_NN) for a_NN in a_BNN]
    values, vectors, ok = zip(*solved, strict=True)
    return torch.stack(values), torch.stack(vectors), torch.tensor(ok, device=a_BNN.device)


def inverse_root(a_BNN: Tensor, exponent: float, ridge: float = 1e-4) -> tuple[Tensor, Tensor]:
    """(A + ridge lambda_max I)^-exponent, by eigenvalues, of each matrix.

    The ridge is relative: an absolute one is nothing to a large matrix and everything to a small one. A ridge of 0
    gives the power of the pseudo-inverse: eigenvalues up to N eps lambda_max count as zero. An all-zero matrix, which
    says nothing, has the identity as its root.

    Args:
        a_BNN: symmetric up to rounding (its symmetric part is taken) and positive semidefinite.

    Returns:
        Roots, of the shape and dtype of `a_BNN`, and a bool for each `(B,)`: where it is false, the decomposition
        failed and the root is the identity.
    """
    solved = [_inverse_root(a_NN, exponent, ridge) for a_NN in a_BNN]
    roots, ok = zip(*solved, strict=True)
    return torch.stack(roots), torch.tensor(ok, device=a_BNN.device)


def orthogonal_iteration(a_BNN: Tensor, q_BNN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of power iteration from an orthogonal basis: the Q of A Q, columns sorted first (SOAP, algorithm 4).

    Returns:
        The new basis; the order `(B, N)` of the old columns, by falling q^T A q, in which whatever belongs to columns
        has to follow; which matrices `(B,)` have a finite one: the others keep the old basis and order.
    """
    solved = [_iterate(a_NN, q_NN) for a_NN, q_NN in zip(a_BNN, q_BNN, strict=True)]
    bases, orders, ok = zip(*solved, strict=True)
    return torch.stack(bases), torch.stack(orders), torch.tensor(ok, device=a_BNN.device)


def _decompose(a_NN: Tensor) -> tuple[Tensor, Tensor, bool]:
    wanted = a_NN.dtype if a_NN.is_cuda else torch.float64
    symmetric_NN = (a_NN + a_NN.mT) / 2
    for dtype in dict.fromkeys((wanted, torch.float64)):
        try:
            values_N, vectors_NN = eigh(symmetric_NN.to(dtype))
        except RuntimeError:  # torch.linalg.LinAlgError is one, and so are complaints of a GPU's solver
            continue
        # A sum is finite only where all of its numbers are.
        least, largest, checked = torch.stack([values_N[0], values_N[-1], values_N.sum() + vectors_NN.sum()]).tolist()
        if math.isfinite(checked) and least >= -_NEGATIVE * largest:
            return values_N.to(wanted), vectors_NN.to(wanted), True
    identity_NN = torch.eye(len(a_NN), dtype=wanted, device=a_NN.device)
    return torch.zeros_like(identity_NN[0]), identity_NN, False


def _inverse_root(a_NN: Tensor, exponent: float, ridge: float) -> tuple[Tensor, bool]:
    # All of it for one matrix at a time: a power's last bit depends on where in a tensor the number stands.
    values_N, vectors_NN, ok = _decompose(a_NN)
    values_N = values_N.clamp(min=0.0)
    largest = values_N[-1]
    floor = 0.0 if ridge else len(a_NN) * torch.finfo(a_NN.dtype).eps
    shifted_N = values_N + ridge * largest
    power_N = torch.where(shifted_N > floor * largest, shifted_N**-exponent, 0.0)
    power_N = torch.where(largest > 0.0, power_N, 1.0)
    with full_precision():
        root_1NN = symmetric_product((vectors_NN * power_N)[None], vectors_NN[None])
    return root_1NN[0].to(a_NN.dtype), ok


def _iterate(a_NN: Tensor, q_NN: Tensor) -> tuple[Tensor, Tensor, bool]:
    powered_NN = product(a_NN[None], q_NN[None])[0]
    order_N = (q_NN * powered_NN).sum(0).argsort(descending=True, stable=True)
    basis_NN, r_NN = torch.linalg.qr(powered_NN[:, order_N])
    # With a positive diagonal of R the factors are unique, whichever library found them.
    basis_NN = basis_NN * torch.copysign(torch.ones_like(r_NN[0]), r_NN.diagonal())
    if basis_NN.isfinite().all():
        return basis_NN, order_N, True
    return q_NN, torch.arange(len(a_NN), device=a_NN.device), False
