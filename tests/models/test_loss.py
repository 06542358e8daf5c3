"""Chunked cross-entropy equals the plain one, and never holds all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.loss import summed_cross_entropy

N, D, V = 50, 16, 37


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    mask = torch.rand(N, generator=generator) < 0.7
    return hidden, weight, targets, mask


def _loss_and_grads(max_logits: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets, mask = _inputs()
    loss = summed_cross_entropy(hidden, weight, targets, mask, max_logits)
    return loss, *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("max_logits", [10**9, 20 * V, 7 * V + 3, 1])
def test_equals_float64_cross_entropy(max_logits: int) -> None:
    hidden, weight, targets, mask = _inputs()
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = F.cross_entropy((h @ w.T)[mask], targets[mask], reduction="sum")
    expected_grads = torch.autograd.grad(expected, (h, w))
    loss, *grads = _loss_and_grads(max_logits)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert (grad - reference).norm() <= 1e-6 * reference.norm()


@pytest.mark.parametrize("max_logits", [10**9, 5 * V])
def test_masked_targets_are_not_looked_at(max_logits: int) -> None:
    hidden, weight, targets, mask = _inputs()
    expected = summed_cross_entropy(hidden, weight, targets, mask, max_logits)
    junk = targets.masked_fill(~mask, V + 1000)
    assert torch.equal(summed_cross_entropy(hidden, weight, junk, mask, max_logits), expected)
    nothing = summed_cross_entropy(hidden, weight, junk, torch.zeros_like(mask), max_logits)
    assert nothing.item() == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(nothing, (hidden, weight)))


class _Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def test_no_tensor_of_all_logits_exists_in_either_pass() -> None:
    with _Largest() as whole:
        _loss_and_grads(10**9)
    assert whole.numel == N * V  # the instrument sees them where they are
    with _Largest() as chunked:
        _loss_and_grads(10 * V)
    # The largest is a chunk's logits, or the inputs and their gradients.
    assert chunked.numel == max(10 * V, N * D, V * D) < N * V


def test_logits_are_not_kept_between_the_passes() -> None:
    hidden, weight, targets, mask = _inputs()
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        summed_cross_entropy(hidden, weight, targets, mask, 10 * V)
    assert all(t.shape[-1:] != (V,) for t in kept if t.is_floating_point() and t.ndim == 2)


def test_bf16_inputs_give_an_fp32_loss_near_the_exact_one() -> None:
    hidden, weight, targets, mask = _inputs(torch.bfloat16)
    loss = summed_cross_entropy(hidden, weight, targets, mask, 10 * V)
    exact = F.cross_entropy((hidden.double() @ weight.double().T)[mask], targets[mask], reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_of_the_heads_gradient_does_not_grow_with_the_number_of_chunks(dtype: torch.dtype) -> None:
    """Added up in bf16, the gradients of 512 chunks lose 200 times what one rounding does."""
    generator = torch.Generator().manual_seed(0)
    # Hidden states with a common part: contributions of one sign, whose sum outgrows each of them.
    hidden = (1 + 0.1 * torch.randn(512, D, generator=generator)).to(dtype)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    targets = torch.randint(0, V, (512,), generator=generator)

    def gradient(dtype: torch.dtype, chunk: int) -> Tensor:
        w = weight.to(dtype).requires_grad_()
        loss = summed_cross_entropy(hidden.to(dtype), w, targets, torch.ones(512, dtype=torch.bool), chunk * V)
        (grad,) = torch.autograd.grad(loss, w)
        assert grad.dtype == dtype
        return grad.double()

    exact = gradient(torch.float32, 512)
    errors = [float((gradient(dtype, chunk) - exact).norm() / exact.norm()) for chunk in (512, 64, 8, 1)]
    assert all(error < 1.5 * errors[0] for error in errors), errors
