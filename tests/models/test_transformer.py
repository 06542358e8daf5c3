"""The whole model: order, loss, precision, and the wrappers that the trainer puts around it."""

from __future__ import annotations

import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.config import ModelConfig
from models.loss import summed_cross_entropy
from models.transformer import Transformer
from tests.models.packed import Result, loss_and_grads

Build = Callable[..., Transformer]
KINDS: list[dict[str, Any]] = [
    {"n_kv_heads": 2},
    {"position": "learned", "norm": "layernorm", "norm_bias": True, "activation": "gelu"},
    {"position": "sinusoidal", "activation": "relu", "attention_bias": True, "mlp_bias": True},
    {"position": "none", "qk_norm": True, "tie_embeddings": True},
]


def _assert_same(a: Result, b: Result, tolerance: float) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=tolerance, atol=0)
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        assert (a[1][name] - b[1][name]).norm() <= tolerance * a[1][name].norm(), name


@torch.no_grad()
@pytest.mark.parametrize("position", typing.get_args(ModelConfig.model_fields["position"].annotation))
def test_order_matters_exactly_where_positions_enter(build: Build, tokens_BT: Tensor, position: str) -> None:
    # One layer: without positions its last row sees earlier tokens as a set.
    model = build(position=position, n_layers=1)
    swapped = tokens_BT.clone()
    swapped[:, [2, 9]] = swapped[:, [9, 2]]
    difference = (model(swapped)[:, -1] - model(tokens_BT)[:, -1]).abs().max()
    assert difference < 1e-5 if position == "none" else difference > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("matrix", ["wq", "wk"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_qk_norm_makes_scores_blind_to_scale(build: Build, tokens_BT: Tensor, matrix: str, qk_norm: bool) -> None:
    model = build(qk_norm=qk_norm, norm_eps=1e-9)
    before = model(tokens_BT)
    for i in range(2):
        model.get_parameter(f"blocks.{i}.attention.{matrix}.weight").mul_(3.0)
    assert torch.allclose(model(tokens_BT), before, atol=1e-4) == qk_norm


@torch.no_grad()
def test_tied_head_is_the_embedding(build: Build, tokens_BT: Tensor) -> None:
    model = build(tie_embeddings=True)
    free = build(tie_embeddings=False)
    assert free.head is not None
    for name, p in model.named_parameters():
        free.get_parameter(name).copy_(p)
    free.head.weight.copy_(model.embedding.weight)
    assert torch.equal(model(tokens_BT), free(tokens_BT))


def test_loss_is_the_sum_over_the_mask(build: Build, tokens_BT: Tensor) -> None:
    model = build()
    mask = torch.rand(tokens_BT.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    log_p = F.log_softmax(model(tokens_BT).double(), dim=-1)
    picked = -log_p.gather(2, tokens_BT[..., None])[..., 0]
    loss = model(tokens_BT, tokens_BT, mask).cross_entropy
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(picked[mask].sum().item(), rel=1e-5)
    assert model(tokens_BT, tokens_BT).cross_entropy.item() == pytest.approx(picked.sum().item(), rel=1e-5)


@pytest.mark.parametrize("keys", KINDS)
def test_a_meta_build_has_no_buffers_to_lose(build: Build, tokens_BT: Tensor, keys: dict[str, Any]) -> None:
    source = build(**keys)
    with torch.device("meta"):
        model = Transformer(source.config)
    model.to_empty(device="cpu")
    assert not list(model.buffers())
    with torch.no_grad():
        for name, p in source.named_parameters():
            model.get_parameter(name).copy_(p)
    assert torch.equal(model(tokens_BT), source(tokens_BT))


@pytest.mark.parametrize("keys", KINDS)
def test_bf16_parameters_give_fp32_logits_and_loss(build: Build, tokens_BT: Tensor, keys: dict[str, Any]) -> None:
    model = build(**keys)
    exact = model(tokens_BT[:1, :4])
    model.bfloat16()
    logits = model(tokens_BT[:1, :4])
    loss, grads = loss_and_grads(model, tokens_BT[:1, :4])
    assert logits.dtype == loss.dtype == torch.float32
    assert (logits - exact).norm() < 0.05 * exact.norm()
    assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in grads.values())


def test_a_float64_model_stays_in_float64(build: Build, tokens_BT: Tensor) -> None:
    model = build()
    exact = build().double()(tokens_BT)
    assert exact.dtype == torch.float64
    assert (model(tokens_BT) - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("keys", KINDS)
def test_checkpointed_blocks_give_the_same_gradients(build: Build, tokens_BT: Tensor, keys: dict[str, Any]) -> None:
    model = build(**keys)
    plain = loss_and_grads(model, tokens_BT)
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
    _assert_same(plain, loss_and_grads(model, tokens_BT), 1e-7)


def test_compiled_blocks_equal_eager_and_compile_once(build: Build, tokens_BT: Tensor) -> None:
    torch._dynamo.reset()
    model = build(n_kv_heads=2)
    plain = loss_and_grads(model, tokens_BT)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)
        _assert_same(plain, loss_and_grads(model, tokens_BT), 1e-5)


@pytest.mark.parametrize("keys", KINDS)
def test_every_kind_of_block_is_one_graph(build: Build, tokens_BT: Tensor, keys: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = build(**keys)
    plain = loss_and_grads(model, tokens_BT)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    _assert_same(plain, loss_and_grads(model, tokens_BT), 1e-5)


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("keys", KINDS)
def test_fully_sharded_blocks_give_the_same_gradients(
    build: Build, tokens_BT: Tensor, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a loss in several checkpointed chunks, whose recomputation needs the root's gathered parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build(**keys)
    plain = loss_and_grads(model, tokens_BT)
    monkeypatch.setattr("models.transformer.summed_cross_entropy", partial(summed_cross_entropy, max_logits=10 * 61))
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss, grads = loss_and_grads(model, tokens_BT)
    _assert_same(plain, (loss, {n: g.full_tensor() for n, g in grads.items()}), 1e-6)


def test_construction_on_meta_is_by_config_alone() -> None:
    config = ModelConfig(preset="llama-1m", vocab_size=512)
    with torch.device("meta"):
        assert all(p.is_meta for p in Transformer(config).parameters())
