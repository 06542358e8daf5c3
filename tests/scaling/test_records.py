"""Reading records: columns, conventions, and every refusal in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from scaling.records import Counting, group_budgets, read_points

HEADER = "params,tokens,flops,loss\n"


def csv(folder: Path, *rows: str, header: str = HEADER) -> Path:
    file = folder / "records.csv"
    file.write_text(header + "".join(row + "\n" for row in rows), encoding="utf-8")
    return file


def own(**changes: Any) -> dict[str, Any]:
    """A record as a sweep writes it."""
    return {
        "cell": "c1",
        "name": "run-1",
        "loss": 3.0,
        "tokens": 2000,
        "params": {"active": 10, "total": 40, "active_non_embedding": 8, "total_non_embedding": 38},
        "flops": {"causal": 1.5e5, "full_attention": 1.6e5},
        "lr": 0.01,
        "batch": 64,
        "budget": "1e5",
        "group": "g",
        "variant": "muon",
        **changes,
    }


def test_csv_with_our_names_and_with_theirs(tmp_path: Path) -> None:
    ours = read_points(csv(tmp_path, "1e6,2e7,1.2e14,3.5", "2e6,1e7,1.2e14,3.4"), {}, Counting())
    assert ours.params.tolist() == [1e6, 2e6]
    assert ours.notes == ()
    file = csv(tmp_path, "1e6,1.2e14,3.5,x", "2e6,1.2e14,3.4,y", header="n,compute,final,run\n")
    theirs = read_points(file, {"params": "n", "flops": "compute", "loss": "final"}, Counting())
    assert theirs.tokens.tolist() == pytest.approx([2e7, 1e7])
    assert theirs.notes == ("tokens are taken to be flops / (6 params)",)


@pytest.mark.parametrize(
    ("rows", "columns", "reason"),
    [
        (["1e6,2e7,1.2e14,nan"], {}, "row 1: 'loss' is nan, where a finite number above 0 is needed"),
        (["1e6,2e7,1.2e14,inf"], {}, "row 1: 'loss' is inf"),
        (["1e6,2e7,1.2e14,3", "1e6,2e7,1.2e14,-1"], {}, "row 2: 'loss' is -1"),
        (["1e6,many,1.2e14,3"], {}, "row 1: 'tokens' is 'many', not a number"),
        (["1e6,2e7,1.2e14,3", "1e6,2e7,1.2e14,4"], {}, "rows 1 and 2 are the same run with losses 3.0 and 4.0"),
        (["1e6,2e7,1.2e14,3"], {"params": "size"}, "no column 'size' for params; it has params, tokens, flops, loss"),
        (["1e6,2e7,1.2e14,3"], {"parameters": "params"}, "there is no such column; choose of params, tokens"),
        ([], {}, "no records"),
    ],
)
def test_refusals(tmp_path: Path, rows: list[str], columns: dict[str, str], reason: str) -> None:
    with pytest.raises(UserError) as refused:
        read_points(csv(tmp_path, *rows), columns, Counting())
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_columns_and_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no column 'loss'; name it with --column loss=NAME, where the file has a"):
        read_points(csv(tmp_path, "1", header="a\n"), {}, Counting())
    with pytest.raises(UserError, match="no column 'tokens'"):
        read_points(csv(tmp_path, "1,2", header="params,loss\n"), {}, Counting())
    with pytest.raises(UserError, match="no such file"):
        read_points(tmp_path / "none.csv", {}, Counting())
    (tmp_path / "bad.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="not a table of records"):
        read_points(tmp_path / "bad.jsonl", {}, Counting())


def test_rows_twice_count_once_and_seeds_are_apart(tmp_path: Path) -> None:
    points = read_points(csv(tmp_path, "1e6,2e7,1.2e14,3", "1e6,2e7,1.2e14,3"), {}, Counting())
    assert (len(points), points.notes) == (1, ("1 rows are there twice and count once",))
    file = csv(tmp_path, "1e6,2e7,3,0", "1e6,2e7,3.1,1", header="params,tokens,loss,seed\n")
    assert len(read_points(file, {}, Counting())) == 2


def test_own_records_by_each_convention(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    rows = [own(), own(cell="c2", name="run-2", loss=None)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    points = read_points(file, {}, Counting())
    assert (points.params.tolist(), points.flops.tolist()) == ([10], [1.5e5])
    assert points.notes == ("run-2 diverged and is left out",)
    points = read_points(file, {}, Counting(parameters="total_non_embedding", flops="6nd"))
    assert (points.params.tolist(), points.flops.tolist()) == ([38], [6 * 38 * 2000])
    assert read_points(file, {}, Counting(flops="full_attention")).flops.tolist() == [1.6e5]
    file.write_text(f'{json.dumps(rows[0])}\n{{"cell": "c3", "na\n{json.dumps(rows[1])}\n', encoding="utf-8")
    assert read_points(file, {}, Counting()).loss.tolist() == [rows[0]["loss"]]  # without what a crash cut off
    file.write_text("".join(json.dumps(row) + "\n" for row in (own(), own(loss=3.1))), encoding="utf-8")
    with pytest.raises(UserError, match="rows 1 and 2 are the same run"):
        read_points(file, {}, Counting())
    file.write_text(json.dumps(own(loss=None)) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="all 1 runs diverged"):
        read_points(file, {}, Counting())


def test_budgets_by_name_by_nearness_and_as_given(tmp_path: Path) -> None:
    flops = np.array([1e18, 1.1e18, 9.5e17, 1e19, 1.05e19, 3e20])
    assert group_budgets(flops, np.full(6, "")).tolist() == [0, 0, 0, 1, 1, 2]
    names = np.array(["b", "b", "b", "a", "a", "c"])
    assert group_budgets(flops, names).tolist() == [0, 0, 0, 1, 1, 2]
    chain = np.geomspace(1e18, 1e19, 20)  # each near to the next, and no budgets
    assert set(group_budgets(chain, np.full(20, "")).tolist()) == {-1}
    rows = [f"{n},{c / 6 / n},{c},3" for n, c in ((1e6, 1e14), (2e6, 1.05e14), (1e6, 1e15), (1e6, 3e15))]
    points = read_points(csv(tmp_path, *rows), {}, Counting(), budgets=(1e15, 1e14))
    assert points.budget.tolist() == [0, 0, 1, -1]


def test_dropping_the_highest(tmp_path: Path) -> None:
    file = csv(tmp_path, *(f"{n}e6,2e7,1e14,{loss}" for n, loss in ((1, 3), (2, 5), (3, 4))))
    points = read_points(file, {}, Counting(), drop_highest=1)
    assert points.loss.tolist() == [3, 4]
    assert points.notes[-1] == "1 records with the highest losses are left out"
    with pytest.raises(UserError, match="leaves nothing of 3 records"):
        read_points(file, {}, Counting(), drop_highest=3)
