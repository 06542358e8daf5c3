"""The grouped product against one matrix product per row, in all the places that torch's own does not run in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from models import grouped
from models.grouped import grouped_mm, grouped_outer, grouped_sum

N, K, M, E = 11, 8, 16, 4
ENDS = {
    "all": [3, 4, 9, 11],
    "rest": [3, 4, 8, 9],
    "empty": [0, 5, 5, 11],
    "one has all": [0, 0, 11, 11],
    "none": [0, 0, 0, 0],
}
every_split = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)


def make(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((n, K), (E, M, K), (E, M))
    x, w, bias = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return x, w, bias


def row_by_row(x_NK: Tensor, w_EMK: Tensor, ends: list[int], bias_EM: Tensor | None) -> Tensor:
    rows = [w_EMK.new_zeros(w_EMK.shape[1])] * len(x_NK)
    for n, x_K in enumerate(x_NK):
        e = sum(end <= n for end in ends)
        if e < E:
            rows[n] = w_EMK[e] @ x_K + (0 if bias_EM is None else bias_EM[e])
    return torch.stack(rows)


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Of a sum that weighs every number of y differently; a missing one is an error."""
    weights = torch.linspace(-1, 2, y.numel()).view_as(y).to(y.dtype)
    return [y, *torch.autograd.grad((y * weights).sum(), inputs)]


