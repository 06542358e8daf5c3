"""Documents are kept apart also under what the trainer puts around a model: checkpointing, compilation, sharding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models import documents as module
from models.transformer import Transformer
from tests.models.packed import KINDS, ROWS, T, assert_close, flash, loss_and_grads, numbers

Build = Callable[..., Transformer]


@pytest.mark.parametrize("keys", KINDS)
def test_checkpointed_blocks(build: Build, packed_BT: Tensor, mask_BT: Tensor, way: str, keys: dict[str, Any]) -> None:
    model = build(**keys, max_seq_len=T)
    plain = loss_and_grads(model, packed_BT, mask_BT, numbers(ROWS))
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert_close(loss_and_grads(model, packed_BT, mask_BT, numbers(ROWS)), plain, 1e-7)


def some_documents(seed: int) -> Tensor:
    """Numbers of rows cut at random: other documents, and more or fewer of them, for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(len(ROWS), T, generator=generator) < 0.02 * (seed + 1)).cumsum(dim=1)


@torch.library.custom_op("gramian_tests::flash", mutates_args=())
def opaque_flash(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """`flash` as a compiled block meets FlashAttention: an operator that is not looked into. Forward only."""
    return flash(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1])


@opaque_flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    return torch.empty_like(q)


@pytest.mark.parametrize(("backend", "checkpointing"), [("inductor", False), ("aot_eager", True)])
def test_a_compiled_block_is_compiled_once_for_all_documents(
    build: Build,
    packed_BT: Tensor,
    mask_BT: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    checkpointing: bool,
) -> None:
    """In one graph, by the mask, though eager blocks take the loop."""
    monkeypatch.setattr(module, "loop_pays", lambda *_: True)
    torch._dynamo.reset()
    model = build(n_kv_heads=2, max_seq_len=T)
    batches = [numbers(ROWS), *(some_documents(seed) for seed in range(4)), torch.zeros_like(packed_BT)]
    plain = [loss_and_grads(model, packed_BT, mask_BT, documents_BT) for documents_BT in batches]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for block in model.blocks:
            forward = partial(checkpoint, block.forward, use_reentrant=False) if checkpointing else block.forward
            block.forward = torch.compile(forward, fullgraph=True, backend=backend)
        for documents_BT, expected in zip(batches, plain, strict=True):
            assert_close(loss_and_grads(model, packed_BT, mask_BT, documents_BT), expected, 1e-5)


@torch.no_grad()
def test_a_block_compiled_around_varlen_is_compiled_once(
    build: Build, packed_BT: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of documents is a size that varies from the first batch on, and the longest is not asked for."""
    torch._dynamo.reset()
    model = build(n_kv_heads=2, max_seq_len=T)
    batches = [numbers(ROWS), *(some_documents(seed) for seed in range(4)), torch.zeros_like(packed_BT)]
    plain = [model(packed_BT, documents_BT=documents_BT) for documents_BT in batches]

    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, cu: Tensor, _: Tensor, longest: int, __: int, **keys: Any
    ) -> Tensor:
        return opaque_flash(q, k, v, cu, longest)

    monkeypatch.setattr(module, "varlen_runs", lambda *_: True)
    monkeypatch.setattr(module, "_varlen_attn", lambda: varlen_attn)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        for documents_BT, expected in zip(batches, plain, strict=True):
            torch.testing.assert_close(model(packed_BT, documents_BT=documents_BT), expected, rtol=1e-5, atol=1e-5)


def test_a_model_can_be_compiled_as_a_whole(build: Build, packed_BT: Tensor) -> None:
    torch._dynamo.reset()
    model = build(max_seq_len=T)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for documents_BT in (numbers(ROWS), some_documents(3)):
            expected = model(packed_BT, documents_BT=documents_BT)
            ours = whole(packed_BT, documents_BT=documents_BT)
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("keys", KINDS)
def test_fully_sharded_blocks(
    build: Build, packed_BT: Tensor, mask_BT: Tensor, way: str, keys: dict[str, Any], precision: str
) -> None:
    """Sharded, checkpointed and in mixed precision, as the trainer wraps them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(**keys, max_seq_len=T)
    plain = loss_and_grads(model, packed_BT, mask_BT, numbers(ROWS))
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    loss, grads = loss_and_grads(model, packed_BT, mask_BT, numbers(ROWS))
    ours = loss, {n: g.full_tensor() for n, g in grads.items()}
    assert_close(ours, plain, 1e-6 if precision == "fp32" else 0.1)
