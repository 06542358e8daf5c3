"""Tensor parallelism: ranks of a group share the matrices of every layer, and between layers the tokens of each row.

After Shoeybi et al. 2019 (attention by heads, MLP by hidden width, vocabulary by tokens) and Korthikanti et al. 2023
(between them each rank has its part of the sequence, so that norms and residuals are shared too). It is put on a plain
model from outside: parameters become DTensors and keep names and logical shapes; a module computes on what its rank
holds, and tokens are brought together before it and parted after it.

Per layer and direction two gatherings and two scatterings of `B T D` numbers; see `docs/how-we-know.md`.

Shapes: B batch, T position, D width of the residual stream, N token (B T), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from models.layers import compute_dtype
from models.loss import MAX_LOGITS, capped
from models.transformer import Block, Transformer

# By their names since torch 2.13, and before.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_all_gather_autograd = (
    getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
)
_reduce_scatter_autograd = (
    getattr(collectives, "reduce_scatter_single_autograd", None) or collectives.reduce_scatter_tensor_autograd
)


def distribute_matrices(model: Transformer, mesh: DeviceMesh) -> None:
    """Share a model's matrices and tokens among the ranks of a 1-D mesh, in place. Experts are not touched."""
    group = mesh.get_group()
    rows: list[nn.Module | None] = []  # shared by rows, which are heads or hidden numbers
    copies: list[nn.Module | None] = [model.norm, model.position_embedding]
    for block in model.blocks:
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        rows += [attention.wq, attention.wk, attention.wv, attention.scores]
        _gather_before(attention, group)
        _scatter_after(attention.wo, mesh)
        if mlp is not None:
            rows += [mlp.w_gate, mlp.w_up]
            _gather_before(mlp, group)
            _scatter_after(mlp.w_down, mesh)
        copies += [attention.q_norm, attention.k_norm, block.attention_norm, block.attention_post_norm]
        copies += [block.mlp_norm, block.mlp_post_norm]
    for layer in model.expert_layers():
        copies.append(layer.router)
        if layer.shared is not None:  # of this rank's tokens, as are its experts
            copies += [layer.shared.w_gate, layer.shared.w_up, layer.shared.w_down]
        layer.whole_rows, layer.own_part = partial(_whole_rows, group), partial(_own_part, group, 1)
    for modules, place in ((rows, Shard(0)), (copies, Replicate())):
        for module in modules:
            if module is not None:
                _hold(module, mesh, place)
    for table in (model.embedding, model.head):
        if table is not None:
            _distribute(table, mesh, {"weight": Shard(0)})
    model.look_up = partial(_look_up, group)
    model.own_part = partial(_own_part, group, -2)
    model.summed_loss = partial(_summed_loss, group)


def _distribute(module: nn.Module, mesh: DeviceMesh, places: dict[str, Placement]) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(distribute_tensor(parameter, mesh, [places[name]])))


