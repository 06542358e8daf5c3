"""Documents packed into a row compute what they compute alone, whichever way they are kept apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models import documents as module
from models.cache import KVCache
from models.config import ModelConfig
from models.documents import Documents, document_mask, find_documents, looped, masked, varlen
from models.positions import take_rows
from models.transformer import Transformer
from tests.models.packed import (
    KINDS,
    PADDED,
    ROWS,
    WRITTEN_OUT,
    Result,
    T,
    assert_close,
    flash,
    loss_and_grads,
    numbers,
    spans,
)

Build = Callable[..., Transformer]


def one_by_one(model: Transformer, packed_BT: Tensor) -> Result:
    """Sum of the documents' losses, and its gradient: each document a row of its own, without document numbers."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for b, where in spans(ROWS):
        document = packed_BT[b : b + 1, where]
        if document.shape[1] > 1:
            loss = model(document[:, :-1], document[:, 1:]).cross_entropy
            loss.backward()
            total += loss.detach()
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("keys", KINDS)
def test_packed_rows_equal_their_documents_one_by_one(
    build: Build,
    packed_BT: Tensor,
    mask_BT: Tensor,
    way: str,
    keys: dict[str, Any],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    model = build(**keys, max_seq_len=T).to(dtype)
    packed = loss_and_grads(model, packed_BT, mask_BT, numbers(ROWS))
    assert_close(packed, one_by_one(model, packed_BT), tolerance)


@pytest.mark.parametrize("keys", WRITTEN_OUT)
def test_so_do_rows_whose_scores_are_written_out(
    build: Build, packed_BT: Tensor, mask_BT: Tensor, keys: dict[str, Any]
) -> None:
    model = build(**keys, max_seq_len=T).double()
    packed = loss_and_grads(model, packed_BT, mask_BT, numbers(ROWS))
    assert_close(packed, one_by_one(model, packed_BT), 1e-12)


def test_without_document_numbers_they_do_not(build: Build, packed_BT: Tensor, mask_BT: Tensor) -> None:
    """The comparison above can fail."""
    for keys in [*KINDS, *WRITTEN_OUT]:
        model = build(**keys, max_seq_len=T)
        mixed, _ = loss_and_grads(model, packed_BT, mask_BT, None)
        assert abs(mixed / one_by_one(model, packed_BT)[0] - 1) > 1e-4


@torch.no_grad()
def test_rotary_positions_start_at_0_in_each_document(build: Build, packed_BT: Tensor) -> None:
    """Rotated scores tell only distances, so no comparison of logits would see it."""
    tables: list[Tensor] = []
    model = build(max_seq_len=T)
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: tables.append(arguments[1]))
    model(packed_BT)
    model(packed_BT, documents_BT=numbers(ROWS))
    whole_2TK, packed_2B1TK = tables
    for b, where in spans(ROWS):
        assert torch.equal(packed_2B1TK[:, b, 0, where], whole_2TK[:, : where.stop - where.start])


@torch.no_grad()
@pytest.mark.parametrize("keys", KINDS)
def test_a_document_changes_no_logit_of_another(
    build: Build, packed_BT: Tensor, way: str, keys: dict[str, Any]
) -> None:
    model = build(**keys, max_seq_len=T)
    documents_BT = numbers(ROWS)
    before, mixed_before = model(packed_BT, documents_BT=documents_BT), model(packed_BT)
    for b, where in spans(ROWS):
        changed = packed_BT.clone()
        changed[b, where] = (changed[b, where] + 1) % 61
        inside = torch.zeros_like(packed_BT, dtype=torch.bool)
        inside[b, where] = True
        change = (model(changed, documents_BT=documents_BT) - before).abs().amax(dim=-1)
        assert change[~inside].max() == 0
        assert change[inside].min() > 1e-3
        after = (model(changed) - mixed_before).abs().amax(dim=-1)[b, where.stop :]
        assert after.numel() == 0 or after.min() > 1e-5


def test_padding_is_a_document_that_nothing_hears_of(
    build: Build, packed_BT: Tensor, mask_BT: Tensor, way: str
) -> None:
    model = build(n_kv_heads=2, max_seq_len=T)
    before = loss_and_grads(model, packed_BT, mask_BT, numbers(ROWS))
    for b in PADDED:
        packed_BT[b, -ROWS[b][-1] :] = 0
    assert_close(loss_and_grads(model, packed_BT, mask_BT, numbers(ROWS)), before, 0.0)


@pytest.mark.parametrize("keys", KINDS)
def test_a_row_that_is_one_document_computes_as_without_numbers(
    build: Build, packed_BT: Tensor, keys: dict[str, Any]
) -> None:
    """To the bit, whether or not a loop pays; but a learned position's gradient adds its rows up in another order."""
    model = build(**keys, max_seq_len=T)
    everything = torch.ones_like(packed_BT, dtype=torch.bool)
    loss, grads = loss_and_grads(model, packed_BT, everything, torch.full_like(packed_BT, 5))
    expected_loss, expected = loss_and_grads(model, packed_BT, everything, None)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(model(packed_BT, documents_BT=torch.zeros_like(packed_BT)), model(packed_BT))
    assert_close((loss, grads), (expected_loss, expected), 1e-6)
    assert all(torch.equal(grads[name], expected[name]) for name in grads if name != "position_embedding.weight")


