"""Width transfer: the maximal update parametrization's coordinate check (Yang et al. 2022, appendix D.1)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from models.transformer import Losses, Transformer
from optim.build import build_optimizer
from scaling.design import size_words
from scaling.sweepfile import load_sweep
from trainer.config import TrainingConfig, load_config
from trainer.initialize import initialize

WIDTHS = (64, 128, 256, 512, 1024)
SWEEP: dict[str, Any] = {
    "base": "base.yaml",
    "sizes": {"widths": list(WIDTHS), "layers": 2, "head_dim": 32, "d_ff": 2.0},
    "budgets": {"tokens": [1e5]},
}


def config_of(folder: Path, width: int, transfer: str, optimizer: str, **heads: int | None) -> TrainingConfig:
    """A config as a sweep makes it, with `heads` in place of a width of heads where that is given."""
    optim = {"name": optimizer, "lr": 1e-2, **({"adamw": {"lr": 1e-2}} if optimizer == "muon" else {})}
    base = {
        "model": {"vocab_size": 300, "max_seq_len": 32, "init_std": 0.1},
        "data": {"seq_len": 32, "tokenizer": {"kind": "bytes"}},
        "optim": optim,
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    sizes = {**SWEEP["sizes"], **heads, **({"head_dim": None} if heads else {})}
    tree = {**SWEEP, "sizes": sizes, "lr": {"transfer": transfer}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    sweep = load_sweep(folder / "sweep.yaml")
    return load_config(sweep.base_file, size_words(sweep, {}, 1.0, width))


def scales(config: TrainingConfig, steps: int = 10) -> dict[str, float]:
    """Root mean squares, after some updates: of the logits, and of how far each block's output has moved."""
    model = Transformer(config.model)
    with torch.no_grad():
        initialize(dict(model.named_parameters()), model.initial_values(), seed=0)
    optimizer = build_optimizer(dict(model.named_parameters()), model.parameter_roles(), config.optim)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(300, (2, 33), generator=generator)
    outputs: dict[str, torch.Tensor] = {}
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, __, out, number=number: outputs.update({f"block {number}": out[0]}))
    with torch.no_grad():
        outputs["logits"] = model(tokens[:, :-1])
    first = dict(outputs)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = model(tokens[:, :-1], tokens[:, 1:])
        assert isinstance(losses, Losses)
        (losses.cross_entropy / 64).backward()
        optimizer.step()
    with torch.no_grad():
        outputs["logits"] = model(tokens[:, :-1])
    return {name: float((outputs[name] - first[name]).square().mean().sqrt()) for name in outputs}


def slopes(
    folder: Path, transfer: str, optimizer: str, widths: tuple[int, ...], **heads: int | None
) -> dict[str, float]:
    """By what power of the width each scale grows."""
    measured = [scales(config_of(folder, width, transfer, optimizer, **heads)) for width in widths]
    return {
        name: float(np.polyfit(np.log(widths), [math.log(of[name]) for of in measured], 1)[0]) for name in measured[0]
    }


@pytest.mark.parametrize(
    ("optimizer", "widths"),
    [pytest.param("adamw", WIDTHS, marks=pytest.mark.verify), ("adamw", WIDTHS[:4]), ("muon", WIDTHS[:3])],
)
def test_with_transfer_scales_are_flat_over_widths_and_without_they_are_not(
    tmp_path: Path, optimizer: str, widths: tuple[int, ...]
) -> None:
    """Muon's iteration takes most of a minute for a width of 1024: three widths show its rule."""
    on, off = (slopes(tmp_path, transfer, optimizer, widths) for transfer in ("mup", "none"))
    assert all(abs(slope) < 0.15 for slope in on.values()), on
    assert off["logits"] > 0.3, off
    if optimizer == "adamw":  # Muon's steps have a spectral norm that no width changes
        assert min(off.values()) > 0.3, off


def test_scales_are_flat_where_heads_grow(tmp_path: Path) -> None:
    on = slopes(tmp_path, "mup", "adamw", WIDTHS[:4], heads=4)
    assert all(abs(slope) < 0.15 for slope in on.values()), on


def test_scores_of_heads_that_grow_are_divided_by_their_width(tmp_path: Path) -> None:
    models = [config_of(tmp_path, width, "mup", "adamw", heads=4).model for width in WIDTHS[:3]]
    assert [model.d_head for model in models] == [16, 32, 64]
    assert [model.attention_scale for model in models] == pytest.approx([4 / 16, 4 / 32, 4 / 64])
    assert config_of(tmp_path, 128, "mup", "adamw").model.attention_scale is None


@pytest.mark.parametrize("heads", [{}, {"heads": 4}])
def test_at_the_base_width_nothing_changes(tmp_path: Path, heads: dict[str, int | None]) -> None:
    on, off = (config_of(tmp_path, 64, transfer, "adamw", **heads) for transfer in ("mup", "none"))
    assert on.model.attention_scale in (None, on.model.d_head**-0.5)
    models = [Transformer(config.model) for config in (on, off)]
    assert models[0].initial_values() == models[1].initial_values()
    roles = ("embedding", "head", "hidden_matrix", "vector")
    assert [on.optim.lr_of(role) for role in roles] == [off.optim.lr_of(role) for role in roles]


def test_learning_rates_and_initial_values_of_a_wide_model(tmp_path: Path) -> None:
    """Table 3 of Yang et al. 2022, at four times the base width."""
    config = config_of(tmp_path, 256, "mup", "adamw")
    rates = {role: config.optim.lr_of(role) for role in ("embedding", "head", "hidden_matrix", "vector", "router")}
    assert rates == pytest.approx(
        {"embedding": 1e-2, "head": 2.5e-3, "hidden_matrix": 2.5e-3, "vector": 1e-2, "router": 2.5e-3}
    )
    values = Transformer(config.model).initial_values()
    assert values["embedding.weight"].std == pytest.approx(0.1)
    assert values["head.weight"].std == pytest.approx(0.1 / 4)
    assert values["blocks.0.attention.wq.weight"].std == pytest.approx(0.1 / 2)
    assert values["blocks.0.mlp.w_down.weight"].std == pytest.approx(0.1 / 2 / 2)