def deviation(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest, relative in the Frobenius norm; NaN if anything is."""
    far = [(g.double() - w).norm() / w.norm().clamp(min=1e-3) for g, w in zip(got, want, strict=True)]
    return torch.stack(far).max().item()


@every_split
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 3e-7), (torch.bfloat16, 8e-3)], ids=str
)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_it_is_one_product_per_row(
    ends: list[int], biased: bool, dtype: torch.dtype, tolerance: float, index: torch.dtype
) -> None:
    x, w, bias = make(dtype)
    y = grouped_mm(x, w, torch.tensor(ends, dtype=index), bias if biased else None)
    assert y.dtype == dtype
    assert not y[ends[-1] :].any()
    x64, w64, bias64 = (t.detach().double().requires_grad_() for t in (x, w, bias))
    want = row_by_row(x64, w64, ends, bias64 if biased else None) + 0 * (x64.sum() + w64.sum() + bias64.sum())
    n = 3 if biased else 2
    assert deviation(gradients(y, [x, w, bias][:n]), gradients(want, [x64, w64, bias64][:n])) <= tolerance


@pytest.mark.parametrize(
    ("ends", "whole"), [(ends, whole) for ends in ENDS.values() for whole in {False, ends[-1] == N}]
)
@pytest.mark.parametrize("biased", [False, True])
def test_the_fused_way_is_the_loop(ends: list[int], whole: bool, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own kernel, of which a GPU's leaves rows of no expert as they were in memory."""
    x, w, bias = make(torch.float32)
    inputs = [x, w, bias] if biased else [x, w]

    def run() -> list[Tensor]:
        return gradients(grouped_mm(x, w, torch.tensor(ends), bias if biased else None, whole), inputs)

    loop, torch_grouped_mm, calls = run(), grouped._torch_grouped_mm, []

    def poisoned(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        assert offs.dtype == torch.int32
        for t in (a, b):  # what a GPU's kernel asks for
            assert 1 in t.stride()[-2:]
            assert 0 not in t.stride()
        y = torch_grouped_mm(a, b, offs=offs)  # type: ignore[misc]
        calls.append(y.ndim)
        if y.ndim == 2:
            y[int(offs[-1]) :] = torch.nan
        return y

    monkeypatch.setattr(grouped, "_torch_grouped_mm", poisoned)
    monkeypatch.setattr(grouped, "_is_fused", lambda *_: True)
    assert deviation(run(), [t.double() for t in loop]) < 3e-7
    assert calls == ([2, 2, 3, 3] if biased else [2, 2, 3])
    # Numbers that share memory: an expanded gradient, as sums give, and expanded matrices.
    dx, dw = torch.autograd.grad(grouped_mm(x, w[:1].expand(E, M, K), torch.tensor(ends)).sum(), [x, w])
    rows = ends[-1]
    torch.testing.assert_close(dx[:rows], w[0].sum(0).expand(rows, K))
    torch.testing.assert_close(dw[0], x[:rows].sum(0).expand(M, K))


@every_split
def test_gradients_are_those_of_differences(ends: list[int]) -> None:
    x, w, bias = make()
    assert torch.autograd.gradcheck(lambda x, w, bias: grouped_mm(x, w, torch.tensor(ends), bias), (x, w, bias))


def test_second_gradients_are_refused() -> None:
    x, w, _ = make()
    (dw,) = torch.autograd.grad(grouped_mm(x, w, torch.tensor(ENDS["rest"])).sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(dw.sum(), x)


@pytest.mark.parametrize("operator", [grouped_mm, grouped_outer, grouped_sum], ids=["mm", "outer", "sum"])
def test_the_operators_keep_torchs_rules(operator: Any) -> None:
    x, w, bias = make()
    ends = torch.tensor(ENDS["rest"])
    arguments = {
        grouped_mm: [(x, w, ends), (x, w.detach(), ends, bias, False), (x.detach(), w, ends, None, True)],
        grouped_outer: [(x.detach(), w[0].detach().T[:1].expand(N, M), ends)],
        grouped_sum: [(x.detach(), ends)],
    }[operator]
    for case in arguments:
        torch.library.opcheck(operator, case)


def test_any_layout_will_do() -> None:
    """Expanded incoming gradients, of which numbers share memory, and strided inputs."""
    x, w, bias = make()
    ends = torch.tensor(ENDS["rest"])
    expected = torch.autograd.grad((grouped_mm(x, w, ends, bias) * torch.ones(N, M)).sum(), [x, w, bias])
    found = torch.autograd.grad(grouped_mm(x, w, ends, bias).sum(), [x, w, bias])
    strided = x.detach().t().contiguous().t().requires_grad_()
    turned = w.detach().mT.contiguous().mT.requires_grad_()
    other = torch.autograd.grad(grouped_mm(strided, turned, ends, bias).sum(), [strided, turned, bias])
    every_other = torch.stack([x.detach(), x.detach()], dim=-1)[..., 0]
    for got, more, want in zip(found, other, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(more, want, rtol=1e-14, atol=1e-14)
    assert torch.equal(grouped_mm(every_other, w, ends), grouped_mm(x, w, ends))
    row_NK = x.detach()[:1].expand(N, K)
    assert torch.equal(grouped_mm(row_NK, w, ends), grouped_mm(row_NK.contiguous(), w, ends))


def test_no_rows_at_all() -> None:
    x, w, bias = make(n=0)
    y = grouped_mm(x, w, torch.zeros(E, dtype=torch.int64), bias)
    assert y.shape == (0, M)
    for gradient, t in zip(torch.autograd.grad(y.sum(), [x, w, bias]), (x, w, bias), strict=True):
        assert gradient.shape == t.shape
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_it_has_shapes_where_there_are_no_numbers(dtype: torch.dtype) -> None:
    for place in (torch.device("meta"), FakeTensorMode()):
        with place:
            x, w, bias = (torch.empty(s, dtype=dtype, requires_grad=True) for s in ((N, K), (E, M, K), (E, M)))
            y = grouped_mm(x, w, torch.empty(E, dtype=torch.int32), bias)
            assert (y.shape, y.dtype) == ((N, M), dtype)
            gradients = torch.autograd.grad(y.sum(), [x, w, bias])
            assert [g.shape for g in gradients] == [t.shape for t in (x, w, bias)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_compiled_it_is_the_same(dtype: torch.dtype) -> None:
    """Whatever the split, which is no part of the graph."""
    torch._dynamo.reset()
    x, w, bias = make(dtype)

    def double(*arguments: Any) -> Tensor:
        return 2 * grouped_mm(*arguments)

    compiled: Callable[..., Tensor] = torch.compile(double, fullgraph=True, backend="aot_eager")
    for ends in ENDS.values():
        arguments = (x, w, torch.tensor(ends), bias)
        assert all(map(torch.equal, *(gradients(f(*arguments), [x, w, bias]) for f in (compiled, double))))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operations_are_counted(device: str) -> None:
    """As if each row had an expert; biases and empty experts need none."""
    x, w, bias = (t.detach().to(device).requires_grad_() for t in make())
    ends = torch.tensor(ENDS["rest"], device=device)
    with FlopCounterMode(display=False) as counter:
        y = grouped_mm(x, w, ends, bias)
        assert counter.get_total_flops() == 2 * N * K * M
        y.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * N * K * M


def test_the_widths_and_types_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's kernel does not take goes through the loop."""

    class OnGPU(Tensor):
        is_cuda = True

    def fused(n: int, k: int, m: int, dtype: torch.dtype = torch.bfloat16, shift: int = 0) -> list[bool]:
        numbers = torch.zeros(n * k + shift, dtype=dtype)
        x_NK, y_NM, w_EMK = (
            numbers[shift:].view(n, k),
            torch.zeros(n, m, dtype=dtype),
            torch.zeros(E, m, k, dtype=dtype),
        )
        x_NK, y_NM, w_EMK = (t.as_subclass(OnGPU) for t in (x_NK, y_NM, w_EMK))
        return [grouped._is_fused(x_NK, w_EMK), grouped._is_fused(y_NM, x_NK)]

    assert fused(N, 8, 16) == [True, True]
    for case in ((0, 8, 16), (N, 12, 16), (N, 8, 12), (N, 8, 16, torch.float32), (N, 8, 16, torch.bfloat16, 1)):
        assert fused(*case) == [False, False]
    assert not grouped._is_fused(torch.zeros(N, 8).bfloat16(), torch.zeros(E, 16, 8).bfloat16())
    monkeypatch.setattr(grouped, "_torch_grouped_mm", None)  # an older torch
    assert fused(N, 8, 16) == [False, False]
