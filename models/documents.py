"""Attention within documents: a row of tokens may hold several, and none may see another.

Three ways to the same numbers:

- `masked`: a boolean mask for `scaled_dot_product_attention`, which computes all scores of a row and drops most. The
  oracle of the other two; compiled blocks on a CPU use it, and everything that neither of the others is made for.
- `looped`: one causal attention per document, on a CPU. `benchmarks/document_mask.py` measures what it saves.
- `varlen`: one call of FlashAttention that is told where documents start, on a CUDA device, in half precision.

Shapes: B batch, T position, S key position, N tokens of all rows laid end to end (`B T`), H query heads, G key and
value heads, K width of a head.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig

CALL_COST = 2**19
"""What one more attention call costs beside its products, forward and backward: the time in which one thread does this
many multiply-adds of a masked product. Measured by `benchmarks/document_mask.py`."""


class Documents(NamedTuple):
    """Where the documents of a micro-batch lie. Made once per forward and shared by all blocks.

    A plain tuple, so that checkpointing, sharding and compilation pass it on. A compiled block reads nothing of it but
    tensors, and so is not compiled again for a batch with other documents.
    """

    starts_BT: Tensor
    """int64: where in its row the document of each token starts."""
    lengths: tuple[tuple[int, ...], ...] = ()
    """Of each row, the tokens of its documents in order. Empty unless `looped` is to run."""
    offsets: Tensor | None = None
    """int32, (documents + 1,): where each starts among the N tokens, and N. None unless `varlen` is to run."""
    longest: int = 0
    """Tokens of the longest document. Read with `offsets`."""
    mask_BTS: Tensor | None = None
    """`document_mask(starts_BT)` for all blocks without a window; None: a block that needs one makes its own."""


def find_documents(documents_BT: Tensor, config: ModelConfig, dtype: torch.dtype) -> Documents:
    """Read the documents off their numbers, and settle how blocks on that device, in that type, keep them apart.

    Args:
        documents_BT: int, non-decreasing along T. Only changes from token to token are looked at.
        config: of the model, for the number and width of heads.
        dtype: of queries, keys and values.

    On a GPU this waits for the device, once: shapes depend on the number of documents.
    """
    device, compiling = documents_BT.device, torch.compiler.is_compiling()
    first_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    places_T = torch.arange(documents_BT.shape[1], device=device)
    starts_BT = torch.where(first_BT, places_T, 0).cummax(dim=1).values

    if not config.plain_scores:
        return Documents(starts_BT)  # models/scores.py wants a mask, and makes it
    if not compiling and varlen_runs(device, dtype, config.d_head):
        flat = [n for row in _lengths(first_BT) for n in row]
        offsets = torch.tensor([0, *flat]).cumsum(0).to(device, torch.int32)
        # A compiled block takes their number as a variable from the first batch on, instead of compiling again for it.
        torch._dynamo.maybe_mark_dynamic(offsets, 0)
        return Documents(starts_BT, offsets=offsets, longest=max(flat))
    if device.type == "cpu":
        # No mask here: only some blocks want one, and for those that do it is little beside their attention.
        lengths = () if compiling else _lengths(first_BT)
        pays = not compiling and loop_pays(lengths, config.n_heads * config.d_head)
        return Documents(starts_BT, lengths if pays else ())
    return Documents(starts_BT, mask_BTS=document_mask(starts_BT))


def _lengths(first_BT: Tensor) -> tuple[tuple[int, ...], ...]:
    starts: list[list[int]] = [[] for _ in range(len(first_BT))]
    for row, place in first_BT.cpu().nonzero().tolist():
        starts[row].append(place)
    ends = first_BT.shape[1]
    return tuple(tuple(b - a for a, b in zip(row, [*row[1:], ends], strict=True)) for row in starts)


def loop_pays(lengths: tuple[tuple[int, ...], ...], width: int) -> bool:
    """Whether `looped` is faster than `masked`. It is not for many short documents, as each costs a call.

    `width` is `H K`. A mask's products, `B T^2 H K`, are shared by all threads; the overhead of calls is one thread's.
    """
    alike = len(set(lengths)) == 1
    calls = len(lengths[0]) if alike else sum(len(row) for row in lengths)
    products = sum(sum(row) ** 2 for row in lengths) * width
    return calls == 1 or calls * CALL_COST * torch.get_num_threads() <= products


def document_mask(starts_BT: Tensor, n_keys: int | None = None, window: int | None = None) -> Tensor:
    """Bool `(B, 1, T, S)`, one for all heads: query t sees key s where `start(t) <= s <= t`.

    Args:
        n_keys: S; the last T keys are those of the queries. Left out: S = T.
        window: and where `t - s < window`; None: however far back.
    """
    T = starts_BT.shape[1]
    S = T if n_keys is None else n_keys
    keys_S = torch.arange(S, device=starts_BT.device)
    queries_T1 = keys_S[S - T :, None]
    near_TS = keys_S <= queries_T1
    if window is not None:
        near_TS = near_TS & (queries_T1 - keys_S < window)
    return near_TS & (starts_BT[:, None, :, None] <= keys_S)


def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    documents: Documents,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention within each document; returns `(B, T, H, K)`. Query heads share keys where G < H.

    Args:
        window: tokens that a query sees, itself included; None: all of its document.
        scale: factor on the scores; None: `1 / sqrt(K)`.
    """
    if documents.offsets is not None:
        return varlen(q_BHTK, k_BGSK, v_BGSK, documents.offsets, documents.longest, window, scale)
    if torch.compiler.is_compiling() or not documents.lengths:
        mask_BTS = documents.mask_BTS
        if mask_BTS is None or window is not None:
            mask_BTS = document_mask(documents.starts_BT, window=window)
        return masked(q_BHTK, k_BGSK, v_BGSK, mask_BTS, scale)
    return looped(q_BHTK, k_BGSK, v_BGSK, documents.lengths, window, scale)


