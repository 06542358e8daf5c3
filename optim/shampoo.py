"""Shampoo: gradients between inverse roots of their own second moments, with the step length of another optimizer.

Shapes: B matrices, M x N; K blocks of each matrix, P x Q.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from optim.moments import accumulate
from optim.products import accumulate_gram, product
from optim.roots import inverse_root
from optim.rule import Rule


class Shampoo(Rule):
    """L^-e M R^-e, with L and R sums or averages of G G^T and G^T G, M the average of G, and e = 1/4 for matrices.

    Gupta, Koren and Singer 2018 (arXiv 1802.09568), algorithm 1; in blocks, and as long as the step of another
    optimizer ("grafted"), as Anil et al. 2020 (arXiv 2002.09018) and Shi et al. 2023 (arXiv 2309.06497) have it.
    """

    def __init__(
        self,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        factor_beta: float = 0.95,
        exponent: float = 0.25,
        block_size: int | None = None,
        grafting: str = "adam",
        precondition_every: int = 10,
        start_step: int = 1,
        ridge: float = 1e-4,
    ):
        """
        Args:
            betas: decay of the gradient's average, which is preconditioned (0: the gradient itself), and of the squares
                of the grafted optimizer.
            eps: added to the root of those squares.
            factor_beta: decay of the averages L and R, whose bias is corrected; 1: sums, as in the paper.
            exponent: e, of either side.
            block_size: longest side of a block; each has its own L and R. None: the matrix is one block.
            grafting: whose norm, over the whole matrix, the direction gets: `adam`'s, `rmsprop`'s (squares with their
                bias), `adagrad`'s (their sum) or `sgd`'s, each applied to the gradient's average; `none`: its own.
            precondition_every: steps from one computation of roots to the next.
            start_step: the first of them; before it the grafted optimizer is on its own.
            ridge: added to L and R, as a part of their largest eigenvalues (see `inverse_root`).
        """
        self.betas, self.eps, self.factor_beta, self.exponent, self.ridge = betas, eps, factor_beta, exponent, ridge
        self.block_size, self.grafting = block_size, grafting
        self.precondition_every, self.start_step = precondition_every, start_step

    def state(self, m: int, n: int) -> dict[str, tuple[int, ...]]:
        rows, columns, p, q = self._grid(m, n)
        shapes: dict[str, tuple[int, ...]] = {"failures": ()}
        for side, size in (("left", p), ("right", q)):
            shapes |= dict.fromkeys((side, f"{side}_root"), (rows * columns, size, size))
        if self.betas[0]:
            shapes["exp_avg"] = (m, n)
        if self.grafting in ("adam", "rmsprop", "adagrad"):
            shapes["exp_avg_sq"] = (m, n)
        return shapes

    def update(self, gradient_BMN: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        average_BMN = gradient_BMN
        if self.betas[0]:
            accumulate(state["exp_avg"], gradient_BMN, self.betas[0])
            average_BMN = state["exp_avg"] / (1.0 - self.betas[0] ** step)
        grafted_BMN = self._grafted(average_BMN, gradient_BMN, state, step)
        blocks_APQ = self._cut(gradient_BMN)
        for side, a_APQ in (("left", blocks_APQ), ("right", blocks_APQ.mT)):
            accumulate_gram(state[side].view(-1, *state[side].shape[2:]), a_APQ, self.factor_beta)
        if step < self.start_step:
            return grafted_BMN.clone()
        if (step - self.start_step) % self.precondition_every == 0:
            self._refresh(state, step)
        left_APP, right_AQQ = (state[name].flatten(0, 1) for name in ("left_root", "right_root"))
        update_APQ = product(product(left_APP, self._cut(average_BMN)), right_AQQ)
        update_BMN = self._joined(update_APQ, gradient_BMN)
        if self.grafting == "none":
            return update_BMN
        norm_B11 = _norms(update_BMN)
        ratio_B11 = torch.where(norm_B11 > 0.0, _norms(grafted_BMN) / norm_B11, 0.0)
        return update_BMN.mul_(ratio_B11.to(update_BMN.dtype))

    def cost(self, m: int, n: int) -> float:
        rows, columns, p, q = self._grid(m, n)
        return rows * columns * (4.0 * p * q * (p + q) + 22.0 * (p**3 + q**3) / self.precondition_every)

    def _grafted(self, average_BMN: Tensor, gradient_BMN: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        """The direction of the other optimizer."""
        if "exp_avg_sq" not in state:
            return average_BMN
        beta = 1.0 if self.grafting == "adagrad" else self.betas[1]
        accumulate(state["exp_avg_sq"], gradient_BMN * gradient_BMN, beta)
        correction = 1.0 - beta**step if self.grafting == "adam" else 1.0
        root_BMN = (state["exp_avg_sq"] / correction).sqrt_().add_(self.eps)
        return torch.div(average_BMN, root_BMN, out=root_BMN)

    def _refresh(self, state: dict[str, Tensor], step: int) -> None:
        """New roots. Where one fails, the last one stays: the identity if there has been none."""
        correction = 1.0 - self.factor_beta**step if self.factor_beta < 1.0 else 1.0
        failed_B = torch.zeros_like(state["failures"], dtype=torch.bool)
        for side in ("left", "right"):
            factor_BKNN, root_BKNN = state[side], state[f"{side}_root"]
            if step == self.start_step:
                root_BKNN.copy_(torch.eye(root_BKNN.shape[-1]))
            new_ANN, ok_A = inverse_root(factor_BKNN.flatten(0, 1) / correction, self.exponent, self.ridge)
            ok_BK = ok_A.view(root_BKNN.shape[:2])
            root_BKNN.copy_(torch.where(ok_BK[..., None, None], new_ANN.view_as(root_BKNN), root_BKNN))
            failed_B |= ~ok_BK.all(1)
        state["failures"].add_(1.0).mul_(failed_B)

    def _grid(self, m: int, n: int) -> tuple[int, int, int, int]:
        """Blocks down and across, and their shape: as few as the limit allows, all of one size."""
        limit = self.block_size or max(m, n)
        rows, columns = -(-m // limit), -(-n // limit)
        return rows, columns, -(-m // rows), -(-n // columns)

    def _cut(self, x_BMN: Tensor) -> Tensor:
        """Blocks (A, P, Q), A = B K, filled up with zeros, which change nothing in the other rows of a root."""
        m, n = x_BMN.shape[1:]
        rows, columns, p, q = self._grid(m, n)
        if rows == columns == 1:
            return x_BMN
        x_BMN = pad(x_BMN, (0, columns * q - n, 0, rows * p - m))
        return x_BMN.view(-1, rows, p, columns, q).transpose(2, 3).reshape(-1, p, q)

    def _joined(self, x_APQ: Tensor, like_BMN: Tensor) -> Tensor:
        """The inverse of `_cut`."""
        m, n = like_BMN.shape[1:]
        rows, columns, p, q = self._grid(m, n)
        if rows == columns == 1:
            return x_APQ
        whole_BMN = x_APQ.view(-1, rows, columns, p, q).transpose(2, 3).reshape(-1, rows * p, columns * q)
        return whole_BMN[:, :m, :n].contiguous()


def _norms(x_BMN: Tensor) -> Tensor:
    """Frobenius norms (B, 1, 1), summed in float64, of one matrix at a time: sums depend on the batch around them."""
    return torch.stack([torch.linalg.vector_norm(x_MN, dtype=torch.float64) for x_MN in x_BMN])[:, None, None]
