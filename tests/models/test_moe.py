"""The mixture-of-experts layer against the loops of moe_reference.py, and what a router must never do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig
from models.moe import MoE, Routing, balance_loss
from models.transformer import Transformer
from tests.models import moe_reference
from trainer.activation import checkpoint_blocks

Build = Callable[..., Transformer]
B, T, D, E = 3, 10, 16, 6
SWITCH = {"top_k": 1, "normalize": False, "capacity_factor": 0.9}
GLM = {"router": "sigmoid", "selection_bias": True, "routed_scale": 2.5, "n_shared_experts": 1}
BIASES: dict[str, Any] = {"mlp_bias": True}
# (keys of model.moe, keys of model)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({}, {}),
    "gpt-oss": ({"router_bias": True, "top_k": 4}, {"activation": "swiglu_clamped", "mlp_bias": True}),
    "clamped low": ({}, {"activation": "swiglu_clamped", "activation_limit": 0.5, "mlp_bias": True}),
    "glm": (GLM, {}),
    "switch": (SWITCH, {"activation": "relu"}),
    "softmax as it comes": ({"normalize": False, "routed_scale": 0.5, "selection_bias": True}, {"activation": "geglu"}),
    "sigmoid as it comes": ({"router": "sigmoid", "normalize": False, "router_bias": True}, {"activation": "gelu"}),
    "ungated, biases": ({"n_shared_experts": 2, "router_bias": True}, {"activation": "gelu", "mlp_bias": True}),
    "capacity": ({**GLM, "top_k": 3, "capacity_factor": 0.7, "n_shared_experts": 0}, {"mlp_bias": True}),
    "every expert": ({"top_k": E}, {"mlp_bias": True}),
    "every expert, sigmoid": ({**GLM, "top_k": E}, {}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def config_of(moe: dict[str, Any], keys: dict[str, Any]) -> ModelConfig:
    return ModelConfig(d_model=D, d_ff=20, moe={"n_experts": E, "d_ff": 12, **moe}, **keys)


def make(moe: dict[str, Any], keys: dict[str, Any] | None = None) -> MoE:
    """A layer whose parameters and buffers are all random."""
    layer, generator = MoE(config_of(moe, keys or {})), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in (*layer.parameters(), *layer.buffers()):
            p.copy_(0.4 * torch.randn(p.shape, generator=generator))
    return layer


@pytest.fixture
def x_BTD() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture
def counted_BT() -> Tensor:
    """Some tokens of the first row count, all of the second, none of the third."""
    counted = torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.5
    counted[1], counted[2] = True, False
    return counted


def sent(layer: MoE) -> list[list[list[int]]]:
    """A list that gets the experts of every token in every forward; E: dropped."""
    seen: list[list[list[int]]] = []

    def spy(x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, whole: bool) -> Tensor:
        assert not whole or int(chosen_NK.max()) < layer.moe.n_experts
        seen.append(chosen_NK.tolist())
        return MoE.mix(layer, x_ND, chosen_NK, weights_NK, whole=whole)

    layer.mix = spy  # type: ignore[method-assign]
    return seen


def deviation(got: Tensor | None, want: Tensor | None) -> float:
    """Relative, in the Frobenius norm. A gradient that is None is one of zeros."""
    if got is None or want is None:
        assert all(t is None or not t.any() for t in (got, want))
        return 0.0
    return ((got.double() - want).norm() / want.norm()).item() if got.any() or want.any() else 0.0


def compare(layer: MoE, x_BTD: Tensor, counted_BT: Tensor, even: bool = False) -> Routing:
    """Hold the layer's output, losses and the gradients of each to the reference, once all choices agree.

    Args:
        even: that each token chooses all experts. Then the balance is constant, and its gradient but rounding.
    """
    seen = sent(layer)
    y, routing = layer(x_BTD, counted_BT)
    p = {name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}
    x64_BTD = x_BTD.detach().double().requires_grad_()
    config, buffers = layer.experts.config, dict(layer.named_buffers())
    want = moe_reference.answer({**p, **buffers}, config, x64_BTD, counted_BT.tolist())
    assert (seen, routing.counts.tolist(), int(routing.dropped)) == ([want.sent], want.counts, want.dropped)

    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    got64 = {"y": (want.y * dy).sum(), "balance": want.balance, "z": want.z}
    far = {name: deviation(got, want) for name, got, want in zip(got64, (y, *routing[:2]), want[:3], strict=True)}
    inputs, inputs64 = {"x": x_BTD, **dict(layer.named_parameters())}, [x64_BTD, *p.values()]
    for of, got in {"y": (y * dy).sum(), "balance": routing.balance, "z": routing.z}.items():
        gradients = torch.autograd.grad(got, list(inputs.values()), retain_graph=True, allow_unused=True)
        exact = torch.autograd.grad(got64[of], inputs64, retain_graph=True, allow_unused=True)
        for name, g, g64 in zip(inputs, gradients, exact, strict=True):
            if even and of == "balance":
                assert g is None or g.abs().max() < 1e-7
            else:
                far[f"d {of} / d {name}"] = deviation(g, g64)
    assert all(value <= 1e-6 for value in far.values()), far
    return routing


@every_kind
def test_the_layer_is_the_loop_over_experts(kind: str, x_BTD: Tensor, counted_BT: Tensor) -> None:
    """Over 25 other seeds the largest deviation was 5.8e-7, of a router's bias: a sum with signs of N gradients."""
    moe, keys = KINDS[kind]
    routing = compare(make(moe, keys), x_BTD, counted_BT, even=moe.get("top_k") == E)
    assert (int(routing.dropped) > 0) == ("capacity_factor" in moe)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [[2], [0, 5]])
