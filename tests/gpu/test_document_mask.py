"""Documents kept apart on a CUDA GPU: `pytest tests/gpu/test_document_mask.py`. Elsewhere these skip.

Each check runs in a process that sees the GPUs. FlashAttention needs one of compute capability 8.0 or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.documents import Documents, document_mask, find_documents, masked, varlen, varlen_runs
from models.transformer import Transformer
from tests.gang import Gang
from tests.models.packed import ROWS, T, loss_and_grads, numbers, spans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
# The second of four ways to cut four rows is one document a row.
CUTS = [ROWS, [[T]] * 4, [[1] * T, [T // 2, T // 2], [T - 1, 1], [T]], [[5, 67], [60, 12], [30, 42], [2, 70]]]


def made(device: str, dtype: torch.dtype) -> tuple[Transformer, Tensor]:
    """A random model of 64-wide heads, the same on every device, and the tokens of four rows."""
    keys = {"vocab_size": 61, "n_layers": 2, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "d_ff": 96}
    model = Transformer(ModelConfig.model_validate({**keys, "max_seq_len": T}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, init in model.initial_values().items():
            p = model.get_parameter(name)
            p.copy_(float(init.kind == "ones") + 0.1 * torch.randn(p.shape, generator=generator))
    tokens_BT = torch.randint(0, 61, (len(ROWS), T), generator=generator)
    return model.to(device, dtype), tokens_BT.to(device)


def attention_differs_by() -> dict[str, float]:
    """In a rank: relative differences of `varlen` in half precision from the mask in fp32, outputs and gradients."""
    differences: dict[str, float] = {}
    for dtype in (torch.float16, torch.bfloat16):
        for rows in CUTS:
            for kv_heads, width in ((4, 64), (2, 32), (1, 128), (2, 8)):
                assert varlen_runs(torch.device("cuda"), dtype, width)
                config = ModelConfig(vocab_size=61, n_heads=4, n_kv_heads=kv_heads, head_dim=width)
                documents = find_documents(numbers(rows).cuda(), config, dtype)
                qkv = [torch.randn(4, heads, T, width, device="cuda").to(dtype) for heads in (4, kv_heads, kv_heads)]
                weights = torch.randn(4, T, 4, width, device="cuda").to(dtype)

                def results(function: Callable[..., Tensor], *arguments: Any, cast: torch.dtype) -> list[Tensor]:
                    inputs = [x.to(cast).requires_grad_() for x in qkv]  # noqa: B023
                    y = function(*inputs, *arguments)
                    return [y, *torch.autograd.grad(y, inputs, weights.to(cast))]  # noqa: B023

                ours = results(varlen, documents.offsets, documents.longest, cast=dtype)
                exact = results(masked, document_mask(documents.starts_BT), cast=torch.float32)
                for name, a, b in zip(("y", "dq", "dk", "dv"), ours, exact, strict=True):
                    # Queries that see one key have no gradient but rounding, hence the number added.
                    size = float((a.float() - b).norm() / (b.norm() + 1.0))
                    key = f"{dtype} {name}"
                    differences[key] = max(size, differences.get(key, 0.0))
    return differences


def test_varlen_equals_the_mask(gpu_gang: Gang) -> None:
    for name, difference in gpu_gang.run(attention_differs_by, world=1, timeout=200)[0].items():
        assert difference < (2e-3 if "float16" in name and "bfloat16" not in name else 1.5e-2), name


def fp32_results() -> list[tuple[float, dict[str, Tensor]]]:
    """In a rank: loss and gradients on the CPU and on the GPU."""
    out = []
    for device in ("cpu", "cuda"):
        model, tokens_BT = made(device, torch.float32)
        everything = torch.ones_like(tokens_BT, dtype=torch.bool)
        loss, grads = loss_and_grads(model, tokens_BT, everything, numbers(ROWS).to(device))
        out.append((float(loss), {name: g.cpu() for name, g in grads.items()}))
    return out


def test_fp32_equals_the_cpu(gpu_gang: Gang) -> None:
    (loss, grads), (gpu_loss, gpu_grads) = gpu_gang.run(fp32_results, world=1, timeout=200)[0]
    assert gpu_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in grads.items():
        assert (gpu_grads[name] - gradient).norm() < 1e-4 * gradient.norm(), name


@torch.no_grad()
def leaks(dtype: torch.dtype) -> tuple[float, float]:
    """In a rank: largest change of a logit outside, smallest inside, of a document whose tokens change."""
    model, tokens_BT = made("cuda", dtype)
    documents_BT = numbers(ROWS).cuda()
    before = model(tokens_BT, documents_BT=documents_BT)
    outside, within = 0.0, float("inf")
    for b, where in spans(ROWS):
        changed, inside = tokens_BT.clone(), torch.zeros_like(tokens_BT, dtype=torch.bool)
        changed[b, where] = (changed[b, where] + 1) % 61
        inside[b, where] = True
        change = (model(changed, documents_BT=documents_BT) - before).abs().amax(dim=-1)
        outside, within = max(outside, float(change[~inside].max())), min(within, float(change[inside].min()))
    return outside, within


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_changes_no_logit_of_another(gpu_gang: Gang, dtype: torch.dtype) -> None:
    outside, within = gpu_gang.run(leaks, dtype, world=1, timeout=200)[0]
    assert outside == 0
    assert within > 1e-3


def compiled_losses(dtype: torch.dtype) -> list[tuple[float, float]]:
    """In a rank: losses of eager and of compiled blocks for batches with other documents; raises at a recompilation."""
    model, tokens_BT = made("cuda", dtype)
    everything = torch.ones_like(tokens_BT, dtype=torch.bool)
    eager = [float(loss_and_grads(model, tokens_BT, everything, numbers(rows).cuda())[0]) for rows in CUTS]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True)
        ours = [float(loss_and_grads(model, tokens_BT, everything, numbers(rows).cuda())[0]) for rows in CUTS]
    return list(zip(ours, eager, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_compiled_block_is_compiled_once_for_all_documents(
    gpu_gang: Gang, dtype: torch.dtype, tolerance: float
) -> None:
    for ours, expected in gpu_gang.run(compiled_losses, dtype, world=1, timeout=280)[0]:
        assert ours == pytest.approx(expected, rel=tolerance)


def waits(dtype: torch.dtype) -> bool:
    """In a rank: whether FlashAttention is used; raises where a block waits for the device."""
    model, tokens_BT = made("cuda", dtype)
    met: list[tuple[Tensor, Tensor, Documents]] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, a: met.append((a[0].detach(), a[1], a[3])))
    loss_and_grads(model, tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), numbers(ROWS).cuda())
    hook.remove()
    x_BTD, rope, documents = met[0]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for block in model.blocks:
            block(x_BTD.requires_grad_(), rope, None, documents)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return documents.offsets is not None


def test_blocks_do_not_wait_for_the_device(gpu_gang: Gang) -> None:
    assert gpu_gang.run(waits, torch.bfloat16, world=1)[0]
    assert not gpu_gang.run(waits, torch.float32, world=1)[0]
