"""The routing table names every parameter once, with what updates it, how fast and where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optim.table import HEADER, Routing, routing_rows, routing_table
from tests.gang import Gang
from tests.runs import TINY, started
from trainer.build import planned_routing
from trainer.config import load_config
from trainer.layout import plan_layout

KEYS = [
    "model.moe={n_experts: 4, d_ff: 32}",
    "optim={name: muon, lr: 0.02, weight_decay: 0.1, scale: rms, roles: {head: {lr_scale: 0.5}}}",
    "optim.adamw.lr=0.003",
]


def _running(overrides: list[str]) -> str:
    """The table of an optimizer that exists."""
    with started(overrides) as here:
        return routing_table(here.engine.routing(), "muon", 0.02)


@pytest.mark.parametrize("keys", [["parallel.ep=2"], ["parallel.tp=2"], ["parallel.dp_replicate=2"]])
def test_the_plan_is_what_ranks_do(gang: Gang, corpus: Path, keys: list[str]) -> None:
    """The table of a dry run, for which nothing is allocated, is that of the ranks."""
    config = load_config(TINY, [f"data.corpus={corpus}", *KEYS, *keys])
    layout = plan_layout(config, 4)
    planned = planned_routing(config, config.model.with_vocab_size(512), layout)
    assert all(p.device.type == "meta" for g in planned.groups for p in g["params"])
    table = routing_table(planned, "muon", 0.02)
    for theirs in gang.run(_running, [f"data.corpus={corpus}", *KEYS, *keys], world=4):
        assert theirs == table


def test_under_deepspeed(gang: Gang, corpus: Path) -> None:
    """It is the same but for who owns what, which only shows once DeepSpeed has cut the parameters."""
    keys = [f"data.corpus={corpus}", *KEYS, "parallel.engine=deepspeed", "parallel.ep=2"]
    config = load_config(TINY, keys)
    planned = planned_routing(config, config.model.with_vocab_size(512), plan_layout(config, 4))
    rows = {name: row for row in routing_rows(planned, "muon", 0.02) for name in row.names}
    assert "chosen at start" in routing_table(planned, "muon", 0.02)
    for routing in gang.run(_routing, keys, world=4):
        theirs = {name: row for row in routing_rows(routing, "muon", 0.02) for name in row.names}
        assert theirs.keys() == rows.keys()
        assert all(theirs[name][1:6] == row[1:6] for name, row in rows.items())
        assert len({owner for row in theirs.values() for owner in row.owners}) == 4


def _routing(overrides: list[str]) -> Routing:
    with started(overrides) as here:
        routing: Routing = here.engine.routing()
        return routing._replace(groups=[{**group, "params": []} for group in routing.groups])


def test_every_parameter_stands_in_it_once(corpus: Path) -> None:
    config = load_config(TINY, [f"data.corpus={corpus}", *KEYS])
    routing = planned_routing(config, config.model.with_vocab_size(512), plan_layout(config, 4))
    rows = routing_rows(routing, "muon", 0.02)
    names = [name for row in rows for name in row.names]
    assert sorted(names) == sorted(n for g in routing.groups for n in g["names"])
    assert len(set(names)) == len(names)
    by_name = {name: row for row in rows for name in row.names}
    wq, head = by_name["blocks.1.attention.wq.weight"], by_name["head.weight"]
    assert (wq.rule, wq.lr, wq.decay, wq.matrices, len(wq.owners)) == ("muon", 0.02, 0.1, "64 x 64", 2)
    assert wq.scale == pytest.approx(0.2 * 8)
    assert (head.rule, head.lr, head.owners) == ("adamw", pytest.approx(0.0015), [])
    experts = by_name["blocks.0.moe.experts.w_down"]
    assert (experts.matrices, len(experts.owners)) == ("4 of 64 x 32", 2 * 4)
    text = routing_table(routing, "muon", 0.02).splitlines()
    assert tuple(text[0].split()) == HEADER
    assert len(text) == len(rows) + 1
    (line,) = (line for line in text if "attention.wq" in line)
    assert re.match(r"blocks\.0-1\.attention\.wq\.weight +64 x 64 +muon +0\.02 +1\.6 +0\.1 +ranks [\d,-]+$", line)


def test_the_rule_in_the_docs_is_the_one_that_is_tested() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    (block,) = re.findall(r"^```python\n(.*?)^```", (root / "docs" / "optimizers.md").read_text(), re.M | re.S)
    assert block in (root / "tests" / "optim" / "own_rule.py").read_text()
    assert len(block.splitlines()) <= 30
