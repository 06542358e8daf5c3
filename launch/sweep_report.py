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
from launch.sweep_fit import Source
from launch.sweep_told import Line, Rows, between, told, with_interval
from scaling.analysis import Analysis, Settings, analyse_variants, multipliers
from scaling.isoflop import Vertex

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

        sweep_folder = SweepFolder(source.config.folder)
        folder, title = out or sweep_folder.path / "report", f"Sweep {source.config.name}"
        held_out = _held_out(sweep_folder.predictions(), sweep_folder.records(), analyses)
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

    def picture(name: str, alt: str, draw: Callable[..., None], what: Any) -> str:
        draw(what, folder / f"{name}.png")
        data = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
        return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'

    parts = [f"<h1>{html.escape(title)}</h1>", _line(Line(f"Written {time.strftime('%Y-%m-%d %H:%M')}"))]
    reference = next(iter(analyses))
    if ratios := multipliers(analyses, reference):
        head = ("variant", f"times the compute of {reference} for the same loss, 95%")
        limits = (
            "Measured at these sizes and budgets, and told of no larger ones. The interval has the noise of the runs, "
            "not that of the choice of learning rates."
        )
        parts.append("<h2>Variants</h2>")
        parts.append(picture("variants", "Least loss over compute", plots.draw_variants, analyses))
        parts.append(_table(Rows(head, [(name, with_interval(found)) for name, found in ratios.items()])))
        parts.append(_line(Line(limits)))
    for number, (name, analysis) in enumerate(analyses.items()):
        prefix = f"{number}-" if len(analyses) > 1 else ""
        surface = "hoffmann" in analysis.surfaces
        drawn = [
            ("isoflop", "Loss over N for each budget", plots.draw_isoflop, bool(analysis.vertices)),
            ("optimum", "Best N and D over compute", plots.draw_optimum, surface or bool(analysis.frontiers)),
            ("surface", "Loss over N and D", plots.draw_surface, surface),
            ("residuals", "Distance of runs from the surface", plots.draw_residuals, surface),
        ]
        parts.append(f"<h2>{html.escape(name or 'Fits')}</h2>")
        parts += [_table(part) if isinstance(part, Rows) else _line(part) for part in told(analysis)]
        parts += [picture(prefix + key, alt, draw, analysis) for key, alt, draw, there in drawn if there]
    parts += [held_out, "<h2>Records</h2>", *(_records(name, analysis) for name, analysis in analyses.items())]
    opening = f'<meta charset="utf-8"><title>{html.escape(title)}</title><link rel="icon" href="data:,">'
    body = "".join(parts)
    return f"<!doctype html><html lang=en><head>{opening}<style>{_STYLE}</style></head><body>{body}</body></html>\n"


def _held_out(
    said: dict[str, dict[str, Any]], records: dict[str, dict[str, Any]], analyses: dict[str, Analysis]
) -> str:
    """What was said of the largest budget before it was run, beside what came out: of its least loss, and of runs."""
    if not said:
        return ""
    rows, refused, least = [], {}, {}
    for cell, one in said.items():
        if "refused" in one:
            refused[one["variant"]] = one["refused"]
            continue
        if "least" in one:
            found = analyses[one["variant"]].vertices if one["variant"] in analyses else []
            least[one["variant"]] = _least(one["variant"], one["least"], found)
        loss = records.get(cell, {}).get("loss")
        outcome = ("not run", "") if loss is None else (f"{loss:.4f}", f"{one['value'] / loss - 1:+.2%}")
        interval = between(one["low"], one["high"], ".4f")
        rows.append((records.get(cell, {}).get("name", cell), f"{one['value']:.4f}", interval, *outcome))
    lines = [_line(Line(f"{name} refused: {reason}", True)) for name, reason in refused.items()]
    of_least = Rows(("least loss", "predicted", "95%", "by the parabola", "predicted over it"), list(least.values()))
    of_runs = Rows(("run", "predicted", "95%, with its noise", "loss", "predicted over loss"), rows)
    tables = [_table(table) for table in (of_least, of_runs) if table.rows]
    return "".join(["<h2>The largest budget, predicted before it was run</h2>", *lines, *tables])


def _least(name: str, said: dict[str, Any], vertices: list[Vertex]) -> tuple[str, ...]:
    """The prediction of a budget's least loss beside that of the parabola through its runs."""
    loss = said["loss"]
    found = [v.loss for v in vertices if v.usable and np.isclose(v.flops, said["flops"], rtol=0.05)]
    outcome = (f"{found[0]:.4f}", f"{loss['value'] / found[0] - 1:+.2%}") if found else ("not known", "")
    return (name or "all", f"{loss['value']:.4f}", between(loss["low"], loss["high"], ".4f"), *outcome)


def _records(name: str, analysis: Analysis) -> str:
    p = analysis.points
    columns = {"N": p.params, "D": p.tokens, "C": p.flops, "lr": p.lr, "loss": p.loss}
    columns = {title: values for title, values in columns.items() if not np.isnan(values).all()}
    rows = [(p.group[i], *(f"{values[i]:.4g}" for values in columns.values())) for i in np.argsort(p.flops)]
    return _table(Rows((name or "group", *columns), rows))


def _table(table: Rows) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(table.head, 'th')}{''.join(line(row, 'td') for row in table.rows)}</table>"


def _line(line: Line) -> str:
    return f'<p class="{"warning" if line.warning else "note"}">{html.escape(line.text)}</p>'
