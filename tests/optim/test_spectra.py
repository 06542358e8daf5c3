"""Spectral quantities follow their definitions, and are those of whole matrices under every sharding and optimizer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optim.build import build_optimizer
from optim.config import OptimConfig
from optim.ownership import matrices_of
from optim.spectra import Spectra, of_update, spectrum
from tests.gang import Gang
from tests.optim.sharded import LAYOUTS, ROLES, SHAPES, VECTORS, placed, process_group, values, whole

NAMES = ("condition", "effective_rank", "stable_rank", "top_energy")


def rotation(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]


@pytest.mark.parametrize(("rows", "columns"), [(20, 20), (50, 20), (20, 31)])
@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e15])
def test_of_one_over_k(rows: int, columns: int, scale: float) -> None:
    """A matrix with singular values 1, 1/2, ..., 1/20: of all of these the numbers are known."""
    n = 20
    s = [1 / k for k in range(1, n + 1)]
    harmonic, squares = sum(s), sum(x * x for x in s)
    diagonal = torch.zeros(rows, columns, dtype=torch.float64)
    diagonal[range(n), range(n)] = torch.tensor(s, dtype=torch.float64)
    numbers = spectrum((scale * rotation(rows, 0) @ diagonal @ rotation(columns, 1)).float())
    assert numbers == pytest.approx(
        {
            "condition": n,
            "effective_rank": math.exp(-sum(x / harmonic * math.log(x / harmonic) for x in s)),
            "stable_rank": squares,
            "top_energy": (1 + 1 / 4) / squares,  # the two largest of twenty
        },
        rel=1e-5,
    )


def test_at_the_edges() -> None:
    """A row is perfectly conditioned; fp32 tells no condition beyond 2^23; zeros and infinities have no numbers."""
    assert list(spectrum(torch.tensor([[3.0, 4.0]])).values()) == pytest.approx([1, 1, 1, 1])
    assert spectrum(torch.ones(4, 3)) == pytest.approx(dict(zip(NAMES, (2.0**23, 1, 1, 1), strict=True)), rel=1e-5)
    for nothing in (torch.zeros(3, 5), torch.full((3, 5), math.inf), torch.full((3, 5), math.nan)):
        assert spectrum(nothing) == dict.fromkeys(NAMES)


def test_of_an_update() -> None:
    before, lr, decay = values("square", 0), 0.01, 0.02
    turned = of_update(before, (1 - decay) * before - lr * 3 * rotation(24, 0).float(), decay)
    assert turned["rms"] == pytest.approx(lr * 3 / math.sqrt(24), rel=1e-5)
    assert turned["orthogonality_error"] == pytest.approx(0, abs=1e-4)
    # Half of the singular values 1, half 3: mean 2, mean square 5. Tall, so that the other side would have zeros.
    s = torch.tensor([1.0] * 8 + [3.0] * 8, dtype=torch.float64)
    step = (rotation(33, 0)[:, :16] * s @ rotation(16, 1)).float()
    uneven = of_update(values("tall", 0), values("tall", 0) - lr * step, 0.0)
    assert uneven["orthogonality_error"] == pytest.approx(math.sqrt(1 - 4 / 5), rel=1e-4)
    assert uneven["rms"] == pytest.approx(lr * math.sqrt(16 * 5 / (33 * 16)), rel=1e-4)
    # What rounding alone leaves has a size, and is no update.
    rounded = of_update(before, (1 - decay) * before, decay)
    assert rounded["rms"] == pytest.approx(0, abs=1e-7)
    assert rounded["orthogonality_error"] is None
    assert of_update(before, before * math.nan, decay) == {"rms": None, "orthogonality_error": None}


# ---------------------------------------------------------------------------------------------------------- in a gang

CONFIGS = {
    "muon": OptimConfig(name="muon", lr=0.02, weight_decay=0.1, split_heads=True),
    "adamw": OptimConfig(name="adamw", lr=0.02, weight_decay=0.1),
    "sgd": OptimConfig(name="sgd", lr=0.02, weight_decay=0.1, momentum=0.0),
}
MODEL: dict[str, dict[str, Any]] = {
    **{n: {"role": "expert_matrix" if len(SHAPES[n]) == 3 else "hidden_matrix", **ROLES[n]} for n in SHAPES},
    **{n: {"role": "vector" if len(VECTORS[n]) == 1 else "embedding"} for n in VECTORS},
}
Found = dict[str, dict[str, dict[str, float | None]]]


def _looked(config: OptimConfig, place: Any) -> tuple[Found, dict[str, tuple[Tensor, Tensor]]]:
    """The numbers of a second update on recorded gradients, and whole weights before and after it."""
    parameters = {name: torch.nn.Parameter(place(name, values(name, 0))) for name in MODEL}
    optimizer = build_optimizer(parameters, MODEL, config)
    spectra = Spectra(optimizer, MODEL, config.split_heads, bucket_size=400)
    for step in (1, 2):
        before = {name: whole(p) for name, p in parameters.items()}
        for name, p in parameters.items():
            p.grad = place(name, values(name, step, 0.1))
        spectra.before()
        for p in parameters.values():
            assert p.grad is not None
            p.grad.mul_(0.5)  # clipped
        optimizer.step()
        found = spectra.after()
    return found, {name: (before[name], whole(p)) for name, p in parameters.items()}


def _in_layout(layout: str | None) -> dict[str, tuple[Found, dict[str, tuple[Tensor, Tensor]]]]:
    with process_group():
        place = placed(layout) if layout else lambda name, tensor: tensor
        return {rule: _looked(config, place) for rule, config in CONFIGS.items()}


def by_svd(matrix: Tensor) -> dict[str, float]:
    """The four quantities, as the docs write them."""
    s = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    p, energy = s / s.sum(), s**2 / (s**2).sum()
    effective, top = np.exp(-(p * np.log(p)).sum()), energy[: max(1, len(s) // 10)].sum()
    return dict(zip(NAMES, map(float, (s[0] / s[-1], effective, 1 / energy[0], top)), strict=True))


def parts(name: str, tensor: Tensor, split_heads: bool) -> list[Tensor]:
    boxes = [matrix.box for matrix in matrices_of(name, tensor.shape, MODEL[name], split_heads)]
    wholes = [tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] for box in boxes]
    return [part.reshape(part.shape[-2:]) for part in wholes]


@pytest.mark.parametrize("layout", [None, "fsdp4", "hsdp2x2", "both2x2", "fsdp2-tp2"])
def test_of_whole_matrices_in_every_layout(gang: Gang, layout: str | None) -> None:
    """Rows, columns, copies and experts on their ranks: numpy's numbers of the wholes, on every rank."""
    world = math.prod(LAYOUTS[layout][0]) if layout else 1
    first, *others = gang.run(_in_layout, layout, world=world)
    for rule, (found, weights) in first.items():
        assert all(other[rule][0] == found for other in others)
        assert list(found) == list(SHAPES), "the matrices, and no embedding or gain"
        for name, numbers in found.items():
            before, after = weights[name]
            split = CONFIGS[rule].split_heads
            for what, tensor in (("gradient", values(name, 2, 0.1)), ("weight", before)):
                each = [by_svd(matrix) for matrix in parts(name, tensor, split)]
                mean = {key: sum(one[key] for one in each) / len(each) for key in NAMES}
                assert numbers[what] == pytest.approx(mean, rel=1e-4), (rule, name, what)
            shrink = 1 - (0.02 * 0.1 if rule != "sgd" else 0)
            steps = parts(name, shrink * before.double() - after.double(), split)
            rms = sum(float(step.square().mean().sqrt()) for step in steps) / len(steps)
            assert numbers["update"]["rms"] == pytest.approx(rms, rel=1e-4), (rule, name)
            s_of = [np.linalg.svd(step.numpy(), compute_uv=False) for step in steps]
            error = sum(math.sqrt(max(0, 1 - s.mean() ** 2 / (s**2).mean())) for s in s_of) / len(s_of)
            assert numbers["update"]["orthogonality_error"] == pytest.approx(error, rel=1e-4, abs=1e-6)


