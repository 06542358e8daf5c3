"""Singular values of gradients, weights and updates, under any optimizer and sharding, of whole matrices alone.

A shard has other singular values than its matrix, and no mean of theirs gives those of the whole. So parts travel to
owners, as those of gradients do for the rules (optim/matrix.py), but by a plan of their own: any optimizer will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer

from optim.boxes import held_boxes, local, pieces, ranks_of
from optim.config import MATRIX_ROLES
from optim.exchange import BUCKET_SIZE, Bucket, buckets
from optim.matrix import MatrixOptimizer
from optim.ownership import choose_owners, matrices_of

TOP = 10  # `top_energy` is that of one in so many singular values
_EPS = torch.finfo(torch.float32).eps
Numbers = dict[str, float | None]  # by quantity; None: a matrix of zeros has none


class Spectra:
    """Numbers about the matrices of a model around one update: `before` it, then `after` it.

    An owner keeps the weights of its matrices in between; beyond that, a bucket is all that is in memory at a time.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        roles: Mapping[str, Mapping[str, Any]],
        split_heads: bool = False,
        bucket_size: int = BUCKET_SIZE,
    ):
        """All ranks make theirs at once.

        Args:
            optimizer: its groups have `names`, `lr` and `weight_decay`; parameters are plain tensors, or DTensors whose
                meshes are made of the same ranks.
            roles: as `parameter_roles` gives them; matrices are those of `hidden_matrix` and `expert_matrix`.
            split_heads: see `matrices_of`.
        """
        self._decoupled = isinstance(optimizer, AdamW | MatrixOptimizer)
        self._parameters: dict[str, Tensor] = {}
        self._group_of: dict[str, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if roles[name]["role"] in MATRIX_ROLES:
                    self._parameters[name], self._group_of[name] = parameter, group
        matrices = [
            matrix for n, p in self._parameters.items() for matrix in matrices_of(n, p.shape, roles[n], split_heads)
        ]
        self._ranks = ranks_of(self._parameters.values())
        self._device = local(next(iter(self._parameters.values()))).device
        held = held_boxes(self._parameters)
        owners = choose_owners(matrices, held, lambda m, n: m * n * min(m, n), self._ranks.size)
        self._buckets = buckets(matrices, owners, held, self._ranks, bucket_size)
        self._found: dict[tuple[str, int], dict[str, Numbers]] = {}  # by parameter and number among its matrices
        self._kept: list[dict[int, Tensor]] = []

    @torch.no_grad()
    def before(self) -> None:
        """Look at gradients, which clipping or scaling may still change by a factor, and weights."""
        weights = {name: pieces(p) for name, p in self._parameters.items()}
        gradients = {
            name: [torch.zeros_like(part) for part in pieces(p)] if p.grad is None else pieces(p.grad)
            for name, p in self._parameters.items()
        }
        self._found, self._kept = {}, []
        for bucket in self._buckets:
            arrived = bucket.gather(gradients, self._device)()
            self._kept.append(bucket.gather(weights, self._device)())
            for i, weight in self._kept[-1].items():
                self._found[_key(bucket, i)] = {"gradient": spectrum(arrived[i]), "weight": spectrum(weight)}

    @torch.no_grad()
    def after(self) -> dict[str, dict[str, Numbers]]:
        """Look at what the update was; all ranks get the numbers of all matrices, means over those of a parameter.

        Returns:
            By parameter, `gradient` and `weight` (before the update), as in `spectrum`, and `update`, as in
            `of_update`.
        """
        weights = {name: pieces(p) for name, p in self._parameters.items()}
        for bucket, kept in zip(self._buckets, self._kept, strict=True):
            for i, weight in bucket.gather(weights, self._device)().items():
                group = self._group_of[bucket.matrices[i].parameter]
                decay = group["lr"] * group["weight_decay"] if self._decoupled else 0.0
                self._found[_key(bucket, i)]["update"] = of_update(kept[i], weight, decay)
        self._kept = []
        parts: list[Any] = [self._found]
        if self._ranks.group is not None:
            parts = [None] * self._ranks.size
            dist.all_gather_object(parts, self._found, group=self._ranks.group)
        found = {key: numbers for part in parts for key, numbers in part.items()}
        of_parameter: dict[str, list[dict[str, Numbers]]] = {name: [] for name in self._parameters}
        for (name, _), numbers in sorted(found.items()):
            of_parameter[name].append(numbers)
        return {
            name: {what: _means([numbers[what] for numbers in those]) for what in ("gradient", "weight", "update")}
            for name, those in of_parameter.items()
        }


def spectrum(matrix_MN: Tensor) -> Numbers:
    """Of the singular values s_1 >= s_2 >= ... of a matrix; no factor on the matrix changes any of these.

    `condition`: s_1 over the smallest, and at most 1 / eps of fp32: the numbers of a matrix tell no more.
    `effective_rank`: exp(H(s / sum s)), H the entropy in nats (Roy and Vetterli 2007).
    `stable_rank`: sum s^2 / s_1^2.
    `top_energy`: the part of sum s^2 that a tenth of the values has, the largest ones; at least one.
    """
    s_R = singular_values(matrix_MN)
    if not bool(s_R[0] > 0):  # zeros, or not finite
        return dict.fromkeys(("condition", "effective_rank", "stable_rank", "top_energy"))
    squares_R = s_R.square()
    numbers = {
        "condition": 1 / (s_R[-1] / s_R[0]).clamp(min=_EPS),
        "effective_rank": torch.special.entr(s_R / s_R.sum()).sum().exp(),
        "stable_rank": squares_R.sum() / squares_R[0],
        "top_energy": squares_R[: max(1, len(s_R) // TOP)].sum() / squares_R.sum(),
    }
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))


def of_update(before_MN: Tensor, after_MN: Tensor, decay: float) -> Numbers:
    """Of the step D = (1 - decay) W_before - W_after, without the decay, that is of the learning rate times the update.

    `rms`: root of the mean square of its entries.
    `orthogonality_error`: sqrt(1 - mean(s)^2 / mean(s^2)), 0 for a multiple of an orthogonal matrix and no other. None
    where nothing was added, or no more than weights round by.
    """
    step_MN = (1.0 - decay) * before_MN.double() - after_MN.double()
    rms, error = float(step_MN.square().mean().sqrt()), None
    if float(step_MN.norm()) > _EPS * float(after_MN.double().norm()):
        s_R = singular_values(step_MN)
        error = float((1 - s_R.mean().square() / s_R.square().mean()).clamp(min=0).sqrt())
    finite = {"rms": rms, "orthogonality_error": error}
    return {name: value if value is not None and value < float("inf") else None for name, value in finite.items()}


def singular_values(matrix_MN: Tensor) -> Tensor:
    """Descending, `(min(M, N),)`, fp64, exact to 1e-8 of the largest; NaN if the matrix is not finite.

    Roots of the eigenvalues of the Gram matrix on the short side, which are several times faster than an SVD.
    """
    m, n = matrix_MN.shape
    double_MN = matrix_MN.double()
    gram_RR = double_MN @ double_MN.mT if m <= n else double_MN.mT @ double_MN
    if not bool(torch.isfinite(gram_RR).all()):
        return gram_RR.new_full((min(m, n),), float("nan"))
    return torch.linalg.eigvalsh(gram_RR).clamp(min=0).sqrt().flip(0)


def _key(bucket: Bucket, i: int) -> tuple[str, int]:
    matrix = bucket.matrices[i]
    return matrix.parameter, matrix.index or 0


def _means(of_matrices: list[Numbers]) -> Numbers:
    """By quantity, over the matrices that have it."""
    means: Numbers = {}
    for quantity in of_matrices[0]:
        known = [value for numbers in of_matrices if (value := numbers[quantity]) is not None]
        means[quantity] = sum(known) / len(known) if known else None
    return means