def _local(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter. Copies get the gradient of this rank's tokens or heads, so a part of all."""
    assert isinstance(parameter, DTensor)
    # Under FSDP2 a gathered parameter is a DTensor over this mesh alone.
    (place,) = parameter.placements
    return parameter.to_local(grad_placements=[Partial() if place.is_replicate() else place])


def _hold(module: nn.Module, mesh: DeviceMesh, place: Placement) -> None:
    """Place a module's own parameters, and let it compute with what this rank holds of them."""
    _distribute(module, mesh, {name: place for name, _ in module.named_parameters(recurse=False)})
    module.forward = partial(_forward_on_local, module, module.forward)


def _forward_on_local(module: nn.Module, forward: Callable[..., Any], *arguments: Any) -> Any:
    parameters = module._parameters
    held = {name: None if p is None else _local(p) for name, p in parameters.items()}
    try:
        module._parameters = held  # type: ignore[assignment]  # read as attributes in `forward`
        return forward(*arguments)
    finally:
        module._parameters = parameters


def _gather_before(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Bring the parts of rows together, `(B, T / size, D)` to `(B, T, D)`, before a module."""
    forward = module.forward

    def gathered(x_BTD: Tensor, *others: Any) -> Any:
        return forward(_gather(x_BTD, group), *others)

    module.forward = gathered


def _scatter_after(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Share a matrix by its columns; add up all ranks' products, of which each keeps its part of rows."""
    group = mesh.get_group()
    _distribute(linear, mesh, {"weight": Shard(1), "bias": Replicate()})

    def forward(x_BTF: Tensor) -> Tensor:
        y_BTD = _scatter(F.linear(x_BTF, _local(linear.weight)), group)
        return y_BTD if linear.bias is None else y_BTD + _local(linear.bias)

    linear.forward = forward  # type: ignore[method-assign, assignment]


def _gather(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Whole rows from parts. Each rank uses them for its own share of a sum, so gradients are added up and parted."""
    return wait_tensor(_all_gather_autograd(x_BTD, 1, group))


def _scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of rows from every rank's share of a sum over ranks."""
    return wait_tensor(_reduce_scatter_autograd(x_BTD, "sum", 1, group))


def _own_part(group: dist.ProcessGroup, dim: int, x: Tensor) -> Tensor:
    """This rank's part of what all ranks have whole, along the dimension of positions."""
    return x.chunk(group.size(), dim)[group.rank()]


class _WholeRows(torch.autograd.Function):
    """Whole rows from parts, for what all ranks then compute alike: each takes the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, x_BTE: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return wait_tensor(_all_gather(x_BTE, 1, group))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None]:
        return _own_part(ctx.group, 1, dy[0]), None


def _whole_rows(group: dist.ProcessGroup, x_BTE: Tensor) -> Tensor:
    result: Tensor = _WholeRows.apply(x_BTE, group)
    return result


class _Total(torch.autograd.Function):
    """A sum over ranks of which all go on to compute alike: each takes the gradient of its own share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return wait_tensor(all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None]:
        return dy[0], None


def _look_up(group: dist.ProcessGroup, tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
    """Each rank looks up the tokens of its part of the vocabulary, and zeros for others; the sum is parted by rows."""
    weight_VD = _local(weight_VD)
    ids_BT, ours_BT = _ours(group, tokens_BT, weight_VD)
    summed = compute_dtype(weight_VD.dtype) if weight_VD.device.type == "cpu" else weight_VD.dtype
    x_BTD = F.embedding(ids_BT, weight_VD.to(summed)).to(weight_VD.dtype)
    return _scatter(x_BTD * ours_BT[..., None], group)


def _ours(group: dist.ProcessGroup, tokens: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Places of tokens in this rank's part of the vocabulary, and whether they are there; 0 for those that are not."""
    places = tokens - group.rank() * len(weight_VD)
    ours = (places >= 0) & (places < len(weight_VD))
    return places.where(ours, 0), ours


def _summed_loss(
    group: dist.ProcessGroup,
    x_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    mask_BT: Tensor,
    softcap: float | None,
) -> Tensor:
    """`models.loss.summed_cross_entropy`, where each rank has the logits of its part of the vocabulary; all get it."""
    hidden_ND, weight_VD = _gather(x_BTD, group).flatten(0, 1), _local(weight_VD)
    targets_N, mask_N = targets_BT.flatten(), mask_BT.flatten()
    size = max(1, MAX_LOGITS // len(weight_VD))
    if len(hidden_ND) <= size:
        return _chunk_loss(group, hidden_ND, weight_VD, targets_N, mask_N, softcap)
    total = hidden_ND.new_zeros((), dtype=compute_dtype(hidden_ND.dtype))
    weight_VD = weight_VD.to(compute_dtype(weight_VD.dtype))  # in which gradients of chunks are added up
    for h, t, m in zip(hidden_ND.split(size), targets_N.split(size), mask_N.split(size), strict=True):
        loss = checkpoint(
            _chunk_loss, group, h, weight_VD, t, m, softcap, use_reentrant=False, preserve_rng_state=False
        )
        total = total + loss
    return total


def _chunk_loss(
    group: dist.ProcessGroup,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    mask_N: Tensor,
    softcap: float | None,
) -> Tensor:
    logits_NV = F.linear(hidden_ND, weight_VD.to(hidden_ND.dtype))
    logits_NV = capped(logits_NV.to(compute_dtype(logits_NV.dtype)), softcap)
    largest_N = wait_tensor(all_reduce(logits_NV.detach().amax(dim=-1), "max", group))
    logits_NV = logits_NV - largest_N[:, None]
    places_N, ours_N = _ours(group, targets_N, weight_VD)
    target_N = logits_NV.gather(1, places_N[:, None])[:, 0] * ours_N
    shares_2N = torch.stack([logits_NV.exp().sum(dim=-1), target_N])
    sums_N, targets_of_all_N = _Total.apply(shares_2N, group)
    return ((sums_N.log() - targets_of_all_N) * mask_N).sum()
