"""From rows to the arguments of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data.config import PackingName
from data.packing import Rows
from data.shards import TokenFile, TokenWriter
from models.config import ModelConfig
from models.transformer import Transformer
from trainer.batch import micro_batches

EOS, VOCAB = 1, 30
CPU = torch.device("cpu")
LENGTHS = [3, 9, 2, 14, 1, 5, 5, 40, 7, 11, 2, 6]


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=VOCAB, n_layers=2, d_model=16, n_heads=2, d_ff=32, max_seq_len=16, init_std=0.3)
    return Transformer(config).double()


def documents() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[*rng.integers(2, VOCAB, size=n - 1).tolist(), EOS] for n in LENGTHS]


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    with TokenWriter(tmp_path / "tokens", "uint16") as writer:
        for document in documents():
            writer.append(document)
    return TokenFile(tmp_path / "tokens")


@torch.no_grad()
def one_by_one(model: Transformer, seq_len: int) -> float:
    """Loss of every document alone; one that is longer than a row is as many as there are rows of it."""
    total = 0.0
    for document in documents():
        for start in range(0, len(document) - 1, seq_len):
            piece = torch.tensor([document[start : start + seq_len + 1]])
            total += float(model(piece[:, :-1], piece[:, 1:]).cross_entropy)
    return total


@pytest.mark.parametrize("size", [1, 2, 100])
def test_packed_documents_cost_what_they_cost_alone(tokens: TokenFile, model: Transformer, size: int) -> None:
    rows = Rows(tokens, 16, "best_fit", EOS, document_mask=True)
    assert len(rows) < len(LENGTHS)
    batch = rows.take(np.arange(len(rows)))
    micros = list(micro_batches(batch, size, CPU))
    assert len(micros) == -(-len(rows) // size)
    with torch.no_grad():
        loss = sum(float(model(*micro).cross_entropy) for micro in micros)
    assert batch.mask.sum() == sum(n - 1 for n in LENGTHS)
    assert loss == pytest.approx(one_by_one(model, 16), rel=1e-12)


@pytest.mark.parametrize("packing", ["concat", "pad", "best_fit"])
def test_without_the_mask_the_model_is_told_of_no_documents(
    tokens: TokenFile, model: Transformer, packing: PackingName
) -> None:
    batch = Rows(tokens, 16, packing, EOS).take(np.arange(3))
    (micro,) = micro_batches(batch, 3, CPU)
    assert [(part.dtype, tuple(part.shape)) for part in micro] == [
        (torch.int64, (3, 16)),
        (torch.int64, (3, 16)),
        (torch.bool, (3, 16)),
    ]
    if packing == "best_fit":  # whose documents see one another then
        whole = Rows(tokens, 16, packing, EOS)
        with torch.no_grad():
            loss = float(model(*next(micro_batches(whole.take(np.arange(len(whole))), 100, CPU))).cross_entropy)
        assert abs(loss - one_by_one(model, 16)) > 0.1
