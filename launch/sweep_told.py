"""What is told of a sweep's fits, as tables and lines: for the terminal and for the report alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scaling.analysis import Analysis, Surface
from scaling.predict import Estimate, estimate


class Rows(NamedTuple):
    """A table of words."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Line(NamedTuple):
    """A sentence, or a warning."""

    text: str
    warning: bool = False


def told(analysis: Analysis) -> list[Rows | Line]:
    """Everything of one variant."""
    result: list[Rows | Line] = [Line(f"{len(analysis.points)} records"), *map(Line, analysis.points.notes)]
    if analysis.frontiers or "hoffmann" in analysis.surfaces:
        result.append(_exponents(analysis))
    for surface in analysis.surfaces.values():
        result += _of_surface(surface)
    for setting, law in analysis.settings.items():
        edge = f"; {law.at_edge} more at the edge of what was tried" if law.at_edge else ""
        value = f"{law.factor:.4g} N^{law.by_params:.3f} D^{law.by_tokens:.3f}"
        result.append(Line(f"best {setting} = {value}, of {law.cells} sizes and budgets{edge}"))
    result += [Line(f"{approach} refused: {reason}", True) for approach, reason in analysis.refused.items()]
    return [*result, *(Line(f"warning: {text}", True) for text in analysis.warnings)]


def _of_surface(surface: Surface) -> list[Rows | Line]:
    fit, left, rows = surface.fit, surface.extrapolation, []
    for name in fit.form.names:
        profile = surface.profiles.get(name)
        ends = between(*surface.draws.interval(name)), between(*profile) if profile else ""
        rows.append((name, f"{fit.parameters[name]:.5g}", *ends))
    if not isinstance(left, str):
        left = (
            f"{left.records} records at {left.factor:.2g} times the compute that was fitted, whose loss is predicted "
            f"{left.mean_error:+.2%} off in the mean, {left.worst_error:+.2%} at worst"
        )
    return [
        Rows((f"{fit.form.name} form", "value", "95% by bootstrap", "95% by profile"), rows),
        Line(
            f"objective {fit.objective:.8g} (sum of Huber losses of log losses, delta {fit.delta:g}); {fit.share:.0%} "
            f"of {fit.starts} starts reached it; condition number {fit.condition:.3g}; {len(surface.draws.thetas)} "
            f"bootstraps of {surface.draws.resampling}"
        ),
        Line(f"largest budget left out: {left}"),
        *(Line(f"warning: {text}", True) for text in surface.warnings),
    ]


def _exponents(analysis: Analysis) -> Rows:
    """That of N against C by each approach with its interval, and that of D."""
    found = [(name, analysis.exponent(name), f.tokens.exponent) for name, f in analysis.frontiers.items()]
    if "hoffmann" in analysis.surfaces:
        surface = analysis.surfaces["hoffmann"]
        alphas, betas = surface.draws.thetas.T[3:]
        alpha, beta = surface.fit.theta[3:]
        share = estimate(float(beta / (alpha + beta)), betas / (alphas + betas))
        found.append(("hoffmann, under 6ND", share, 1 - share.value))
    rows = [(name, f"{n.value:.3f}", between(n.low, n.high, ".3f"), f"{d:.3f}") for name, n, d in found]
    return Rows(("approach", "N ~ C^a: a", "95%", "D ~ C^b: b"), rows)


def between(low: float, high: float, style: str = ".4g") -> str:
    """An interval; without ends it is not known."""
    return f"{low:{style}} to {high:{style}}" if low == low else "not known"


def with_interval(of: Estimate, style: str = ".3g") -> str:
    """A number and its interval."""
    return f"{of.value:{style}} ({between(of.low, of.high, style)})"