def masked(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask_BTS: Tensor, scale: float | None = None) -> Tensor:
    """By a mask, bool `(B, 1, T, S)`."""
    grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, attn_mask=mask_BTS, enable_gqa=grouped, scale=scale)
    return y_BHTK.transpose(1, 2)


def looped(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    lengths: tuple[tuple[int, ...], ...],
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """By a causal attention for each document; rows that are all cut alike go together."""
    B, H, T, K = q_BHTK.shape

    def attention(q_BHNK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor) -> Tensor:
        n, mask_NN = q_BHNK.shape[2], None
        if window is not None and window < n:
            mask_NN = torch.ones(n, n, dtype=torch.bool, device=q_BHNK.device).tril().triu(1 - window)
        return F.scaled_dot_product_attention(
            q_BHNK,
            k_BGNK,
            v_BGNK,
            attn_mask=mask_NN,
            is_causal=mask_NN is None,
            enable_gqa=k_BGSK.shape[1] != H,
            scale=scale,
        )

    if all(len(row) == 1 for row in lengths):
        return attention(q_BHTK, k_BGSK, v_BGSK).transpose(1, 2)  # to the bit what a model without documents computes
    together = B if len(set(lengths)) == 1 else 1
    pieces = []
    # Split and not indexed: the gradient of each index would be a tensor of the whole's size, mostly zeros.
    rows = zip(*(x.split(together) for x in (q_BHTK, k_BGSK, v_BGSK)), strict=True)
    for row, row_lengths in zip(rows, lengths, strict=False):
        for q, k, v in zip(*(x.split(row_lengths, dim=2) for x in row), strict=True):
            pieces.append(attention(q, k, v).transpose(1, 2))
    return torch.cat(pieces, dim=1).view(B, T, H, K)


def varlen(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    offsets: Tensor,
    longest: int,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """By one call of FlashAttention over the rows laid end to end."""
    B, H, T, _ = q_BHTK.shape
    q_NHK, k_NGK, v_NGK = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTK, k_BGSK, v_BGSK))
    # The longest only sizes the launch. A graph would be made anew for each, so there the row's length stands for it.
    longest = T if torch.compiler.is_compiling() else longest
    # How many keys before the query and after it: -1 is all.
    size, grouped = (-1 if window is None else window - 1, 0), k_BGSK.shape[1] != H
    y_NHK = _varlen_attn()(
        q_NHK, k_NGK, v_NGK, offsets, offsets, longest, longest, window_size=size, enable_gqa=grouped, scale=scale
    )
    return y_NHK.unflatten(0, (B, T))


def varlen_runs(device: torch.device, dtype: torch.dtype, d_head: int) -> bool:
    """Whether FlashAttention takes such heads there: NVIDIA from Ampere on, fp16 or bf16, widths 8, 16, ... 256."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and dtype in (torch.float16, torch.bfloat16)
        and d_head % 8 == 0
        and d_head <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and torch.backends.cuda.is_flash_attention_available()
        and _varlen_attn() is not None
    )


@cache
def _varlen_attn() -> Any:
    """torch's `varlen_attn`; None where there is none, or one that does not know groups and windows yet."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return (
        varlen_attn
        if {"window_size", "enable_gqa", "scale"} <= inspect.signature(varlen_attn).parameters.keys()
        else None
    )