def test_what_updates_are_like() -> None:
    """Muon's are near orthogonal and Adam's are not; those of plain descent are as large as gradient and decay."""
    found = {rule: _looked(config, lambda name, tensor: tensor)[0]["again"] for rule, config in CONFIGS.items()}
    errors = {rule: numbers["update"]["orthogonality_error"] or 0 for rule, numbers in found.items()}
    assert errors["muon"] < 0.1 < 0.4 < errors["adamw"]
    sizes = {rule: numbers["update"]["rms"] for rule, numbers in found.items()}
    assert sizes["muon"] == pytest.approx(0.02 / math.sqrt(24), rel=0.1)
    assert sizes["sgd"] == pytest.approx(0.02 * math.hypot(0.5 * 0.1, 0.1 * 1.0), rel=0.1)


def test_a_shard_has_another_spectrum() -> None:
    """What these numbers must not be: those of a rank's rows, or the mean of them."""
    for name in ("square", "tall"):
        gradient = values(name, 2, 0.1)
        ours, shards = spectrum(gradient), [spectrum(rows) for rows in gradient.chunk(4)]
        for key in NAMES:
            mean = sum(float(shard[key] or 0) for shard in shards) / len(shards)
            assert abs(mean / float(ours[key] or 0) - 1) > 0.1, (name, key)
