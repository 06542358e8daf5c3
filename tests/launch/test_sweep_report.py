"""The report of a sweep: one file that needs nothing else, all fits, the held-out budget; and a predicted config."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from launch.sweep_fit import Source
from launch.sweep_report import run_report
from launch.sweep_run import predict_held_out
from launch.sweep_tasks import SweepFolder
from scaling.analysis import Settings
from scaling.design import design
from scaling.sweepfile import load_sweep
from tests.launch.browser import CHROMIUM, look_at
from tests.launch.conftest import Ended
from tests.scaling.data import ROOT, surface, synthetic
from trainer.config import load_config


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of two variants, of which the second learns as if it had a third more tokens."""
    file = tmp_path_factory.mktemp("records") / "records.csv"
    lines = ["params,tokens,flops,loss,variant"]
    for name, factor, seed in (("adamw", 1.0, 0), ("muon", 1.33, 1)):
        points = synthetic(noise=0.003, seed=seed, sizes=9, budgets=7)
        noise = points.loss / surface(points.params, points.tokens)
        loss = surface(points.params, factor * points.tokens) * noise
        rows = zip(points.params, points.tokens, points.flops, loss, strict=True)
        lines += [",".join([*(f"{value:.10g}" for value in row), name]) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def report(table: Path) -> Path:
    run_report(Source(None, table, []), Settings(bootstrap=40), table.parent / "report")
    return table.parent / "report"


def test_the_page_has_all_inside_itself(report: Path) -> None:
    page = (report / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page)
    assert "<script" not in page
    pictures = sorted(path.stem for path in report.glob("*.png"))
    of_each = ("isoflop", "optimum", "residuals", "surface")
    assert pictures == sorted(["variants", *(f"{i}-{name}" for i in (0, 1) for name in of_each)])
    assert page.count("<img ") == len(pictures)
    assert all((report / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in pictures)
    (ratio,) = re.findall(r"<td>muon</td><td>([\d.]+) \(([\d.]+) to ([\d.]+)\)</td>", page)
    value, low, high = map(float, ratio)
    assert 1.05 < low < value < high < 1.4
    assert re.search(r"\d+% of \d+ starts reached it", page)
    assert "largest budget left out: " in page


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_opens_in_chromium(report: Path, tmp_path: Path) -> None:
    """Without a console message or a request. A page that has both shows that they would be seen."""
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://127.0.0.1:9/a.png"><script>console.error("seen")</script>', encoding="utf-8")
    seen = look_at(bad, tmp_path / "bad.png")
    assert any("seen" in message for message in seen.console)
    assert "http://127.0.0.1:9/a.png" in seen.requests
    seen = look_at(report / "report.html", tmp_path / "page.png")
    assert seen.console == []
    assert seen.requests == []
    assert (tmp_path / "page.png").stat().st_size > 50_000


def test_names_in_records_do_not_become_markup(tmp_path: Path) -> None:
    file = tmp_path / "records.csv"
    points = synthetic()
    rows = [
        f"{n:.8g},{d:.8g},{loss:.8g},<b>x</b>"
        for n, d, loss in zip(points.params, points.tokens, points.loss, strict=True)
    ]
    file.write_text("params,tokens,loss,variant\n" + "\n".join(rows) + "\n", encoding="utf-8")
    run_report(Source(None, file, []), Settings("2", bootstrap=20), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<b>x" not in page
    assert "&lt;b&gt;x" in page


def test_fit_and_predict_as_commands(table: Path, gramian: Callable[..., Ended]) -> None:
    quick = ("--bootstrap", "40", "--approach", "2")
    found = json.loads(gramian("sweep", "fit", "--from", table, *quick, "--json", "-").out)
    assert found["compute multiplier"]["muon"]["over"] == "adamw"
    exponent = found["variants"]["adamw"]["isoflop"]["N exponent"]
    assert exponent["value"] == pytest.approx(0.45, abs=0.05)
    assert exponent["low"] < exponent["value"] < exponent["high"]
    shown = gramian("sweep", "fit", "--from", table, *quick).out
    assert "muon: " in shown
    assert "times the compute of adamw" in shown
    words = ("--flops", "1e24", "--bootstrap", "40", "--variant", "muon")
    plan = json.loads(gramian("sweep", "predict", "--from", table, *words, "--json", "-").out)
    assert plan["beyond"] == pytest.approx(100, rel=0.05)
    assert plan["params"]["low"] < plan["params"]["value"] < plan["params"]["high"]
    assert 6 * plan["params"]["value"] * plan["tokens"]["value"] == pytest.approx(1e24, rel=1e-3)


def test_a_sweep_is_fitted_from_its_records_alone(tmp_path: Path, gramian: Callable[..., Ended]) -> None:
    """Records that a known law has made, without a run directory; what was predicted stands beside what came out."""
    file = tmp_path / "law.yaml"
    text = (ROOT / "configs" / "sweeps" / "tiny.yaml").read_text(encoding="utf-8")
    text = text.replace("name: tiny", f"name: law\ndir: {tmp_path}").replace("../tiny", str(ROOT / "configs" / "tiny"))
    text = text.replace("[16, 32, 64]", "[16, 32, 48, 64]").replace(
        "[5.0e+9, 1.5e+10]", "[5e9, 1e10, 2e10, 4e10, 8e10]"
    )
    file.write_text(text, encoding="utf-8")
    sweep = load_sweep(file)
    folder, cells = SweepFolder(tmp_path / "law"), design(sweep)
    held_out = [cell for cell in cells if cell.held_out]
    law = {"E": 1.0, "A": 40.0, "B": 60.0, "alpha": 0.35, "beta": 0.3}
    for i, cell in enumerate(cells):  # the largest budget comes last
        if cell is held_out[0]:
            predict_held_out(Console(file=io.StringIO()), sweep, folder, held_out, set(folder.records()))
        loss = float(surface(np.array([cell.params["active"]]), np.array([cell.tokens]), law)[0])
        record = {"cell": cell.id, "name": cell.name, "variant": "", "budget": cell.budget, "group": f"w{cell.width}"}
        record |= {"params": cell.params, "tokens": cell.tokens, "flops": cell.flops, "lr": 1e-3, "batch": 2048}
        folder.append({**record, "loss": loss * (1 + 0.001 * (-1) ** i), "flops_per_second": 1e9})
    said = folder.predictions()
    assert said.keys() == {cell.id for cell in held_out}
    cost = np.array(sorted((c.params["active"], c.flops["causal"] / c.tokens) for c in cells))
    sizes = np.geomspace(cost[0, 0], cost[-1, 0], 2001)
    losses = surface(sizes, 8e10 / np.interp(sizes, cost[:, 0], cost[:, 1]), law)
    assert 0 < losses.argmin() < 2000
    for cell in held_out:
        one, loss = said[cell.id], folder.records()[cell.id]["loss"]
        assert one["records"] == len(cells) - len(held_out)
        assert one["value"] == pytest.approx(loss, rel=0.004)
        assert one["low"] < one["value"] < one["high"]
        least = one["least"]
        assert least["loss"]["value"] == pytest.approx(losses.min(), rel=0.004)
        assert least["loss"]["low"] < least["loss"]["value"] < least["loss"]["high"]
        assert least["flops"] == pytest.approx(8e10, rel=0.02)
    folder.append({**record, "cell": "before", "loss": 9.0})  # of a run that the file no longer has
    quick = ("--bootstrap", "20", "--json", "-", "--approach")
    found = json.loads(gramian("sweep", "fit", file, *quick, "3").out)["variants"]["all"]
    assert found["hoffmann"]["parameters"]["alpha"] == pytest.approx(0.35, abs=0.03)
    assert found["records"] == len(cells)
    assert found["notes"] == ["1 records of runs that the sweep no longer has are left out"]
    by_causal, by_6nd = (
        json.loads(gramian("sweep", "fit", file, *quick, "2", "--count-flops", flops).out)["variants"]["all"]["isoflop"]
        for flops in ("causal", "6nd")
    )
    assert by_causal["flops"] == pytest.approx([5e9, 1e10, 2e10, 4e10, 8e10], rel=0.1)
    assert all(theirs > 1.02 * ours for ours, theirs in zip(by_causal["flops"], by_6nd["flops"], strict=True))
    out = tmp_path / "big.yaml"
    told = gramian("sweep", "predict", file, "--flops", "1e12", "--bootstrap", "20", "--out", out)
    assert told.code == 0
    assert f"config {out}: width " in told.out
    config = load_config(out)
    assert config.model.d_model % 16 == 0
    assert f"width {config.model.d_model}, 2 blocks" in told.out
    assert "an extrapolation" in told.out
    assert gramian("train", out, "--dry-run").code == 0
    assert gramian("sweep", "report", file, "--bootstrap", "20").code == 0
    page = (folder.path / "report" / "report.html").read_text(encoding="utf-8")
    for one in (*said.values(), next(iter(said.values()))["least"]["loss"]):
        assert f"<td>{one['low']:.4f} to {one['high']:.4f}</td>" in page
    shutil.rmtree(folder.path)
    refused = gramian("sweep", "fit", file)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "no such file; give a .csv or .jsonl of records, or run the sweep first" in refused.err
