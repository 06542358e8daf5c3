"""`gramian sweep report`: one HTML file that needs nothing else, and its pictures as PNG."""

from __future__ import annotations

import base64
import html
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.files import atomic_write
from launch.sweep_fit import Source, exponents, with_interval
from scaling.analysis import Analysis, Settings, analyse_variants, multipliers

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2428; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #e3e6e9; text-align: right }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; display: block; margin: 1rem 0 }
.warning { color: #a33b10 } .note { color: #5c6670 }
"""


def run_report(source: Source, settings: Settings, out: Path | None) -> None:
    """Fit, draw and write; where nothing can be fitted the report says why."""
    if out is None and source.sweep is None:
        raise UserError("--from: say with --out DIR where the report goes")
    points = source.points()
    analyses = analyse_variants(points, settings, may_be_empty=True)
    folder, title, held_out = out, points.source, ""
    if source.sweep is not None:
        from launch.sweep_tasks import SweepFolder
        from scaling.sweepfile import load_sweep

        sweep = load_sweep(source.sweep)
        sweep_folder = SweepFolder(sweep.folder)
        folder, title = out or sweep_folder.path / "report", f"Sweep {sweep.name}"
        held_out = _held_out(sweep_folder.predictions(), sweep_folder.records())
    assert folder is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page = _page(title, analyses, folder, held_out)
        atomic_write(folder / "report.html", page)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}; give another folder") from None
    print(f"report  {folder / 'report.html'}")


def _page(title: str, analyses: dict[str, Analysis], folder: Path, held_out: str) -> str:
    from launch import sweep_plots as plots

    def picture(name: str, alt: str, draw: Callable[[Path], None]) -> str:
        draw(folder / f"{name}.png")
        data = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
        return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'

    parts = [f"<h1>{html.escape(title)}</h1>", _paragraph(f"Written {time.strftime('%Y-%m-%d %H:%M')}.", "note")]
    factors = multipliers(analyses, next(iter(analyses)))
    if len(analyses) > 1:
        parts.append("<h2>Variants</h2>")
        parts.append(picture("variants", "Least loss over compute", lambda p: plots.draw_variants(analyses, p)))
        reference = next(iter(analyses))
        ratios = [(name, with_interval(found)) for name, found in factors.items()]
        parts.append(_table(("variant", f"times the compute of {reference} for the same loss, 95%"), ratios))
        parts.append(
            _paragraph(
                "Measured at these sizes and budgets, and told of no larger ones. The interval has the noise of the "
                "runs, not that of the choice of learning rates.",
                "note",
            )
        )
    for number, (name, analysis) in enumerate(analyses.items()):
        prefix = f"{number}-" if len(analyses) > 1 else ""
        parts.append(f"<h2>{html.escape(name or 'Fits')}</h2>")
        parts.append(_paragraph(f"{len(analysis.points)} records.", "note"))
        parts += [_paragraph(note, "note") for note in analysis.points.notes]
        parts += [_paragraph(f"Warning: {text}", "warning") for text in analysis.warnings]
        parts += [_paragraph(f"{key} refused: {text}", "warning") for key, text in analysis.refused.items()]
        if analysis.vertices:
            draw = plots.draw_isoflop
            parts.append(picture(f"{prefix}isoflop", "IsoFLOP curves", lambda p, a=analysis, d=draw: d(a, p)))  # type: ignore[misc]
        if analysis.frontiers or "hoffmann" in analysis.surfaces:
            draw = plots.draw_optimum
            parts.append(picture(f"{prefix}optimum", "Best N and D", lambda p, a=analysis, d=draw: d(a, p)))  # type: ignore[misc]
            rows = [
                (way, f"{n.value:.3f}", f"{n.low:.3f} to {n.high:.3f}" if n.low == n.low else "not known", f"{d:.3f}")
                for way, n, d in exponents(analysis)
            ]
            parts.append(_table(("approach", "N ~ C^a: a", "95%", "D ~ C^b: b"), rows))
        for form, surface in analysis.surfaces.items():
            parts.append(_surface_table(form, surface))
        if "hoffmann" in analysis.surfaces:
            for label, draw in (("surface", plots.draw_surface), ("residuals", plots.draw_residuals)):
                parts.append(picture(prefix + label, label, lambda p, a=analysis, d=draw: d(a, p)))  # type: ignore[misc]
        for setting, law in analysis.settings.items():
            parts.append(_paragraph(f"Best {setting} = {law.factor:.4g} N^{law.by_params:.3f} D^{law.by_tokens:.3f}."))
    parts += [held_out, "<h2>Records</h2>", *(_records(name, a) for name, a in analyses.items())]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><link rel="icon" href="data:,">'
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _surface_table(form: str, surface: Any) -> str:
    fit, left = surface.fit, surface.extrapolation
    rows = []
    for name in fit.form.names:
        low, high = surface.draws.interval(name)
        profile = surface.profiles.get(name)
        of_profile = f"{profile[0]:.4g} to {profile[1]:.4g}" if profile else ""
        rows.append((name, f"{fit.parameters[name]:.5g}", f"{low:.4g} to {high:.4g}", of_profile))
    told = (
        f"Objective {fit.objective:.8g} (sum of Huber losses of log losses, delta {fit.delta:g}); {fit.share:.0%} of "
        f"{fit.starts} starts reached it; condition number {fit.condition:.3g}; {len(surface.draws.thetas)} bootstraps "
        f"of {surface.draws.resampling}. Largest budget left out: "
    )
    told += (
        left
        if isinstance(left, str)
        else (
            f"its loss is predicted {left.mean_error:+.2%} off in the mean, {left.worst_error:+.2%} at worst, at "
            f"{left.factor:.2g} times the compute that was fitted."
        )
    )
    head = (f"{form} form", "value", "95% by bootstrap", "95% by profile")
    return (
        _table(head, rows)
        + _paragraph(told, "note")
        + "".join(_paragraph(f"Warning: {text}", "warning") for text in surface.warnings)
    )


def _held_out(said: dict[str, dict[str, Any]], records: dict[str, dict[str, Any]]) -> str:
    """What was said of the largest budget before it was run, beside what came out."""
    if not said:
        return ""
    rows, refused = [], {}
    for cell, one in said.items():
        if "refused" in one:
            refused[one["variant"]] = one["refused"]
            continue
        loss = records.get(cell, {}).get("loss")
        outcome = ("not run", "") if loss is None else (f"{loss:.4f}", f"{one['value'] / loss - 1:+.2%}")
        interval = f"{one['low']:.4f} to {one['high']:.4f}"
        rows.append((records.get(cell, {}).get("name", cell), f"{one['value']:.4f}", interval, *outcome))
    told = [_paragraph(f"{name} refused: {reason}", "warning") for name, reason in refused.items()]
    table = _table(("run", "predicted", "95%", "loss", "predicted over loss"), rows) if rows else ""
    return "".join(["<h2>The largest budget, predicted before it was run</h2>", *told, table])


def _records(name: str, analysis: Analysis) -> str:
    p = analysis.points
    columns = {"N": p.params, "D": p.tokens, "C": p.flops, "lr": p.lr, "loss": p.loss}
    columns = {title: values for title, values in columns.items() if not np.isnan(values).all()}
    rows = [(p.group[i], *(f"{values[i]:.4g}" for values in columns.values())) for i in np.argsort(p.flops)]
    return _table((name or "group", *columns), rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{html.escape(text)}</p>' if kind else f"<p>{html.escape(text)}</p>"
