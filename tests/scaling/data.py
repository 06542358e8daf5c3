"""Public data to fit, which lies beside the checkout, and synthetic records whose law is known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaling.records import Counting, Points, group_budgets, read_points

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(os.environ.get("GRAMIAN_SCALING_DATA") or ROOT.parent / "shared" / "scaling-data")
needs_data = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no public data in {FOLDER} (GRAMIAN_SCALING_DATA)")

CHINCHILLA = {"params": "Model Size", "flops": "Training FLOP"}
CHINCHILLA_BUDGETS = (6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21)
# Hoffmann et al. 2022, as published.
TRUE = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}


def expected() -> Any:
    return json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


def chinchilla(drop_highest: int = 5, budgets: tuple[float, ...] = ()) -> Points:
    return read_points(FOLDER / "chinchilla.csv", CHINCHILLA, Counting(), drop_highest, budgets)


def gemstones(which: str) -> Points:
    columns = {"params": "params_active_precise", "loss": "final_loss"}
    return read_points(FOLDER / "gemstones" / f"wandb_df_for_fitting_{which}.jsonl", columns, Counting())


def surface(params: np.ndarray, tokens: np.ndarray, law: dict[str, float] = TRUE) -> np.ndarray:
    return law["E"] + law["A"] * params ** -law["alpha"] + law["B"] * tokens ** -law["beta"]


def points(params: np.ndarray, tokens: np.ndarray, loss: np.ndarray, **more: np.ndarray) -> Points:
    n, flops = len(loss), 6 * params * tokens
    nothing, words = np.full(n, np.nan), np.full(n, "")
    columns = {"lr": nothing, "batch": nothing, "variant": words, **more}
    groups = np.arange(n).astype(str)
    return Points(params, tokens, flops, loss, group_budgets(flops, words), groups, **columns, source="synthetic")


def synthetic(noise: float = 0.0, seed: int = 0, sizes: int = 16, budgets: int = 14) -> Points:
    """IsoFLOP records of the true law, about 150, with relative noise of the loss."""
    size, flops = (a.ravel() for a in np.meshgrid(np.geomspace(5e7, 2e10, sizes), np.geomspace(6e18, 1e22, budgets)))
    tokens = flops / (6 * size)
    near = (tokens > size) & (tokens < 1000 * size)
    params, tokens = size[near], tokens[near]
    errors = noise * np.random.default_rng(seed).standard_normal(len(params))
    return points(params, tokens, surface(params, tokens) * np.exp(errors))
