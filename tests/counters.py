"""Dispatch modes that measure from outside: operations of matrix products, and bytes of the tensors that are alive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten


class Operations(TorchDispatchMode):
    """Counts operations of matrix products (a multiply and an add are two), those with the vocabulary left out.

    Attention is counted as its mathematics needs it, over the full square of positions: two products forward, four
    backward. Fused kernels have a fifth in the backward pass, as they keep no scores and make them again; they do that
    in every mode, and so it is left out.
    """

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.total = 0
        self._vocab = vocab

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if function in (_aten.mm.default, _aten.addmm.default, _aten.bmm.default):
            a, b = args[-2:]
            if self._vocab not in (*a.shape, *b.shape):
                self.total += 2 * a.numel() * b.shape[-1]
        elif "scaled_dot_product" in name:
            backward = "backward" in name
            q_BHTK, k_BGSK = args[1:3] if backward else args[:2]
            self.total += (8 if backward else 4) * q_BHTK.numel() * k_BGSK.shape[2]
        return function(*args, **(kwargs or {}))


class Alive(TorchDispatchMode):
    """Bytes of the storages that operators have made and that something still holds; `known` ones are left out.

    Tensors that checkpointing holds are not to be seen by hooks on saved tensors from outside, their storages are.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known = {StorageWeakRef(t.untyped_storage()) for t in known}
        self._made: set[StorageWeakRef] = set()

    def bytes(self) -> int:
        """Of now."""
        total = 0
        for reference in list(self._made):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[attr-defined]
            if storage is None:
                self._made.remove(reference)
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._made |= {StorageWeakRef(t.untyped_storage()) for t in tensors} - self._known
        self.peak = max(self.peak, self.bytes())
        return result
