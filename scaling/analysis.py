"""All fits of a set of records: each approach with its intervals, or the line that says why the data refuse it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from common.errors import UserError
from scaling.checks import refuse_undetermined, refuse_unidentifiable, warnings
from scaling.fit import DELTA, Fit, fit_form
from scaling.intervals import Draws, Extrapolation, bootstrap, leave_largest_out, profile
from scaling.isoflop import (
    Frontier,
    SettingLaw,
    Vertex,
    envelope,
    envelope_draws,
    isoflop,
    isoflop_draws,
    setting_law,
    vertices,
)
from scaling.predict import Estimate, estimate, finite, multiplier
from scaling.records import Points

T = TypeVar("T")
APPROACHES = ("1", "2", "3", "kaplan")


@dataclass(frozen=True)
class Settings:
    """How to fit."""

    approach: str = "all"
    delta: float = DELTA
    bootstrap: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class Surface:
    """A fitted form and how well it is known."""

    fit: Fit
    draws: Draws
    profiles: dict[str, tuple[float, float]]  # of the exponents
    extrapolation: Extrapolation | str  # or why there is none
    warnings: list[str]


@dataclass
class Analysis:
    """What was found of one variant."""

    points: Points
    best: Points  # of each size and budget, by learning rate and batch: what surfaces and frontiers are fitted to
    surfaces: dict[str, Surface] = field(default_factory=dict)  # by form
    frontiers: dict[str, Frontier] = field(default_factory=dict)  # envelope, isoflop
    vertices: list[Vertex] = field(default_factory=list)
    frontier_draws: dict[str, list[Frontier]] = field(default_factory=dict)  # of the same; empty: not to be had
    settings: dict[str, SettingLaw] = field(default_factory=dict)  # lr, batch
    refused: dict[str, str] = field(default_factory=dict)  # approach to reason
    warnings: list[str] = field(default_factory=list)

    def exponent(self, approach: str) -> Estimate:
        """Of N against C, by `envelope` or `isoflop`."""
        drawn = [f.params.exponent for f in self.frontier_draws[approach]]
        return estimate(self.frontiers[approach].params.exponent, np.array(drawn))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "source": self.points.source,
            "records": len(self.points),
            "notes": list(self.points.notes),
            "warnings": self.warnings,
            "refused": self.refused,
            **{name: _plain_surface(surface) for name, surface in self.surfaces.items()},
            **{
                name: {
                    "N exponent": self.exponent(name).plain(),
                    "D exponent": frontier.tokens.exponent,
                    "flops": frontier.flops.tolist() if name == "isoflop" else None,
                    "best N": frontier.best_params.tolist() if name == "isoflop" else None,
                    "best loss": frontier.best_loss.tolist() if name == "isoflop" else None,
                }
                for name, frontier in self.frontiers.items()
            },
            "settings": {name: vars(law) for name, law in self.settings.items()},
        }


def _plain_surface(surface: Surface) -> dict[str, Any]:
    fit, left = surface.fit, surface.extrapolation
    return {
        "objective": fit.objective,
        "delta": fit.delta,
        "parameters": fit.parameters,
        "bootstrap 95%": {name: [finite(e) for e in surface.draws.interval(name)] for name in fit.form.names},
        "bootstraps": len(surface.draws.thetas),
        "resampling": surface.draws.resampling,
        "profile 95%": {name: [finite(end) for end in ends] for name, ends in surface.profiles.items()},
        "starts": fit.starts,
        "share of starts at the optimum": fit.share,
        "condition number": fit.condition,
        "largest budget left out": left if isinstance(left, str) else vars(left),
        "warnings": surface.warnings,
    }


def analyse(points: Points, settings: Settings, may_be_empty: bool = False) -> Analysis:
    """Fit one variant by one approach or all.

    Raises:
        UserError: the one approach that was asked for, or each of all unless that may be, is refused.
    """
    best = points.best_of_each()
    result = Analysis(points, best)
    wanted = list(APPROACHES) if settings.approach == "all" else [settings.approach]

    def try_(name: str, fit: Callable[[], T]) -> T | None:
        try:
            return fit()
        except UserError as error:
            if settings.approach != "all":
                raise
            result.refused[name] = str(error)
            return None

    if "1" in wanted and (frontier := try_("envelope", lambda: envelope(best))):
        result.frontiers["envelope"] = frontier
        result.frontier_draws["envelope"] = envelope_draws(best, settings.bootstrap, settings.seed)
    if "2" in wanted and (pair := try_("isoflop", lambda: _isoflop(best))):
        result.vertices, frontier = pair
        result.frontiers["isoflop"] = frontier
        drawn = isoflop_draws(best, result.vertices, settings.bootstrap, settings.seed)
        result.frontier_draws["isoflop"] = drawn
        result.warnings += _isoflop_warnings(result.vertices, frontier, bool(drawn))
    if "3" in wanted and (surface := try_("hoffmann", lambda: _surface(best, "hoffmann", settings))):
        result.surfaces["hoffmann"] = surface
    if "kaplan" in wanted and (surface := try_("kaplan", lambda: _surface(best, "kaplan", settings))):
        result.surfaces["kaplan"] = surface
    if not (result.surfaces or result.frontiers or may_be_empty):
        raise UserError(next(iter(result.refused.values())))
    for setting in ("lr", "batch"):
        try:
            result.settings[setting] = setting_law(points, setting)
        except UserError:
            continue  # nothing of it was varied
    return result


def _isoflop(points: Points) -> tuple[list[Vertex], Frontier]:
    found = vertices(points)
    return found, isoflop(points, found)


def _surface(points: Points, form: str, settings: Settings) -> Surface:
    refuse_unidentifiable(points, form)
    fit = fit_form(points, form, settings.delta)
    refuse_undetermined(points, fit)
    draws = bootstrap(points, fit, settings.bootstrap, settings.seed)
    profiles = {name: profile(points, fit, place) for name, place in fit.form.exponents.items()}
    try:
        left: Extrapolation | str = leave_largest_out(points, form, settings.delta)
    except UserError as error:
        left = str(error)
    return Surface(fit, draws, profiles, left, warnings(points, fit))


def _isoflop_warnings(found: list[Vertex], frontier: Frontier, noise_known: bool) -> list[str]:
    told = []
    if len(frontier.flops) < 3:
        told.append(f"{len(frontier.flops)} budgets with a minimum: a line through two points is no evidence of a law")
    if (span := float(frontier.flops.max() / frontier.flops.min())) < 10:
        told.append(f"budgets span a factor of {span:.1f}, less than a decade")
    for vertex in found:
        if not vertex.usable:
            told.append(f"the budget of {vertex.flops:.2e} FLOPs has no minimum near its sizes and is left out")
        elif not vertex.inside:
            told.append(f"the minimum at {vertex.flops:.2e} FLOPs lies at the edge of its sizes or beyond")
    if not noise_known:
        told.append("no budget has more than three sizes, so that IsoFLOP minima have no intervals")
    return told


def analyse_variants(points: Points, settings: Settings, may_be_empty: bool = False) -> dict[str, Analysis]:
    """Each variant by itself, in the order of the records."""
    return {name: analyse(of, settings, may_be_empty) for name, of in points.by_variant().items()}


def multipliers(analyses: dict[str, Analysis], reference: str) -> dict[str, Estimate]:
    """How much compute the reference needs for what each other variant reaches, at the largest budget of both."""
    theirs = analyses[reference]
    found = {}
    for name, ours in analyses.items():
        if name == reference or "isoflop" not in ours.frontiers or "isoflop" not in theirs.frontiers:
            continue
        frontiers = theirs.frontiers["isoflop"], ours.frontiers["isoflop"]
        flops = float(min(frontier.flops.max() for frontier in frontiers))
        pairs = list(zip(*(one.frontier_draws["isoflop"] for one in (theirs, ours)), strict=False))
        found[name] = multiplier(*frontiers, pairs, flops)
    return found
