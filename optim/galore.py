"""GaLore: Adam on a gradient's projection to its leading singular vectors.

Shapes: B matrices, M x N; the short side S, L the long one; R the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim.moments import adam
from optim.products import product
from optim.roots import eigenbasis
from optim.rule import Rule


class GaLore(Rule):
    """update_scale P Adam(P^T G), with P leading singular vectors, on the short side, of the gradient of some steps.

    Zhao et al. 2024 (arXiv 2403.03507), algorithm 2. As in the authors' code, the moments stay as they are when P
    changes: they are then taken for those of the new directions.
    """

    def __init__(
        self,
        rank: int = 128,
        precondition_every: int = 200,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        update_scale: float = 0.25,
    ):
        """
        Args:
            rank: columns of P, and rank of an update; at most the short side.
            precondition_every: steps from one P to the next, from the first step on.
            betas, eps: of Adam.
            update_scale: factor on the update; alpha in the paper.
        """
        self.rank, self.precondition_every, self.update_scale = rank, precondition_every, update_scale
        self.betas, self.eps = betas, eps

    def state(self, m: int, n: int) -> dict[str, tuple[int, ...]]:
        rank = min(self.rank, m, n)
        projected = (rank, n) if m <= n else (m, rank)
        return {"basis": (min(m, n), rank), "exp_avg": projected, "exp_avg_sq": projected, "failures": ()}

    def update(self, gradient_BMN: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        tall = gradient_BMN.shape[1] > gradient_BMN.shape[2]
        if (step - 1) % self.precondition_every == 0:
            self._refresh(gradient_BMN.mT if tall else gradient_BMN, state, step)
        basis_BSR = state["basis"]
        projected = product(gradient_BMN, basis_BSR) if tall else product(basis_BSR.mT, gradient_BMN)
        projected = adam(projected, state["exp_avg"], state["exp_avg_sq"], self.betas, self.eps, step)
        update_BMN = product(projected, basis_BSR.mT) if tall else product(basis_BSR, projected)
        return update_BMN.mul_(self.update_scale)

    def cost(self, m: int, n: int) -> float:
        s = min(m, n)
        return 4.0 * m * n * min(self.rank, s) + (2.0 * m * n * s + 22.0 * s**3) / self.precondition_every

    def factor(self, m: int, n: int) -> float:
        return self.update_scale

    def _refresh(self, short_BSL: Tensor, state: dict[str, Tensor], step: int) -> None:
        """Left singular vectors by eigenvectors of G G^T. Where they fail the last ones stay, at first unit vectors."""
        basis_BSR = state["basis"]
        if step == 1:
            basis_BSR.copy_(torch.eye(*basis_BSR.shape[1:]))
        if not short_BSL.is_cuda:
            short_BSL = short_BSL.double()  # or singular values below 3e-4 of the largest would drown in rounding
        _, vectors_BSS, ok_B = eigenbasis(product(short_BSL, short_BSL.mT))
        leading_BSR = vectors_BSS[..., -basis_BSR.shape[2] :]
        # Moments outlive P, so signs matter: the largest entry of each vector is positive, whichever library found it.
        largest_B1R = leading_BSR.gather(1, leading_BSR.abs().argmax(1, keepdim=True))
        leading_BSR = leading_BSR * torch.copysign(torch.ones_like(largest_B1R), largest_B1R)
        basis_BSR.copy_(torch.where(ok_B[:, None, None], leading_BSR.to(basis_BSR.dtype), basis_BSR))
        state["failures"].add_(1.0).mul_(~ok_B)
