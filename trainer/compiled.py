"""torch.compile, block by block, and the number of graphs that it has made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from models.moe import MoE, here
from models.transformer import Transformer

_graphs: Counter[bool] = Counter()  # by whether gradients were on


def compile_blocks(model: Transformer) -> None:
    """Compile the `forward` of each block, in place. Blocks that are alike share one graph.

    `fullgraph` makes an error of what would otherwise run uncompiled without a word: operators that cannot be traced,
    and recompilation without end. A block whose experts are spread over ranks is compiled in pieces, between which
    tokens travel.
    """
    for block in model.blocks:
        whole = not isinstance(block.moe, MoE) or block.moe.carry is here
        block.forward = torch.compile(block.forward, backend=_inductor, fullgraph=whole)


def compiled_graphs(training: bool = True) -> int:
    """How many graphs of blocks were compiled so far in this process; a forward graph and its backward graph are one.

    Shapes never change in a run, so that this grows in the first step only. Evaluation has no gradients and so graphs
    of its own, made when it first runs: they are not counted, or they alone where `training` is false.
    """
    return _graphs[training]


def _inductor(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """torch.compile's default backend, counted."""
    _graphs[torch.is_grad_enabled()] += 1
    return torch._dynamo.lookup_backend("inductor")(graph, inputs)
