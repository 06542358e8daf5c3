from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import documents
from models.config import ModelConfig
from models.transformer import Transformer
from tests.models.packed import ROWS, WAYS, T, flash, spans

TINY: dict[str, Any] = {"vocab_size": 61, "n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 48, "max_seq_len": 16}
Build = Callable[..., Transformer]


@pytest.fixture
def build() -> Build:
    """Makes a tiny model whose parameters are all random, gains and biases too, so that each of them acts."""

    def make(seed: int = 0, **keys: Any) -> Transformer:
        model = Transformer(ModelConfig(**{**TINY, **keys}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, init in model.initial_values().items():
                p = model.get_parameter(name)
                mean, std = (1.0, 0.2) if init.kind == "ones" else (0.0, 0.2)
                p.copy_(mean + std * torch.randn(p.shape, generator=generator))
        return model

    return make


@pytest.fixture
def tokens_BT() -> torch.Tensor:
    return torch.randint(0, TINY["vocab_size"], (3, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def packed_BT() -> Tensor:
    """Tokens of the rows of `packed.ROWS`."""
    return torch.randint(0, 61, (len(ROWS), T), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def mask_BT() -> Tensor:
    """True where the next token belongs to the same document, and is no padding."""
    mask = torch.zeros(len(ROWS), T, dtype=torch.bool)
    for b, where in spans(ROWS):
        mask[b, where.start : where.stop - 1] = True
    return mask


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    """For wrappers that want a group, if only of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes the model keep documents apart in one of the ways, and sees that it does."""
    used: set[str] = set()
    monkeypatch.setattr(documents, "loop_pays", lambda *_: request.param == "looped")
    monkeypatch.setattr(documents, "varlen_runs", lambda *_: request.param == "varlen")
    monkeypatch.setattr(documents, "_varlen_attn", lambda: flash)

    def spy(name: str, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        used.add(name)
        return function(*arguments)

    for name in WAYS:
        monkeypatch.setattr(documents, name, partial(spy, name, getattr(documents, name)))
    yield request.param
    assert used == {request.param}
