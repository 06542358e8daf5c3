"""State of a matrix optimizer: fp32 whatever the parameters are, made at once, and all there is to go on from."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from optim.config import OptimConfig
from optim.matrix import MatrixOptimizer
from tests.optim.sharded import OPTIONS, SHAPES, VECTORS, make, values


def made(config: OptimConfig, dtype: torch.dtype) -> tuple[dict[str, torch.nn.Parameter], MatrixOptimizer]:
    parameters = {name: torch.nn.Parameter(values(name, 0).to(dtype)) for name in SHAPES | VECTORS}
    return parameters, make(dict(parameters), config, 400)


def steps(parameters: dict[str, torch.nn.Parameter], optimizer: MatrixOptimizer, numbers: range) -> None:
    for step in numbers:
        for name, parameter in parameters.items():
            parameter.grad = values(name, step, 0.1).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", OPTIONS)
def test_going_on_from_a_state_is_as_if_never_stopped(rule: str, dtype: torch.dtype) -> None:
    config = OptimConfig(name=rule, **OPTIONS[rule])
    parameters, optimizer = made(config, dtype)
    names = set(optimizer.state_dict())
    steps(parameters, optimizer, range(1, 4))
    state: dict[str, Tensor] = deepcopy(optimizer.state_dict())
    assert set(state) == names  # as it was before any step
    matrices = {name: t for name, t in state.items() if not name.startswith(tuple(f"{v}." for v in VECTORS))}
    assert {t.dtype for name, t in matrices.items() if ".step" not in name} <= {torch.float32}
    assert all(int(t) == 3 for name, t in matrices.items() if ".step" in name)

    others, second = made(config, dtype)
    for name, parameter in others.items():
        parameter.data.copy_(parameters[name].data)
    second.load_state_dict(state)
    assert all(torch.equal(t, state[name]) and t.dtype == state[name].dtype for name, t in second.state_dict().items())
    steps(parameters, optimizer, range(4, 7))
    steps(others, second, range(4, 7))
    assert all(torch.equal(parameter, parameters[name]) for name, parameter in others.items())


def test_half_precision_weights_move_as_their_fp32_state_says() -> None:
    """Momentum is not rounded to the weights' precision: after many small gradients it is their sum to 1e-6."""
    config = OptimConfig(name="muon")
    parameters, optimizer = made(config, torch.bfloat16)
    expected = torch.zeros(SHAPES["square"])
    for step in range(1, 9):
        for name, parameter in parameters.items():
            parameter.grad = values(name, step, 1e-3).to(torch.bfloat16)
        expected = 0.95 * expected + parameters["square"].grad.float()  # type: ignore[union-attr]
        optimizer.step()
    momentum = optimizer.state_dict()["square.momentum"]
    assert (momentum - expected).norm() < 1e-6 * expected.norm()
    assert parameters["square"].dtype == torch.bfloat16
