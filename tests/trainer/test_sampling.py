"""Sampling: 10^5 draws against their distribution, what is left in against transformers, ties, and the edges."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from trainer.sampling import probabilities, sample

V = 40
DRAWS = 100_000
LEAST_P = 1e-3  # of a correct sampler, one fixed seed in a thousand would fail; these do not


class Way(NamedTuple):
    """One way to sample."""

    temperature: float
    top_k: int | None
    top_p: float


# The nucleus of each is smaller than top-k, and all sets leave out tokens that a wrong one would show.
WAYS = {
    "temperature": Way(0.8, None, 1.0),
    "temperature, top-k": Way(1.3, 12, 1.0),
    "temperature, top-p": Way(0.8, None, 0.7),
    "temperature, top-k, top-p": Way(1.3, 12, 0.7),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def logits(seed: int = 0, rows: int = 1, size: int = V) -> Tensor:
    """Logits without ties."""
    return 1.5 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def expected(logits_V: list[float], way: Way, nucleus_change: int = 0) -> np.ndarray:
    """The definition, one token at a time in plain Python: probabilities by id.

    `nucleus_change` makes the nucleus wrong: that many tokens too large.
    """
    weights = {token: math.exp(z / way.temperature) for token, z in enumerate(logits_V)}
    order = sorted(weights, key=lambda token: -weights[token])[: way.top_k]
    total = math.fsum(weights[token] for token in order)
    size, reached = 0, 0.0
    while reached < way.top_p and size < len(order):
        reached += weights[order[size]] / total
        size += 1
    kept = order[: size + nucleus_change] if way.top_p < 1 else order
    inside = math.fsum(weights[token] for token in kept)
    return np.array([weights[token] / inside if token in kept else 0.0 for token in range(len(logits_V))])


def counts(way: Way, seed: int = 0) -> np.ndarray:
    """How often each token comes in `DRAWS` draws."""
    generator = torch.Generator().manual_seed(seed)
    drawn = sample(logits().expand(DRAWS, V), *way, generator)
    return torch.bincount(drawn, minlength=V).numpy()


def p_value(observed: np.ndarray, probability: np.ndarray) -> float:
    """Of Pearson's chi-square test; 0 for a token that cannot come and came."""
    possible = probability > 0
    if observed[~possible].any():
        return 0.0
    assert (probability[possible] * observed.sum()).min() >= 5  # where the chi-square distribution is a fair one
    return float(stats.chisquare(observed[possible], probability[possible] * observed.sum()).pvalue)


@every_way
def test_draws_follow_the_distribution(way: Way) -> None:
    assert p_value(counts(way), expected(logits()[0].tolist(), way)) > LEAST_P


@every_way
def test_a_wrong_temperature_fails_the_same_test(way: Way) -> None:
    for factor in (0.95, 1.05):
        wrong = way._replace(temperature=way.temperature * factor)
        assert p_value(counts(wrong), expected(logits()[0].tolist(), way)) < LEAST_P


@pytest.mark.parametrize("name", [name for name in WAYS if "top-p" in name])
def test_a_nucleus_off_by_one_fails_the_same_test(name: str) -> None:
    observed = counts(WAYS[name])
    for change in (-1, 1):
        wrong = expected(logits()[0].tolist(), WAYS[name], nucleus_change=change)
        assert p_value(observed, wrong) < LEAST_P


def test_a_nucleus_before_top_k_fails_the_same_test() -> None:
    """The order of the two matters, and the test sees it."""
    way = WAYS["temperature, top-k, top-p"]
    of_all = expected(logits()[0].tolist(), way._replace(top_k=None))
    assert p_value(counts(way), of_all) < LEAST_P


def test_what_is_left_in_is_that_of_transformers() -> None:
    """Temperature, top-k and top-p of transformers, one after the other, on logits without ties."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits_BV = logits(seed=1, rows=50, size=100).double()
    sizes = set()
    for temperature in (0.5, 1.0, 2.0):
        for top_k in (1, 2, 10, 100, 1000):
            for top_p in (0.01, 0.3, 0.9, 0.999, 1.0):
                scores = TemperatureLogitsWarper(temperature)(None, logits_BV)
                scores = TopKLogitsWarper(top_k)(None, scores)
                scores = TopPLogitsWarper(top_p)(None, scores)
                ours = probabilities(logits_BV, temperature, top_k, top_p)
                assert torch.equal(ours > 0, scores.isfinite())
                torch.testing.assert_close(ours, scores.softmax(dim=-1), rtol=1e-12, atol=0)
                sizes.update((ours > 0).sum(dim=-1).tolist())
    assert len(sizes) > 50  # sets of many sizes were compared


def test_of_equal_tokens_the_lower_id_comes_first() -> None:
    equal = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    assert probabilities(equal, 1.0, top_k=2).nonzero()[:, 1].tolist() == [1, 2]
    assert probabilities(equal, 1.0, top_k=5).nonzero()[:, 1].tolist() == [0, 1, 2, 3, 4]
    assert probabilities(equal, 1.0, top_k=4, top_p=0.6).nonzero()[:, 1].tolist() == [1, 2, 3]
    draw = torch.Generator().manual_seed(0)
    flat = torch.zeros(200, 7)
    assert sample(flat, 0.0, None, 1.0, draw).tolist() == sample(flat, 1.0, 1, 1.0, draw).tolist() == [0] * 200


def test_a_nucleus_reaches_p_and_no_token_of_it_can_be_spared() -> None:
    for temperature in (0.3, 1.0, 3.0):
        all_BV = probabilities(logits(seed=2, rows=20), temperature)
        for top_p in (1e-9, 0.2, 0.5, 0.95, 1 - 1e-9):
            nucleus = probabilities(logits(seed=2, rows=20), temperature, None, top_p) > 0
            inside = all_BV.where(nucleus, 0.0).sum(dim=-1)
            least = all_BV.where(nucleus, 2.0).amin(dim=-1)
            assert (inside >= top_p - 1e-12).all()
            assert (inside - least < top_p).all()
            assert (all_BV.where(nucleus, 0.0).amax(dim=-1) == all_BV.amax(dim=-1)).all()


def test_off_switches_change_no_bit() -> None:
    for rows in (logits(seed=3), logits(seed=3, rows=5)):
        off = probabilities(rows, 0.8)
        assert torch.equal(probabilities(rows, 0.8, None, 1.0), off)
        torch.testing.assert_close(probabilities(rows, 0.8, V, 1.0), off, rtol=1e-14, atol=0)
        torch.testing.assert_close(off, torch.softmax(rows.double() / 0.8, dim=-1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e300])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_extreme_temperatures_give_numbers(temperature: float, top_p: float) -> None:
    p = probabilities(logits(), temperature, None, top_p)
    assert p.sum().item() == pytest.approx(1.0)
    assert (p.max().item() == 1.0) == (temperature < 1)
