"""SOAP: Adam in the eigenbasis of Shampoo's factors.

Shapes: B matrices, M x N; sides of size S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim.moments import adam
from optim.products import accumulate_gram, product
from optim.roots import eigenbasis, orthogonal_iteration
from optim.rule import Rule


class SOAP(Rule):
    """Q_L Adam(Q_L^T G Q_R) Q_R^T, with Q_L and Q_R the eigenvectors of averages of G G^T and G^T G.

    Vyas et al. 2024 (arXiv 2409.11321), algorithms 3 and 4. Unlike in the authors' code the first step is not left out:
    it is U V^T, but for singular values below rounding. Adam corrects bias as torch does. In the null space of a factor
    (that of a long side after few steps) any basis is as good and rounding chooses: machines differ there.
    """

    def __init__(
        self,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        factor_beta: float = 0.95,
        precondition_every: int = 10,
        max_dim: int = 10000,
    ):
        """
        Args:
            betas, eps: of Adam.
            factor_beta: decay of the averages of G G^T and G^T G.
            precondition_every: steps from one renewal of the basis to the next, at multiples of it.
            max_dim: a longer side keeps the basis that it has, and costs no state.
        """
        self.betas, self.eps, self.factor_beta = betas, eps, factor_beta
        self.precondition_every, self.max_dim = precondition_every, max_dim

    def state(self, m: int, n: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"exp_avg": (m, n), "exp_avg_sq": (m, n)}
        for side, size in (("left", m), ("right", n)):
            if size <= self.max_dim:
                shapes |= {side: (size, size), f"{side}_basis": (size, size), "failures": ()}
        return shapes

    def update(self, gradient_BMN: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        if step == 1:
            self._observe(gradient_BMN, state)
            self._renew(state, first=True)
        rotated_BMN = _rotated(gradient_BMN, state)
        if step == 1 and "failures" in state:
            # Between its own singular vectors G is diagonal. What rounding leaves elsewhere Adam would scale up to 1;
            # and vectors of G G^T are noise where singular values are below sqrt(eps) of the largest.
            sizes_BMN = rotated_BMN.abs()
            noise_B11 = sizes_BMN.amax((1, 2), keepdim=True) * torch.finfo(sizes_BMN.dtype).eps ** 0.5
            rotated_BMN = rotated_BMN * (sizes_BMN > noise_B11)
        adam_BMN = adam(rotated_BMN, state["exp_avg"], state["exp_avg_sq"], self.betas, self.eps, step)
        update_BMN = _rotated(adam_BMN, state, back=True)
        if step > 1:
            self._observe(gradient_BMN, state)
            if step % self.precondition_every == 0:
                # The first moment turns with the basis, the second can only be put in its order.
                average_BMN = _rotated(state["exp_avg"], state, back=True)
                self._renew(state, first=False)
                state["exp_avg"].copy_(_rotated(average_BMN, state))
        return update_BMN

    def cost(self, m: int, n: int) -> float:
        sizes = [size for size in (m, n) if size <= self.max_dim]
        # Power iteration and QR take about as long as products of 15 S^3.
        each = 6.0 + 4.0 / self.precondition_every
        return sum(each * m * n * size + 15.0 * size**3 / self.precondition_every for size in sizes) + 10.0 * m * n

    def _observe(self, gradient_BMN: Tensor, state: dict[str, Tensor]) -> None:
        for side, a_BSN in (("left", gradient_BMN), ("right", gradient_BMN.mT)):
            if side in state:
                accumulate_gram(state[side], a_BSN, self.factor_beta)

    def _renew(self, state: dict[str, Tensor], first: bool) -> None:
        """The first bases by eigenvectors, identity where that fails; the next by one step of power iteration."""
        if "failures" not in state:
            return
        failed_B = torch.zeros_like(state["failures"], dtype=torch.bool)
        for side, dim in (("left", 1), ("right", 2)):
            if side not in state:
                continue
            factor_BSS, basis_BSS = state[side], state[f"{side}_basis"]
            if first:
                _, new_BSS, ok_B = eigenbasis(factor_BSS)
            else:
                new_BSS, order_BS, ok_B = orthogonal_iteration(factor_BSS, basis_BSS)
                square_BMN = state["exp_avg_sq"]
                index_BMN = order_BS.unsqueeze(3 - dim).expand_as(square_BMN)
                square_BMN.copy_(square_BMN.gather(dim, index_BMN))
            basis_BSS.copy_(new_BSS)
            failed_B |= ~ok_B
        state["failures"].add_(1.0).mul_(failed_B)


def _rotated(x_BMN: Tensor, state: dict[str, Tensor], back: bool = False) -> Tensor:
    """Q_L^T X Q_R, or back: Q_L X Q_R^T; a side without a basis has the identity."""
    if "left_basis" in state:
        basis_BMM = state["left_basis"]
        x_BMN = product(basis_BMM if back else basis_BMM.mT, x_BMN)
    if "right_basis" in state:
        basis_BNN = state["right_basis"]
        x_BMN = product(x_BMN, basis_BNN.mT if back else basis_BNN)
    return x_BMN
