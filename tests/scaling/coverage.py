"""How often 95% intervals cover the exponents of a known law, with 1% noise of the loss."""

from __future__ import annotations

import statistics

from scaling.fit import fit_form
from scaling.intervals import bootstrap
from tests.scaling.data import TRUE, synthetic


def coverage(draws: int, bootstraps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Share of draws whose interval covers the truth, and the median half-width, by exponent."""
    covered: dict[str, list[bool]] = {"alpha": [], "beta": []}
    half: dict[str, list[float]] = {"alpha": [], "beta": []}
    for seed in range(draws):
        data = synthetic(noise=0.01, seed=seed)
        fitted = bootstrap(data, fit_form(data, starts=[(0.0, 0.0, 0.5, 0.3, 0.3)]), bootstraps, seed)
        for name in covered:
            low, high = fitted.interval(name)
            covered[name].append(low <= TRUE[name] <= high)
            half[name].append((high - low) / 2)
    return (
        {name: statistics.mean(values) for name, values in covered.items()},
        {name: statistics.median(values) for name, values in half.items()},
    )