def test_experts_without_tokens(x_BTD: Tensor, counted_BT: Tensor, router: str, experts: list[int]) -> None:
    """All tokens go to the same ones; the others' gradients are zero, and there."""
    layer = make({"top_k": len(experts), "normalize": False, "selection_bias": True, "router": router}, BIASES)
    layer.selection_bias.zero_()[experts] = 9.0
    routing = compare(layer, x_BTD, counted_BT)
    assert routing.counts.nonzero().flatten().tolist() == experts
    layer(x_BTD)[0].sum().backward()
    for p in layer.experts.parameters():
        assert p.grad is not None
        assert p.grad.flatten(1).any(1).nonzero().flatten().tolist() == experts


@torch.no_grad()
def test_without_a_capacity_no_token_is_lost(x_BTD: Tensor) -> None:
    layer = make({"capacity_factor": 0.5})
    for moe, drop in ((layer, False), (make({}), True)):
        seen = sent(moe)
        _, routing = moe(x_BTD, drop=drop)
        assert (int(routing.counts.sum()), int(routing.dropped)) == (B * T * 2, 0)
        assert all(sorted({*experts, E})[:2] == sorted(experts) for experts in seen[0])
    assert layer(x_BTD)[1].dropped > 0


@torch.no_grad()
def test_exactly_the_assignments_beyond_the_capacity_are_dropped() -> None:
    """Three experts take two of a row's eight each: 0.75 * 4 * 2 / 3. 3 stands for a dropped choice."""
    layer = make({"n_experts": 3, "capacity_factor": 0.75})
    wishes = torch.tensor([[[0, 1], [1, 0], [0, 2], [2, 1]], [[0, 1], [0, 1], [0, 1], [0, 1]]])
    layer.router.weight.copy_(torch.eye(3, D))
    x_BTD = torch.zeros(2, 4, D).scatter(2, wishes, torch.tensor([2.0, 1.0]).expand(2, 4, 2))
    seen = sent(layer)
    y_BTD, routing = layer(x_BTD, torch.tensor([[True, True, True, False], [True] * 4]))
    # Position 1's second choice comes before position 2's first one.
    first = [[0, 1], [1, 0], [3, 2], [2, 3]]
    second = [[0, 1], [0, 1], [3, 3], [3, 3]]
    assert seen == [first + second]
    assert routing.counts.tolist() == [3 + 4, 2 + 4, 1]
    assert routing.dropped == 1 + 4
    assert y_BTD.any(-1).tolist() == [[True] * 4, [True, True, False, False]]
    # What is left of a token keeps its weight.
    alone_BTD = make({"n_experts": 3, "capacity_factor": 0.01})  # room for one
    alone_BTD.load_state_dict(layer.state_dict())
    e = 1 / (1 + torch.tensor(1.0).exp())
    expert = alone_BTD.experts(x_BTD[0, 2:3], torch.tensor([0, 0, 1]))
    torch.testing.assert_close(y_BTD[0, 2:3], e * expert)
    assert alone_BTD(x_BTD)[1].dropped == (8 - 3) + (8 - 2)


def test_a_forward_leaves_nothing_behind(x_BTD: Tensor, counted_BT: Tensor) -> None:
    layer = make(*KINDS["capacity"])
    before, names = copy.deepcopy(layer.state_dict()), {m: set(vars(m)) for m in layer.modules()}
    (y, routing), (y2, routing2) = (layer(x_BTD, counted_BT) for _ in range(2))
    assert all(map(torch.equal, (y, *routing), (y2, *routing2)))
    (y.sum() + routing.balance).backward()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert names == {m: set(vars(m)) for m in layer.modules()}
    assert set(dict(layer.named_buffers())) == {"selection_bias"}


