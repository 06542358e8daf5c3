"""Other implementations of Muon, Shampoo and SOAP, as benchmarks/optim.py races them against ours."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from optim.newton_schulz import TABLES

PACKAGES = ("pytorch_optimizer", "dion")
LR, DECAY, EVERY = 0.02, 0.1, 10  # of all, ours too; steps between new roots and bases
Make = Callable[[list[nn.Parameter]], Optimizer]


@dataclass
class Peer:
    """Another implementation: what makes it, what it takes on two ranks, what must be patched while it is at work."""

    make: Make
    sharded: bool = False
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    tolerance: float | None = None  # of its first update's relative distance to ours, where it must be the same


def peers_of(rule: str, mesh: DeviceMesh | None) -> dict[str, Peer]:
    """Those that can be imported."""
    peers: dict[str, Peer] = {}
    if rule == "muon":
        peers["torch"] = Peer(
            lambda ps: torch.optim.Muon(ps, lr=LR, weight_decay=DECAY, momentum=0.95, nesterov=True, ns_steps=5),
            sharded=True,
            # A copy, as a cast is one: what comes out of it is changed in place.
            patch=lambda: mock.patch.object(Tensor, "bfloat16", Tensor.clone),
            tolerance=1e-3,
        )
    if rule == "muon" and importlib.util.find_spec("dion"):
        peers["dion"] = Peer(functools.partial(_dion, mesh=mesh), sharded=True, tolerance=0.1)
    if importlib.util.find_spec("pytorch_optimizer"):
        peers |= _of_pytorch_optimizer(rule, mesh is not None)
    return peers


def _of_pytorch_optimizer(rule: str, distributed: bool) -> dict[str, Peer]:
    import pytorch_optimizer as library
    from pytorch_optimizer.optimizer.muon import base
    from pytorch_optimizer.optimizer.muon.distributed_muon import DistributedMuon
    from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

    name = "pytorch_optimizer"
    decay: dict[str, Any] = {"lr": LR, "weight_decay": DECAY}
    options: dict[str, Any]
    if rule == "shampoo of the paper":
        options = {"weight_decouple": True, "preconditioning_compute_steps": EVERY, "matrix_eps": 1e-4}
        return {name: Peer(lambda ps: library.Shampoo(ps, **decay, **options))}
    if rule == "shampoo":
        options = {
            "betas": (0.9, 0.95),
            "moving_average_for_momentum": True,
            "decoupled_weight_decay": True,
            "start_preconditioning_step": 1,
            "preconditioning_compute_steps": EVERY,
            "block_size": 10_000,
            "shape_interpretation": False,
            "graft_type": LayerWiseGrafting.RMSPROP,
            "matrix_eps": 1e-4,
        }
        return {f"{name}, scalable": Peer(lambda ps: library.ScalableShampoo(ps, **decay, **options))}
    if rule == "soap":
        return {name: Peer(lambda ps: library.SOAP(ps, **decay, precondition_frequency=EVERY))}

    def make(parameters: list[nn.Parameter], kind: type[Optimizer] = library.Muon, **options: Any) -> Optimizer:
        return kind([{"params": parameters, "use_muon": True}], **decay, foreach=True, **options)  # type: ignore[call-arg]

    def in_fp32(function: str) -> Callable[[], AbstractContextManager[Any]]:
        exact = functools.partial(getattr(base, function), dtype=torch.float32)
        return lambda: mock.patch.object(base, function, exact)

    plain, gram = in_fp32("zero_power_via_newton_schulz_5"), in_fp32("zero_power_via_gram_newton_schulz")
    peers = {
        name: Peer(make, True, plain, 1e-3),
        f"{name}, gram": Peer(functools.partial(make, ns_method="gram_newton_schulz"), True, gram, 1e-3),
    }
    if distributed:

        def by_shape(parameters: list[nn.Parameter]) -> Optimizer:
            # It gathers neighbours, which have to be of one shape.
            return make(sorted(parameters, key=lambda p: tuple(p.shape)), DistributedMuon)

        peers[f"{name}, DDP"] = Peer(by_shape, False, plain, 1e-3)
    return peers


def _dion(parameters: list[nn.Parameter], mesh: DeviceMesh | None) -> Optimizer:
    from dion import Muon

    def iterate(x_BMN: Tensor, epsilon: Tensor | float) -> Tensor:
        """Its own iteration, with our table and fp32 products."""
        tall = x_BMN.shape[-2] > x_BMN.shape[-1]
        x_BSL = (x_BMN.mT if tall else x_BMN).float()
        x_BSL = x_BSL / (x_BSL.norm(dim=(-2, -1), keepdim=True) + epsilon)
        for a, b, c in TABLES["keller"].steps:
            a_BSS = x_BSL @ x_BSL.mT
            x_BSL = a * x_BSL + (b * a_BSS + c * (a_BSS @ a_BSS)) @ x_BSL
        return x_BSL.mT if tall else x_BSL

    made: Optimizer = Muon(
        parameters, mesh, lr=LR, mu=0.95, weight_decay=DECAY, nesterov=True, adjust_lr=None, newton_schulz_func=iterate
    )
    return made
