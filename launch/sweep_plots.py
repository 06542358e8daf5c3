"""Pictures of a sweep's report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from launch.plots import BLUE, MUTED, ORANGE, finish, plt
from scaling.analysis import Analysis
from scaling.predict import best_use, compute_law

_VARIANTS = (BLUE, ORANGE, "#3f8f4f", "#8a5aa8", "#a8872a")
_BAND = 0.18


def draw_isoflop(analysis: Analysis, picture: Path) -> None:
    """Loss over N, a parabola a budget, with its least point."""
    best = analysis.best
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    colours = plt.get_cmap("viridis")(np.linspace(0.0, 0.85, max(2, len(analysis.vertices))))
    for vertex, colour in zip(analysis.vertices, colours, strict=False):
        sizes = best.params[vertex.rows]
        axes.plot(sizes, best.loss[vertex.rows], "o", color=colour, markersize=5)
        grid = np.geomspace(sizes.min() / 1.15, sizes.max() * 1.15, 100)
        label = f"{vertex.flops:.2g} FLOPs"
        axes.plot(grid, np.polyval(vertex.coefficients, np.log(grid)), color=colour, linewidth=1.3, label=label)
        if vertex.usable:
            axes.plot(vertex.best, vertex.loss, "*", color=ORANGE, markersize=11, zorder=4)
    axes.set_xscale("log")
    axes.set_xlabel("parameters N")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False, fontsize=8)
    finish(figure, [axes], picture)


def draw_optimum(analysis: Analysis, picture: Path) -> None:
    """Best N and D over compute by each approach, the surface's with its interval."""
    points = analysis.best
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    grid = np.geomspace(points.flops.min(), points.flops.max() * 10, 40)
    surface = analysis.surfaces.get("hoffmann")
    if surface is not None:
        found = [best_use(points, surface.draws, float(c)) for c in grid]
        for axes, of in zip(panels, zip(*found, strict=True), strict=True):
            axes.fill_between(grid, [e.low for e in of], [e.high for e in of], color=BLUE, alpha=_BAND, linewidth=0)
            axes.plot(grid, [e.value for e in of], color=BLUE, label="surface (approach 3), 95%")
    for approach, colour, mark in (("isoflop", ORANGE, "o"), ("envelope", MUTED, None)):
        frontier = analysis.frontiers.get(approach)
        if frontier is None:
            continue
        laws = ((frontier.params, frontier.best_params), (frontier.tokens, frontier.best_tokens))
        for axes, (law, best) in zip(panels, laws, strict=True):
            style = {"linestyle": "--", "linewidth": 1.2}
            axes.plot(grid, [law.at(c) for c in grid], color=colour, label=f"{approach}: C^{law.exponent:.2f}", **style)
            if mark:
                axes.plot(frontier.flops, best, mark, color=colour, markersize=5)
    for axes, label in zip(panels, ("best parameters N", "best tokens D"), strict=True):
        axes.axvspan(points.flops.max(), grid[-1], color=MUTED, alpha=0.06, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("compute C (FLOPs); grey: beyond what was measured")
        axes.set_ylabel(label)
    panels[0].legend(frameon=False, fontsize=8)
    finish(figure, panels, picture)


def draw_surface(analysis: Analysis, picture: Path) -> None:
    """Contours of the fitted loss over N and D, the runs, and the line of optima."""
    points, surface = analysis.best, analysis.surfaces["hoffmann"]
    figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    sizes = np.geomspace(points.params.min() / 1.5, points.params.max() * 1.5, 80)
    tokens = np.geomspace(points.tokens.min() / 1.5, points.tokens.max() * 1.5, 80)
    n, d = np.meshgrid(sizes, tokens)
    loss = np.exp(surface.fit.log_loss(n.ravel(), d.ravel())).reshape(n.shape)
    lines = axes.contour(n, d, loss, levels=14, cmap="viridis", linewidths=1)
    axes.clabel(lines, fontsize=7, fmt="%.2f")
    axes.plot(points.params, points.tokens, "o", color=MUTED, markersize=3, label="runs")
    grid = np.geomspace(points.flops.min(), points.flops.max(), 30)
    line = [[of.value for of in best_use(points, surface.draws, float(c))] for c in grid]
    axes.plot(*zip(*line, strict=True), color=ORANGE, linewidth=2, label="best for its compute")
    axes.set(xscale="log", yscale="log", xlim=(sizes[0], sizes[-1]), ylim=(tokens[0], tokens[-1]))
    axes.set_xlabel("parameters N")
    axes.set_ylabel("tokens D")
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=8, loc="upper left")
    finish(figure, [axes], picture, grid=False)


def draw_residuals(analysis: Analysis, picture: Path) -> None:
    """How far each run is from the surface, over compute and over tokens per parameter."""
    points, fit = analysis.best, analysis.surfaces["hoffmann"].fit
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.2), sharey=True, layout="constrained")
    cost = compute_law(points)
    ratio = points.tokens / points.params
    for axes, x, label in (
        (panels[0], points.flops, f"compute C (FLOPs), about {cost.factor:.3g} N^{cost.exponent:.2f} D"),
        (panels[1], ratio, "tokens per parameter"),
    ):
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.plot(x, -100 * fit.residuals, "o", color=BLUE, markersize=4)
        axes.set_xscale("log")
        axes.set_xlabel(label)
    panels[0].set_ylabel("loss above the fit (%)")
    finish(figure, panels, picture)


def draw_variants(analyses: dict[str, Analysis], picture: Path) -> None:
    """Least loss over compute of each variant."""
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    for (name, analysis), colour in zip(analyses.items(), _VARIANTS * len(analyses), strict=False):
        frontier = analysis.frontiers.get("isoflop")
        if frontier is None:
            continue
        grid = np.geomspace(frontier.flops.min(), frontier.flops.max(), 50)
        drawn: Any = [[one.loss.at(c) for c in grid] for one in analysis.frontier_draws["isoflop"]]
        if drawn:
            low, high = np.percentile(np.array(drawn), [2.5, 97.5], axis=0)
            axes.fill_between(grid, low, high, color=colour, alpha=_BAND, linewidth=0)
        axes.plot(grid, [frontier.loss.at(c) for c in grid], color=colour, label=name)
        axes.plot(frontier.flops, frontier.best_loss, "o", color=colour, markersize=5)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("compute C (FLOPs)")
    axes.set_ylabel("least loss (nats per token)")
    axes.legend(frameon=False)
    finish(figure, [axes], picture)