@pytest.mark.parametrize("kind", ["capacity", "gpt-oss"])
def test_computed_again_the_layer_is_the_same_to_the_bit(kind: str, x_BTD: Tensor, counted_BT: Tensor) -> None:
    def run(call: Callable[..., Any]) -> list[Tensor]:
        layer = make(*KINDS[kind])
        seen = sent(layer)
        y, routing = call(layer, x_BTD, counted_BT)
        gradients = torch.autograd.grad(y.square().sum() + routing.balance + routing.z, [x_BTD, *layer.parameters()])
        assert seen == seen[:1] * (1 if call is plainly else 2)
        return [y, *routing, *gradients]

    def plainly(layer: MoE, *arguments: Any) -> Any:
        return layer(*arguments)

    again = run(lambda *arguments: checkpoint(*arguments, use_reentrant=False))
    assert all(map(torch.equal, run(plainly), again))


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_nor_does_a_model_count_twice(
    build: Build, tokens_BT: Tensor, checkpointing: Literal["full", "selective"]
) -> None:
    def run(model: Transformer) -> tuple[list[Tensor], int]:
        seen = [sent(block.moe) for block in model.blocks]  # type: ignore[arg-type]
        losses = model(tokens_BT, tokens_BT.roll(-1, 1), tokens_BT > 9)
        assert losses.routing is not None
        (losses.cross_entropy + losses.routing.balance + losses.routing.z).backward()
        return [losses.cross_entropy, *losses.routing, *(p.grad for p in model.parameters())], sum(map(len, seen))

    moe = {"d_ff": 24, "n_shared_experts": 1, "capacity_factor": 1.0}
    expected, once = run(build(moe=moe))
    model = build(moe=moe)
    checkpoint_blocks(model, checkpointing, every=1)
    found, twice = run(model)
    assert (once, twice) == (2, 4)
    assert all(map(torch.equal, expected, found))


CAPACITIES = {"switch": {**SWITCH, "n_experts": 4}, "two": {"n_experts": 4, "capacity_factor": 0.8}}


def leaks(model: Transformer, tokens_BT: Tensor) -> list[int]:
    """Positions whose change shows in a logit before them, beyond rounding: products of more rows add up otherwise."""
    before, found = model(tokens_BT), []
    for j in range(tokens_BT.shape[1]):
        changed = tokens_BT.clone()
        changed[:, j] = (changed[:, j] + 1) % model.config.vocab
        change_BTV = (model(changed) - before).abs()
        found += [j] if (change_BTV[:, :j] > 1e-5).any() else []
        assert change_BTV[:, j:].amax(dim=(0, 2)).min() > 0.1
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", CAPACITIES)
def test_with_a_capacity_too_no_position_sees_a_later_one(build: Build, tokens_BT: Tensor, kind: str) -> None:
    model = build(moe=CAPACITIES[kind])
    assert (model(tokens_BT, tokens_BT).routing.dropped > 0).all()
    assert leaks(model, tokens_BT) == []


@torch.no_grad()
def test_serving_first_choices_first_is_caught(
    build: Build, tokens_BT: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, chosen = MoE._choose, []

    def remember(self: MoE, scores_BTE: Tensor) -> tuple[Tensor, Tensor]:
        chosen[:] = choose(self, scores_BTE)
        return chosen[0], chosen[1]

    def first_choices_first(self: MoE, assigned_BTE: Tensor) -> Tensor:
        first_BTE = torch.zeros_like(assigned_BTE).scatter(-1, chosen[0][..., :1], True)
        second_BTE = assigned_BTE & ~first_BTE
        return (first_BTE.cumsum(1) + second_BTE * (first_BTE.sum(1, keepdim=True) + second_BTE.cumsum(1))) <= 7

    monkeypatch.setattr(MoE, "_choose", remember)
    monkeypatch.setattr(MoE, "_within_capacity", first_choices_first)
    assert leaks(build(moe=CAPACITIES["two"]), tokens_BT)


@pytest.mark.parametrize("kind", ["capacity", "gpt-oss", "switch"])
def test_compiled_it_is_one_graph_and_the_same(kind: str, x_BTD: Tensor, counted_BT: Tensor) -> None:
    torch._dynamo.reset()  # what it has seen of other configs it would take for a variable
    layer, counter = make(*KINDS[kind]), CompileCounterWithBackend("aot_eager")

    def run(call: Callable[..., Any]) -> list[Tensor]:
        y, routing = call(x_BTD, counted_BT)
        gradients = torch.autograd.grad(y.square().sum() + routing.balance + routing.z, [x_BTD, *layer.parameters()])
        return [y, *routing, *gradients]

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for got, want in zip(run(compiled), run(layer), strict=True):
        assert deviation(got, want.double()) < 1e-6
    run(compiled)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["capacity", "gpt-oss"])
