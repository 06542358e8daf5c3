"""Operators seen from outside the trainer, by a dispatch mode: what was really executed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Watch(TorchDispatchMode):
    """Counts operators, and operand types of matrix products, from outside the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.matmul_types: Counter[str] = Counter()
        self.reduced_types: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removesuffix(".default")
        self.calls[name] += 1
        if name in ("aten.mm", "aten.addmm", "aten.bmm"):
            self.matmul_types[str(args[-1].dtype)] += 1
        if "c10d" in name and "reduce" in name:
            tensors, _ = tree_flatten(args)
            self.reduced_types.update(str(t.dtype) for t in tensors if isinstance(t, torch.Tensor))
        return function(*args, **(kwargs or {}))
