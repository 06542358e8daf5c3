"""A rule for matrices as a user would write one: W -= lr * G (G^T G + ridge I)^-1/2."""

from __future__ import annotations

import torch
from torch import Tensor

from optim.rule import Rule


class Whitened(Rule):
    """Singular values s become s / sqrt(s^2 + ridge)."""

    def __init__(self, ridge: float = 1.0):
        self.ridge = ridge

    def state(self, m: int, n: int) -> dict[str, tuple[int, ...]]:
        return {}

    def update(self, gradient_BMN: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        gram_BNN = gradient_BMN.mT @ gradient_BMN
        values_BN, vectors_BNN = torch.linalg.eigh(gram_BNN)
        power_BN = (values_BN.clamp(min=0.0) + self.ridge) ** -0.5
        return gradient_BMN @ (vectors_BNN * power_BN[:, None, :]) @ vectors_BNN.mT