def test_it_runs_where_there_are_no_numbers(kind: str) -> None:
    for place in (torch.device("meta"), FakeTensorMode()):
        with place:
            moe, keys = KINDS[kind]
            layer, x_BTD = MoE(config_of(moe, keys)), torch.empty(B, T, D, requires_grad=True)
            y, routing = layer(x_BTD, torch.empty(B, T, dtype=torch.bool))
            (y.sum() + routing.balance).backward()
            assert (y.shape, routing.counts.shape, x_BTD.grad is None) == ((B, T, D), (E,), False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("kind", "matrices", "shared"), [("glm", 3, 1), ("switch", 2, 0)])
def test_operations_are_counted(device: str, kind: str, matrices: int, shared: int) -> None:
    """Two for each row of each matrix in the forward pass, four in the backward pass."""
    layer = make(*KINDS[kind]).to(device)
    x_BTD = torch.ones(B, T, D, device=device, requires_grad=True)
    experts = layer.moe.top_k + shared
    forward = 2 * B * T * (D * E + experts * matrices * D * 12)
    with FlopCounterMode(display=False) as counter:
        y, routing = layer(x_BTD)
    assert counter.get_total_flops() == forward
    with counter:
        (y.sum() + routing.balance).backward()
    assert counter.get_total_flops() == 2 * forward  # a counter starts anew


@pytest.mark.parametrize("kind", ["capacity", "gpt-oss", "glm"])
def test_bf16_is_near(kind: str, x_BTD: Tensor, counted_BT: Tensor) -> None:
    """The router computes in fp32 whatever comes in, so that at the same numbers it chooses the same."""
    x_BTD = x_BTD.detach().bfloat16().requires_grad_()
    low = make(*KINDS[kind]).bfloat16()
    high, x32_BTD = copy.deepcopy(low).float(), x_BTD.detach().float().requires_grad_()
    (y, routing), (y32, routing32) = low(x_BTD, counted_BT), high(x32_BTD, counted_BT)
    assert (y.dtype, routing.balance.dtype, routing.z.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert all(map(torch.equal, routing, routing32))
    assert deviation(y, y32.double()) < 0.01
    for out in ((y.float().square().sum() + routing.balance), (y32.square().sum() + routing32.balance)):
        out.backward()
    for p, p32 in zip((x_BTD, *low.parameters()), (x32_BTD, *high.parameters()), strict=True):
        assert p.grad is not None
        assert p32.grad is not None
        assert deviation(p.grad, p32.grad.double()) < 0.02


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_tokens_that_do_not_count(router: str, x_BTD: Tensor, counted_BT: Tensor) -> None:
    """They are computed alike, and have no part in the losses; rows of them alone give zeros."""
    layer = make({"router": router})
    y, routing = layer(x_BTD, counted_BT)
    assert torch.equal(y, layer(x_BTD)[0])
    (gradient,) = torch.autograd.grad(routing.balance + routing.z, x_BTD)
    assert gradient.isfinite().all()
    assert torch.equal(gradient.any(-1), counted_BT)
    _, routing = layer(x_BTD, torch.zeros_like(counted_BT))
    assert [part.abs().sum() for part in routing] == [0, 0, 0, 0]
    gradients = torch.autograd.grad(routing.balance + routing.z, [x_BTD, *layer.router.parameters()])
    assert not any(gradient.any() for gradient in gradients)


@torch.no_grad()
def test_the_balance_is_one_where_all_are_alike(x_BTD: Tensor) -> None:
    layer = make({"router": "sigmoid"})
    layer.router.weight.zero_()
    torch.testing.assert_close(layer(x_BTD)[1].balance, torch.tensor(float(B)))
    one_BTE = torch.eye(E)[None, :1].expand(1, T, E)
    assert balance_loss(one_BTE, T * torch.eye(E)[:1], torch.ones(1, T, dtype=torch.bool)) == E


@torch.no_grad()
def test_layers_add_up(x_BTD: Tensor) -> None:
    one, two = (make(KINDS[kind][0])(x_BTD)[1] for kind in ("capacity", "mixtral"))
    both = Routing.add_up([one, two])
    assert (both.balance, both.z) == (one.balance + two.balance, one.z + two.z)
    assert (both.counts.tolist(), both.dropped.tolist()) == (
        [one.counts.tolist(), two.counts.tolist()],
        [one.dropped, 0],
    )
