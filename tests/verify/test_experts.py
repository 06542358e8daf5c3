"""Every layout, kind of router and knob with experts against one process, more seeds against loops, and longer runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.experts import CHECKPOINTING, KINDS, LAYOUTS, against_loops, free_run
from tests.gang import Gang
from tests.routed import Compared, against_one_process
from tests.trainer.test_expert_parallel import hold
from tests.verify.evidence import write_evidence

pytestmark = [pytest.mark.verify, pytest.mark.timeout(4 * 3600)]
COMMAND = "pytest -m verify tests/verify/test_experts.py"
MASKS = {"rows": [], "uneven masks": ["data.packing=pad"]}
ACCUMULATION = {1: [], 4: ["train.micro_batch_size=1"]}


class Worst:
    """The largest differences of many comparisons, and how many tokens were compared."""

    def __init__(self) -> None:
        self.differences: dict[str, float] = defaultdict(float)
        self.cases = self.tokens = self.ties = self.flipped = self.differ = 0

    def add(self, compared: Compared) -> None:
        for quantity, difference in compared.worst().items():
            self.differences[quantity] = max(self.differences[quantity], difference)
        routed = compared.routed
        self.cases += 1
        self.tokens += routed.tokens
        self.ties += routed.ties
        self.flipped += routed.flipped
        self.differ += routed.differ

    def figures(self) -> dict[str, Any]:
        counts = {key: getattr(self, key) for key in ("cases", "tokens", "ties", "flipped", "differ")}
        return counts | dict(self.differences)


def cases() -> Iterator[tuple[str, str, list[str], int]]:
    """Layouts, kinds of routers, keys and numbers of steps.

    Every layout meets every kind of router under all masks and accumulations, and checkpointing goes round: all knobs
    together meet at each layout, and with each kind of router. Without knobs a layout has two kinds for twenty steps.
    """
    for (i, layout), (j, kind) in product(enumerate(LAYOUTS), enumerate(KINDS)):
        world, keys = LAYOUTS[layout]
        for n, (masks, accumulation) in enumerate(product(MASKS, ACCUMULATION)):
            # One process accumulates what four ranks have at once.
            pieces = ACCUMULATION[accumulation] if world > 1 or accumulation > 1 else ["train.micro_batch_size=16"]
            again = list(CHECKPOINTING.values())[(i + j + n) % 3]
            yield layout, kind, [*keys, *MASKS[masks], *pieces, again], 3
        if (j - i) % 5 in (0, 2):
            yield layout, kind, keys, 20


def test_every_layout(gang: Gang, paragraphs: Path) -> None:
    """Layouts, routers and knobs with one another, three steps each or twenty."""
    worst: dict[str, Worst] = defaultdict(Worst)
    for layout, kind, keys, steps in cases():
        arguments = [f"data.corpus={paragraphs}", *KINDS[kind], *keys]
        compared = gang.run(against_one_process, arguments, steps, world=LAYOUTS[layout][0], timeout=300)[0]
        hold(compared, kind, steps)
        worst[layout if steps == 3 else f"{layout}, twenty steps"].add(compared)
    write_evidence("experts-layouts", COMMAND, {name: found.figures() for name, found in worst.items()})
    assert sum(found.cases for found in worst.values()) == len(LAYOUTS) * (len(KINDS) * 4 + 2)


def test_gradients_over_seeds(gang: Gang, paragraphs: Path) -> None:
    """Ten seeds of each router, each seed at one of three layouts, against the loops in float64."""
    edits = {
        "softmax": "steep, one dead",
        "sigmoid": "steep, biased",
        "switch": "steep",
        "biases": "steep, a rank dead",
    }
    figures: dict[str, Any] = {}
    for kind in edits:
        worst, margin = [0.0, ""], 1.0
        for seed in range(10):
            layout = ("fsdp4-ep2", "fsdp4-ep4", "hsdp2x2-ep2")[seed % 3]
            world, keys = LAYOUTS[layout]
            tiny = ["data.seq_len=16", "train.global_batch_size=4", "train.micro_batch_size=1", f"run.seed={seed}"]
            dead = ["model.moe.selection_bias=true"] if "dead" in edits[kind] else []
            arguments = [f"data.corpus={paragraphs}", *KINDS[kind], *dead, *keys, *tiny]
            looped = gang.run(against_loops, arguments, edits[kind], world=world)[0]
            assert looped.same_routing, (layout, kind, seed, looped.margin)
            name = max(looped.gradients, key=lambda name: looped.gradients[name])
            worst = max(worst, [looped.gradients[name], name])
            margin = min(margin, looped.margin)
        figures[f"{kind}, {edits[kind]}"] = {"gradient": worst, "smallest margin of a choice": margin}
    write_evidence("experts-gradients", COMMAND, figures)
    assert all(row["gradient"][0] < 1e-5 for row in figures.values())


def test_copies_over_fifty_steps(gang: Gang, paragraphs: Path) -> None:
    figures: dict[str, Any] = {}
    for layout, again in (("hsdp2x2-ep2", "none"), ("hsdp2x2-ep2", "full"), ("ddp4", "none"), ("fsdp4-ep4", "none")):
        world, keys = LAYOUTS[layout]
        clip = "train.grad_clip=0.1"
        arguments = [f"data.corpus={paragraphs}", *KINDS["sigmoid"], *keys, clip, CHECKPOINTING[again]]
        ranks = gang.run(free_run, arguments, 50, world=world, timeout=600)
        for rank in ranks:
            assert rank.copies_that_differ == [0] * 10
            assert rank.grad_norm == ranks[0].grad_norm
            assert min(rank.grad_norm) > 0.1
        figures[f"{layout}, checkpointing {again}"] = {
            "steps": 50,
            "tensors that differ": 0,
            "smallest norm over clip": min(ranks[0].grad_norm) / 0.1,
            "loss": [ranks[0].loss[0], ranks[0].loss[-1]],
        }
    write_evidence("experts-copies", COMMAND, figures)
    assert len(figures) == 4