@torch.no_grad()
def test_only_changes_of_the_number_count(build: Build, packed_BT: Tensor) -> None:
    model = build(max_seq_len=T)
    expected = model(packed_BT, documents_BT=numbers(ROWS))
    for other in (numbers(ROWS).int(), 7 + 3 * numbers(ROWS), numbers(ROWS) - 10**12):
        assert torch.equal(model(packed_BT, documents_BT=other), expected)


def test_documents_are_found() -> None:
    """Starts, mask, lengths and offsets of two small rows, written out."""
    config = ModelConfig(vocab_size=61)
    found = find_documents(torch.tensor([[0, 0, 1, 2], [4, 9, 9, 9]]), config, torch.float32)
    assert found.starts_BT.tolist() == [[0, 0, 2, 3], [0, 1, 1, 1]]
    assert document_mask(found.starts_BT)[:, 0].int().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CALL_COST", 0)
        assert find_documents(torch.tensor([[0, 0, 1, 2], [4, 9, 9, 9]]), config, torch.float32).lengths == (
            (2, 1, 1),
            (1, 3),
        )
        patch.setattr(module, "varlen_runs", lambda *_: True)
        there = find_documents(torch.tensor([[0, 0, 1, 2], [4, 9, 9, 9]]), config, torch.float32)
    assert there.offsets is not None
    assert (there.offsets.tolist(), there.longest) == ([0, 2, 3, 4, 5, 8], 3)


def test_a_loop_is_taken_where_documents_are_long() -> None:
    """Many short documents go by the mask; one document a row always by the loop, which is then a plain call."""
    config = ModelConfig(vocab_size=61)

    def lengths(rows: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        return find_documents(numbers(rows), config, torch.float32).lengths

    assert lengths([[1000, 500, 548]]) == ((1000, 500, 548),)
    assert lengths([[2] * 128]) == ()
    assert lengths([[8], [8], [8]]) == ((8,), (8,), (8,))


@pytest.mark.parametrize("rows", [ROWS, [[30, 42]] * 4, [[72]] * 4, [[1] * 72, [71, 1], [36, 36], [72]]])
@pytest.mark.parametrize(("kv_heads", "window", "scale"), [(4, None, None), (2, None, 0.3), (1, 8, None)])
def test_the_loop_and_varlen_equal_the_oracle(
    rows: list[list[int]], kv_heads: int, window: int | None, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    starts_BT = find_documents(numbers(rows), ModelConfig(vocab_size=61), torch.float64).starts_BT
    lengths = tuple(tuple(row) for row in rows)
    offsets = torch.tensor([0, *(n for row in rows for n in row)]).cumsum(0).int()

    def results(function: Callable[..., Tensor], *arguments: Any) -> list[Tensor]:
        generator.manual_seed(0)
        qkv = [
            torch.randn(4, heads, T, 8, generator=generator, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)
        ]
        weights = torch.randn(4, T, 4, 8, generator=generator, dtype=torch.float64)
        for x in qkv:
            x.requires_grad_()
        y = function(*qkv, *arguments)
        (y * weights).sum().backward()
        return [y.detach(), *(x.grad for x in qkv if x.grad is not None)]

    oracle = results(masked, document_mask(starts_BT, window=window), scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_varlen_attn", lambda: flash)
        longest = max(max(row) for row in rows)
        others = [results(looped, lengths, window, scale), results(varlen, offsets, longest, window, scale)]
    for other in others:
        for ours, expected in zip(other, oracle, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_a_shared_position_add_up_in_fp32() -> None:
    """In bf16 a sum of ones ends at 256."""
    table_TD = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    take_rows(table_TD, torch.zeros(2, 500, dtype=torch.int64)).sum().backward()
    assert table_TD.grad is not None
    assert table_TD.grad.tolist() == [[1000.0, 1000.0], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("keys", KINDS)
def test_bf16_stays_near_fp32(build: Build, packed_BT: Tensor, mask_BT: Tensor, way: str, keys: dict[str, Any]) -> None:
    model = build(**keys, max_seq_len=T)
    expected = model(packed_BT, documents_BT=numbers(ROWS))
    model.bfloat16()
    logits = model(packed_BT, documents_BT=numbers(ROWS))
    assert logits.dtype == torch.float32
    assert (logits - expected).norm() < 0.06 * expected.norm()
    assert all(g.isfinite().all() for g in loss_and_grads(model, packed_BT, mask_BT, numbers(ROWS))[1].values())


def test_documents_are_found_once_for_all_blocks(
    build: Build, packed_BT: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[Documents] = []
    model = build(n_layers=3, max_seq_len=T)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, arguments: met.append(arguments[3]))
    model(packed_BT, documents_BT=numbers(ROWS))
    assert len(met) == 3
    assert met[0] is met[1] is met[2]
    # Without numbers nothing of this file runs.
    monkeypatch.setattr("models.transformer.find_documents", None)
    monkeypatch.setattr("models.attention.attend", None)
    model(packed_BT)


@torch.no_grad()
def test_what_does_not_go_together_is_refused(build: Build, packed_BT: Tensor) -> None:
    model = build(max_seq_len=T)
    cache = KVCache(model.config, len(ROWS), T, torch.float32, "cpu")
    with pytest.raises(ValueError, match="give one of the two"):
        model(packed_BT, cache=cache, documents_BT=numbers(ROWS))
    with pytest.raises(ValueError, match=r"documents of shape \(4, 71\) for tokens \(4, 72\)"):
        model(packed_BT, documents_BT=numbers(ROWS)[:, 1:])
