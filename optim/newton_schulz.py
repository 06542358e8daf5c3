"""Orthogonal factors by Newton-Schulz iterations: U p(S) V^T from nothing but matrix products.

Shapes: B matrices (or any leading dimensions), M rows, N columns; S the shorter of the two sides, L the longer one, K
the inner dimension of a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from optim.products import batches, is_alone, symmetric_product, symmetric_product_flops


class Table(NamedTuple):
    """Coefficients (a, b, c) of each step, p(x) = a x + b x^3 + c x^5, and by how much singular values stay below 1."""

    safety: float
    steps: tuple[tuple[float, float, float], ...]


def _deflated(steps: tuple[tuple[float, float, float], ...], safety: float) -> tuple[tuple[float, float, float], ...]:
    """p(x / safety) in place of p(x) in all steps but the last, so that rounding cannot push a value out of range."""
    return (*((a / safety, b / safety**3, c / safety**5) for a, b, c in steps[:-1]), steps[-1])


# `keller`: one polynomial, as steep at zero as it may be, five times (Jordan et al. 2024, "Muon"; torch.optim.Muon).
# `polar_express`: the best polynomial of each step given the last (Amsel et al. 2025, arXiv 2505.16932); here in five
# steps as the speedruns of nanoGPT use it, and as the paper's own algorithm 1 has it, in eight.
TABLES = {
    "keller": Table(1.0, ((3.4445, -4.7750, 2.0315),) * 5),
    "polar_express": Table(
        1.02,
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
    ),
    "polar_express_8": Table(
        1.01,
        _deflated(
            (
                (8.28721201814563, -23.595886519098837, 17.300387312530933),
                (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
                (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
                (3.3184196573706015, -2.488488024314874, 0.51004894012372),
                (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
                (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
                (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
                (1.875, -1.25, 0.375),
            ),
            1.01,
        ),
    ),
}

# After so many steps the short iteration begins anew from the matrix. What rounding makes of eigenvalues near zero in
# its Gram matrix, negative ones too, grows by up to 65 times a step: after three steps the error is 1e-5 where the long
# iteration's is 2e-6, after four it is three to seven times that, after five ten to fifty times.
_RESTART = 3
# Norms down to this one, and up to its inverse, are sums of squares that float32 holds.
_SMALL = 1e-12
# What the short iteration must save, as its more and smaller operations take longer to call: 20 to 40 microseconds.
_FLOPS_OF_CALLS = 3e6


def steps_of(coefficients: str, steps: int | None = None) -> Table:
    """The table of that name, cut after `steps` steps or with its last step repeated.

    Raises:
        ValueError: there is no such table, or fewer than one step is asked for.
    """
    if coefficients not in TABLES:
        raise ValueError(f"no table of coefficients '{coefficients}'; there are {', '.join(TABLES)}")
    safety, table = TABLES[coefficients]
    if steps is None:
        return TABLES[coefficients]
    if steps < 1:
        raise ValueError(f"Newton-Schulz needs at least one step, not {steps}")
    return Table(safety, table[:steps] + table[-1:] * (steps - len(table)))


@torch.no_grad()
def newton_schulz(
    x_BMN: Tensor,
    coefficients: str = "polar_express",
    steps: int | None = None,
    gram: bool | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """U p(S / (safety |S|)) V^T of each matrix U S V^T, with p the polynomials of a table one after another.

    On a CPU a matrix comes out the same, bit for bit, alone and anywhere in any batch. On a GPU all go in one batch,
    and the library chooses its kernel by the batch's size.

    Args:
        x_BMN: matrices `(..., m, n)`, floating point; not changed. Zero gives zero, and scale does not matter, from the
            smallest normal number to the largest.
        coefficients: name in `TABLES`.
        steps: the table's own number of steps by default; beyond it its last step is repeated.
        gram: iterate on S x S matrices alone, X X^T and the product of the polynomials, and multiply X twice (Zhang et
            al. 2026, "Gram Newton-Schulz"). By default where that is less work and the products are of full precision;
            in bfloat16 it loses too much.
        dtype: of the products. By default bfloat16 on a GPU, elsewhere that of the input.

    Returns:
        A new contiguous tensor of the shape, dtype and device of `x_BMN`.

    Raises:
        ValueError: an unknown table or fewer than one step.
    """
    table = steps_of(coefficients, steps)
    m, n = x_BMN.shape[-2:]
    on_gpu = x_BMN.is_cuda
    dtype = dtype or (torch.bfloat16 if on_gpu else x_BMN.dtype)
    if gram is None:
        least = flops(m, n, len(table.steps))
        gram = dtype.itemsize >= 4 and least < flops(m, n, len(table.steps), gram=False)
    iterate = _polynomial_of_vector if min(m, n) == 1 else _short_iteration if gram else _iteration
    result_BMN = torch.empty(x_BMN.shape, dtype=x_BMN.dtype, device=x_BMN.device)
    if not result_BMN.numel():
        return result_BMN
    x_BMN, y_BMN = x_BMN.reshape(-1, m, n), result_BMN.view(-1, m, n)
    if m > n:
        x_BMN, y_BMN = x_BMN.mT, y_BMN.mT
    sizes = [len(x_BMN)]
    if not on_gpu:
        like_BSL = torch.empty(x_BMN.shape, dtype=dtype)  # as what is iterated on lies in memory
        sizes = batches(iterate, like_BSL, options=(table,))
    for x_BSL, y_BSL in zip(x_BMN.split(sizes), y_BMN.split(sizes), strict=True):
        out_BSL = y_BSL if dtype == y_BSL.dtype and is_alone(y_BSL) and m <= n else None
        z_BSL = iterate(_normalised(x_BSL, table.safety).to(dtype), table, out_BSL)
        if z_BSL is not out_BSL:
            y_BSL.copy_(z_BSL)
    return result_BMN


def flops(m: int, n: int, steps: int, gram: bool | None = None) -> float:
    """Floating-point operations of the products for one m x n matrix on a CPU; by default of the faster iteration."""
    s, long = min(m, n), max(m, n)
    if s == 1:
        return 0.0
    segments = -(-steps // _RESTART)
    inner = symmetric_product_flops(s, s)
    plain = steps * (symmetric_product_flops(s, long) + inner + 2.0 * s * s * long)
    # Every step squares A; every step but a segment's first one also forms P A P and P Q.
    short = segments * (symmetric_product_flops(s, long) + 2.0 * s * s * long)
    short += inner * (steps + 3 * (steps - segments))
    return short if (short + _FLOPS_OF_CALLS < plain if gram is None else gram) else plain


def _normalised(x_BSL: Tensor, safety: float) -> Tensor:
    """A contiguous copy with Frobenius norm 1 / safety, in float32 at least; where squares might be out of range, the
    largest entry goes out first."""
    given_BSL = x_BSL
    x_BSL = x_BSL.to(torch.promote_types(x_BSL.dtype, torch.float32)).contiguous()
    result_BSL = torch.empty_like(x_BSL) if x_BSL is given_BSL else x_BSL
    if x_BSL.is_cpu:  # where it costs nothing to look at norms, and a norm of its own has the same bits in any batch
        norms_B = torch.stack(torch._foreach_norm(list(x_BSL)))
        norms = norms_B.tolist()
        if min(norms) > _SMALL and max(norms) < 1.0 / _SMALL:  # no square was too large, or small and of any account
            return torch.div(x_BSL, norms_B.mul_(safety).view(-1, 1, 1), out=result_BSL)
    tiny = torch.finfo(x_BSL.dtype).tiny
    torch.div(x_BSL, x_BSL.abs().amax((1, 2), keepdim=True).clamp_(min=tiny), out=result_BSL)
    result_BSL /= torch.linalg.vector_norm(result_BSL, dim=(1, 2), keepdim=True).mul_(safety).clamp_(min=tiny)
    return result_BSL


def _polynomial_of_vector(x_BSL: Tensor, table: Table, out_BSL: Tensor | None = None) -> Tensor:
    """p of the only singular value, 1 / safety, as a number: p may be so steep there (160) that rounding would show."""
    value = 1.0 / table.safety
    for a, b, c in table.steps:
        value *= a + b * value**2 + c * value**4
    return torch.mul(x_BSL, value * table.safety, out=out_BSL)


def _iteration(x_BSL: Tensor, table: Table, out_BSL: Tensor | None = None) -> Tensor:
    """X <- a X + (b A + c A^2) X with A = X X^T, step by step, in place of X and as much memory again."""
    y_BSL = torch.empty_like(x_BSL) if out_BSL is None else out_BSL
    if len(table.steps) % 2 == 0:  # so that the last result is in `out`
        x_BSL, y_BSL = y_BSL.copy_(x_BSL), x_BSL
    a_BSS = x_BSL.new_empty(*x_BSL.shape[:2], x_BSL.shape[1])
    w_BSS = torch.empty_like(a_BSS)
    for a, b, c in table.steps:
        symmetric_product(x_BSL, x_BSL, out_BSS=a_BSS)
        symmetric_product(a_BSS, a_BSS.mT, a_BSS, b, c, w_BSS)
        torch.baddbmm(x_BSL, w_BSS, x_BSL, beta=a, out=y_BSL)
        x_BSL, y_BSL = y_BSL, x_BSL
    return x_BSL


def _short_iteration(x_BSL: Tensor, table: Table, out_BSL: Tensor | None = None) -> Tensor:
    """The same with A <- P A P and Q <- P Q for P = a I + b A + c A^2, and X <- Q X before every restart and last.

    All are polynomials of one symmetric matrix, so they commute and their products are symmetric. P A P keeps the signs
    of eigenvalues under rounding; A P^2 has twice the error.
    """
    steps = len(table.steps)
    for start in range(0, steps, _RESTART):
        a_BSS = symmetric_product(x_BSL, x_BSL)
        p_BSS = q_BSS = _polynomial(a_BSS, *table.steps[start])
        for coefficients in table.steps[start + 1 : start + _RESTART]:
            a_BSS = symmetric_product(symmetric_product(p_BSS, a_BSS.mT), p_BSS.mT)
            p_BSS = _polynomial(a_BSS, *coefficients)
            q_BSS = symmetric_product(p_BSS, q_BSS.mT)
        x_BSL = torch.bmm(q_BSS, x_BSL, out=out_BSL if start + _RESTART >= steps else None)
    return x_BSL


def _polynomial(a_BSS: Tensor, a: float, b: float, c: float) -> Tensor:
    """a I + b A + c A^2."""
    p_BSS = symmetric_product(a_BSS, a_BSS.mT, a_BSS, b, c)
    p_BSS.diagonal(dim1=1, dim2=2).add_(a)
    return p_BSS
