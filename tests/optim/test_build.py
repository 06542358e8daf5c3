"""Optimizers against `torch.optim` on an unsharded copy, and what their groups hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from optim.build import build_optimizer, named_state, parameter_groups, set_lr
from optim.config import OptimConfig, RoleOptions
from tests.gang import Gang

# Uneven over four ranks, shorter than four ranks, one-dimensional, a scalar-like one; roles as a model would give them.
SHAPES: dict[str, tuple[int, ...]] = {"embedding": (50, 8), "w": (13, 7), "v": (7, 33), "gain": (33,), "tiny": (3,)}
ROLES = {
    "embedding": {"role": "embedding"},
    "w": {"role": "hidden_matrix"},
    "v": {"role": "hidden_matrix"},
    "gain": {"role": "vector"},
    "tiny": {"role": "vector"},
}
STEPS = 10

# Ours -> torch's original and the arguments that a user of torch would write for the same thing.
CASES: dict[str, tuple[dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": ({"weight_decay": 0.1}, torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8}),
    "adam": ({"betas": (0.8, 0.99), "eps": 1e-6}, torch.optim.Adam, {"betas": (0.8, 0.99), "eps": 1e-6}),
    "sgd": ({"weight_decay": 0.01}, torch.optim.SGD, {"momentum": 0.9}),
    "sgd-nesterov": (
        {"momentum": 0.8, "nesterov": True},
        torch.optim.SGD,
        {"momentum": 0.8, "nesterov": True},
    ),
    "sgd-plain": ({"momentum": 0.0}, torch.optim.SGD, {}),
    "adagrad": ({"weight_decay": 0.01}, torch.optim.Adagrad, {"eps": 1e-10}),
    "rmsprop": ({"alpha": 0.9, "momentum": 0.5}, torch.optim.RMSprop, {"alpha": 0.9, "momentum": 0.5}),
}


def recorded(kind: str, step: int = 0) -> dict[str, Tensor]:
    """Weights, or the gradients of a step, over four orders of magnitude: the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + len(kind))
    return {n: torch.randn(s, generator=generator) * 10.0 ** (-(step % 4)) for n, s in SHAPES.items()}


def lr_of(step: int) -> float:
    """A learning rate that moves, as under a schedule."""
    return 0.01 * (1 + step) / STEPS


def ours(name: str, options: dict[str, Any], sharding: str) -> dict[str, Tensor]:
    """In a rank: ten steps on parameters distributed by `sharding`; whole weights and state afterwards."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from trainer.layout import Layout
    from trainer.mesh import build_mesh
    from trainer.runtime import start_runtime

    with start_runtime() as runtime:
        world = runtime.world_size
        replicate = {"shard": 1, "hybrid": 2, "replicate": world}[sharding]
        mesh = build_mesh(Layout("fsdp", replicate, world // replicate, 1, 1, 1, 1, 1), "cpu")[
            "dp_replicate", "dp_shard"
        ]

        def spread(tensor: Tensor) -> DTensor:
            return distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])

        parameters = {n: torch.nn.Parameter(spread(t)) for n, t in recorded("weights").items()}
        config = OptimConfig(name=name.partition("-")[0], lr=0.01, **options)  # type: ignore[arg-type]
        optimizer = build_optimizer(parameters, ROLES, config)
        for step in range(STEPS):
            for parameter_name, gradient in recorded("gradients", step).items():
                parameters[parameter_name].grad = spread(gradient)
            set_lr(optimizer, lr_of(step))
            optimizer.step()
        tensors = {**parameters, **named_state(optimizer)}
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def theirs(original: type[torch.optim.Optimizer], arguments: dict[str, Any], weight_decay: float) -> dict[str, Tensor]:
    """The same ten steps by torch alone, on plain tensors; torch's own choice of kernel."""
    parameters = {n: torch.nn.Parameter(t) for n, t in recorded("weights").items()}
    vectors = [p for n, p in parameters.items() if ROLES[n]["role"] == "vector"]
    matrices = [p for n, p in parameters.items() if ROLES[n]["role"] != "vector"]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = original(groups, lr=0.01, **arguments)  # type: ignore[call-arg]
    for step in range(STEPS):
        for name, gradient in recorded("gradients", step).items():
            parameters[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = lr_of(step)
        optimizer.step()
    state = {f"{n}.{key}": value for n, p in parameters.items() for key, value in optimizer.state[p].items()}
    return {n: t.detach() for n, t in {**parameters, **state}.items() if t is not None}


@pytest.mark.parametrize(
    ("world", "sharding"), [(1, "shard"), (4, "shard"), (4, "hybrid"), (4, "replicate"), (3, "shard")]
)
@pytest.mark.parametrize("case", CASES)
def test_equals_torch_bit_for_bit(gang: Gang, case: str, world: int, sharding: str) -> None:
    """Weights and state after ten steps of recorded gradients, sharded, equal the unsharded original's."""
    options, original, arguments = CASES[case]
    expected = theirs(original, arguments, options.get("weight_decay", 0.0))
    for result in gang.run(ours, case, options, sharding, world=world):
        assert {n.removesuffix(".step") for n in expected} <= {n.removesuffix(".step") for n in result}
        for name, tensor in expected.items():
            assert torch.equal(result[name].reshape(tensor.shape), tensor), name
        moved = recorded("weights")
        assert all(not torch.equal(result[name], moved[name]) for name in SHAPES)


def test_roles_choose_decay_and_lr() -> None:
    config = OptimConfig(
        lr=1.0,
        weight_decay=0.1,
        roles={"embedding": RoleOptions(lr_scale=0.5), "vector": RoleOptions(weight_decay=0.3)},
    )
    parameters = {n: torch.nn.Parameter(t) for n, t in recorded("weights").items()}
    groups = {g["role"]: g for g in parameter_groups(parameters, ROLES, config)}
    assert {role: (g["lr"], g["weight_decay"]) for role, g in groups.items()} == {
        "embedding": (0.5, 0.1),
        "hidden_matrix": (1.0, 0.1),
        "vector": (1.0, 0.3),
    }
    assert sorted(n for g in groups.values() for n in g["names"]) == sorted(SHAPES)
    assert OptimConfig(weight_decay=0.1).weight_decay_of("vector") == 0.0
    optimizer = build_optimizer(parameters, ROLES, config)
    set_lr(optimizer, 0.2)
    assert {g["role"]: g["lr"] for g in optimizer.param_groups} == {
        "embedding": 0.1,
        "hidden_matrix": 0.2,
        "vector": 0.2,
    }


def test_parameter_without_role_is_refused() -> None:
    parameters = {n: torch.nn.Parameter(t) for n, t in recorded("weights").items()}
    with pytest.raises(UserError, match="'gain' has no role"):
        parameter_groups(parameters, {n: r for n, r in ROLES.items() if n != "gain"}, OptimConfig())


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"momentum": 0.9}, "'momentum' does nothing under name: adamw"),
        ({"name": "sgd", "betas": (0.9, 0.9)}, "'betas' does nothing under name: sgd"),
        ({"name": "sgd", "momentum": 0.0, "nesterov": True}, "'nesterov' needs momentum"),
        ({"betas": (0.9, 1.0)}, "'betas' must lie in"),
    ],
)
def test_options_that_do_nothing_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        OptimConfig(**keys)
