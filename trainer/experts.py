"""Expert parallelism: each rank of a group holds some experts of every layer, and tokens travel to them and back.

Ranks of the group are data ranks: each brings tokens of its own (rule 2). It is put on a plain model from outside.

Shapes: M assignments of this rank, sorted by expert, R assignments that arrive here, D width of the residual stream,
E expert, S rank of the group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_reduce,
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from models.moe import Experts, Take
from models.transformer import Transformer

# To look at a whole expert, which only checks and tests do, takes a gathering for each dimension of the mesh.
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
    lambda record: "sequential all_gather" not in record.getMessage()
)


def distribute_experts(model: Transformer, mesh: DeviceMesh) -> None:
    """Give each rank of the 1-D `mesh` its share of experts, in place, and let tokens travel.

    The experts with the lowest numbers are rank 0's, and so on. Parameters keep names and logical shapes, as DTensors.
    """
    for layer in model.expert_layers():
        for name, parameter in list(layer.experts.named_parameters()):
            setattr(layer.experts, name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
        layer.experts.held = _local
        layer.carry = AllToAll(mesh.get_group())


def balance_over_ranks(model: Transformer, copies: int) -> None:
    """Let routers know the load of all ranks, for `aux_loss_over: batch`. `copies` ranks each have the same rows."""
    for layer in model.expert_layers():
        layer.total = partial(_total, copies)


class AllToAll:
    """`models.moe.here` over the ranks of a group, of which each calls it as often."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, group.size()

    # Sizes depend on the tokens: a compiled block is cut here.
    @torch.compiler.disable
    def __call__(self, experts: Experts, x_MD: Tensor, ends_E: Tensor, whole: bool) -> Callable[[], Tensor]:
        """Start the rows on their way. `whole` tells nothing here: only rows of an expert are sent."""
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        # From each rank, how many rows for each expert of this one.
        arriving_SE = all_to_all_single(counts_E, None, None, self._group).view(self._size, -1)
        # The layer's one wait for the device: the host says how long the parts of a message are.
        counts_SE = counts_E.view_as(arriving_SE)
        sent, arriving = torch.stack([counts_SE.sum(1), arriving_SE.sum(1)]).tolist()
        x_RD = all_to_all_single_autograd(x_MD[: sum(sent)], arriving, sent, self._group)
        return partial(self._arrive, experts, x_RD, arriving_SE, sent, arriving, len(x_MD))

    @torch.compiler.disable
    def _arrive(
        self, experts: Experts, x_RD: Tensor, arriving_SE: Tensor, sent: list[int], arriving: list[int], rows: int
    ) -> Tensor:
        """Rows came sorted by rank and then by expert; experts take them sorted by expert."""
        n_here = arriving_SE.shape[1]
        experts_SE = torch.arange(n_here, device=x_RD.device).expand_as(arriving_SE)
        expert_R = experts_SE.flatten().repeat_interleave(arriving_SE.flatten(), output_size=sum(arriving))
        order_R = expert_R.sort(stable=True).indices
        back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=x_RD.device))
        ends_E = arriving_SE.sum(0).cumsum(0).to(torch.int32)
        y_RD = experts(Take.apply(wait_tensor(x_RD), order_R, back_R, 1), ends_E, True)
        y_MD = all_to_all_single_autograd(Take.apply(y_RD, back_R, order_R, 1), sent, arriving, self._group)
        return F.pad(wait_tensor(y_MD), (0, 0, 0, rows - sum(sent)))  # nobody's rows are zeros


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _total(copies: int, values: Tensor) -> Tensor:
    assert dist.group.WORLD is not None
    return wait_tensor(all_reduce(values, "sum", dist.group.WORLD)) // copies
