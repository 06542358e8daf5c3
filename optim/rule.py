"""The protocol of rules that update matrices. A rule of a user's own needs nothing but this file."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

# After so many failed eigendecompositions in a row of one matrix all ranks end the run together.
MAX_FAILURES = 3


class Rule(ABC):
    """How whole matrices are updated: pure mathematics, which knows nothing of ranks, shards or learning rates.

    The constructor takes the rule's options as keyword arguments. What `optim.name` names must derive from this class.
    For every matrix one rank is the owner; it keeps the matrix' state and is given its whole gradient, whatever part of
    the weight each rank holds. Matrices of one shape may come in batches, as B matrices of shape (m, n); what comes out
    for a matrix must not depend on the others in its batch.

    Shapes: B matrices, M rows (outputs of the layer), N columns (inputs).
    """

    @abstractmethod
    def state(self, m: int, n: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the state of one m x n matrix. It is fp32, starts as zeros and goes into checkpoints.

        A state `failures` of shape () counts, in `update`, how often in a row an eigendecomposition of this matrix
        failed. A rule does not raise then: others wait for its rank. Above `MAX_FAILURES` all ranks end together.
        """

    @abstractmethod
    def update(self, gradient_BMN: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        """The direction U of a step: the weight becomes `(1 - lr weight_decay) W - lr U`.

        Args:
            gradient_BMN: accumulated and clipped gradients of whole matrices; not to be changed.
            state: the tensors named by `state`, each with a leading dimension B, to be changed in place.
            step: number of updates of these matrices, this one included, so 1 at first.

        Returns:
            U, in a tensor of its own, of the gradient's shape and dtype.
        """

    def cost(self, m: int, n: int) -> float:
        """FLOPs of an update of one m x n matrix, about: owners are chosen so that all have as much to do."""
        return 2.0 * m * n * min(m, n)

    def factor(self, m: int, n: int) -> float:
        """The factor for this shape that is part of U already; only to be shown."""
        return 1.0
