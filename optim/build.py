"""From named parameters and their roles to an optimizer whose state exists from the start."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from common.errors import UserError
from optim.config import RULES, OptimConfig
from optim.elementwise import ELEMENTWISE, elementwise
from optim.matrix import MatrixOptimizer
from optim.ownership import matrices_of
from optim.rule import Rule


def parameter_groups(
    parameters: Mapping[str, Tensor], roles: Mapping[str, Mapping[str, Any]], config: OptimConfig
) -> list[dict[str, Any]]:
    """One optimizer group per role that occurs, and mesh if there are several, with names, lr factor and weight decay.

    Raises:
        UserError: a parameter that the model gave no role (rule 6: never guess from the shape).
    """
    names_of: dict[tuple[str, Any], list[str]] = {}
    for name, parameter in parameters.items():
        if name not in roles:
            raise UserError(f"parameter '{name}' has no role; the model must declare it in parameter_roles()")
        # Kernels that update many tensors at once take distributed ones of one mesh.
        mesh = getattr(parameter, "device_mesh", None)
        names_of.setdefault((roles[name]["role"], mesh), []).append(name)
    groups = []
    for (role, _), names in names_of.items():
        lr = config.lr_of(role)
        group = {"params": [parameters[name] for name in names], "names": names, "role": role, "lr": lr}
        group |= {"lr_scale": lr / config.lr, "weight_decay": config.weight_decay_of(role)}
        if config.is_rule and not config.has_matrices(role):
            group |= {"betas": config.adamw.betas, "eps": config.adamw.eps}
        groups.append(group)
    return groups


def build_optimizer(
    parameters: Mapping[str, Tensor], roles: Mapping[str, Mapping[str, Any]], config: OptimConfig
) -> Optimizer:
    """Make the optimizer, with its state, so that a checkpoint can be read into it before any step.

    Args:
        parameters: name to parameter, plain or DTensor; fp32 master weights.
        roles: name to `{"role": ..., ...}` as the model declares them.
    """
    groups = parameter_groups(parameters, roles, config)
    if config.is_rule:
        matrices = {
            name: matrices_of(name, parameter.shape, roles[name], config.split_heads)
            for name, parameter in parameters.items()
            if config.has_matrices(roles[name]["role"])
        }
        if not matrices:
            raise UserError(f"'optim.name' is {config.name}, but the model has no matrix for it; use adamw")
        return MatrixOptimizer(groups, matrices, make_rule(config))
    return elementwise(groups, config.name, config.resolved())


def make_rule(config: OptimConfig) -> Rule:
    """The rule for matrices that a config names, with its options.

    Raises:
        UserError: there is no such class, it is no `Rule`, or it does not take these options.
    """
    where = RULES.get(config.name, config.name)
    module, _, attribute = where.partition(":")
    try:
        made = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"'optim.name' is {config.name}, but {error}; install the package, or name it in PYTHONPATH"
        ) from None
    if not (isinstance(made, type) and issubclass(made, Rule)):
        raise UserError(f"'optim.name' is {config.name}, which is no class derived from optim.rule.Rule")
    try:
        return made(**config.resolved())
    except (TypeError, ValueError) as error:
        raise UserError(f"'optim.options' do not fit {config.name}: {error}") from None


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group to `lr` times the factor of its role."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def named_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Every state tensor as `{parameter name}.{state name}`; views of the live state, at least one-dimensional.

    A rule for matrices keeps a matrix' state on one rank: what ranks have differs, and together it is all.
    """
    if not isinstance(optimizer, ELEMENTWISE):
        state: dict[str, Tensor] = optimizer.named_state()  # type: ignore[attr-defined]
        return state
    result: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for key, value in sorted(optimizer.state[parameter].items()):
                result[f"{name}.{key}"] = value if value.ndim else value.view(1)
    return result
