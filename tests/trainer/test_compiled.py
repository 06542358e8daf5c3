"""train.compile: blocks are compiled whole, once, and compute what they compute uncompiled."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gang import Gang
from tests.runs import started
from tests.trainer.test_certify import certified, worst_of

ACCUMULATE = ["train.micro_batch_size=4", "eval.batches=1"]  # four micro-batches on two ranks
STEPS = 4


class Compiled(NamedTuple):
    """What four steps gave, with an evaluation after the second and the third."""

    numbers: list[tuple[float, float]]  # loss and gradient norm
    scores: list[float]
    graphs: list[tuple[int, int]]  # of training and of evaluation so far, at the end of each step
    all_graphs: int  # as torch counts them
    breaks: int
    products: int  # calls of mm in the last step
    gradients: dict[str, bytes]  # of the last step


def four_steps(arguments: list[str]) -> Compiled:
    """In a rank, which may have compiled for other tests before."""
    import torch
    from torch._dynamo.utils import counters
    from torch.profiler import ProfilerActivity, profile

    from data.prepare import prepare
    from trainer.compiled import compiled_graphs
    from trainer.evaluate import evaluate

    torch._dynamo.reset()
    counters.clear()
    start = compiled_graphs(), compiled_graphs(training=False)
    numbers, scores, graphs, gradients = [], [], [], {}
    with started(arguments) as here:
        engine, token_bytes = here.engine, prepare(here.config.data).tokenizer().token_bytes
        update = engine.step

        def look(scale: float) -> None:
            gradients.update({name: g.full_tensor().cpu().numpy().tobytes() for name, g in engine.gradients().items()})
            update(scale)

        engine.step = look
        for step in range(STEPS):
            batch = here.batch(step)
            with profile(activities=[ProfilerActivity.CPU]) if step == STEPS - 1 else nullcontext() as profiler:
                result = here.step(batch)
            numbers.append((result.loss, result.grad_norm))
            if step in (1, 2):
                score = evaluate(engine.model, here.batches, token_bytes, here.runtime, here.config)
                scores.append(score["eval_loss"])
            graphs.append((compiled_graphs() - start[0], compiled_graphs(training=False) - start[1]))
    products = sum(event.count for event in profiler.key_averages() if event.key == "aten::mm")
    breaks = sum(counters["graph_break"].values())
    return Compiled(numbers, scores, graphs, counters["stats"]["unique_graphs"], breaks, products, gradients)


def relative_norm(ours: dict[str, bytes], theirs: dict[str, bytes]) -> float:
    """Norm of the difference over the norm, over all gradients."""
    import numpy as np

    a, b = (np.concatenate([np.frombuffer(g[name], np.float32) for name in theirs]) for g in (ours, theirs))
    return float(np.linalg.norm(a.astype(float) - b) / np.linalg.norm(b.astype(float)))


EVERY2 = ["train.activation_checkpointing=selective", "train.activation_checkpointing_every=2"]


@pytest.mark.parametrize(
    ("mode", "layers", "kinds", "again"),
    [
        ([], 2, 1, 0),
        (["train.activation_checkpointing=full"], 2, 1, 2 * 6),  # all but the down projection
        # Up and gate; in CI it is half of what follows.
        pytest.param(["train.activation_checkpointing=selective"], 2, 1, 2 * 2, marks=pytest.mark.verify),
        (EVERY2, 4, 2, 2 * 2),
    ],
    ids=["none", "full", "selective", "every2-of-4"],
)
def test_blocks_are_compiled_once(
    gang: Gang, corpus: Path, mode: list[str], layers: int, kinds: int, again: int
) -> None:
    """Two sharded ranks: a graph for each kind of block, however many there are, made in the first step; evaluation
    makes its own and causes no other. Nothing breaks a graph. The numbers are those of uncompiled blocks but for
    rounding, and no other matrix products are computed again."""
    arguments = [f"data.corpus={corpus}", f"model.n_layers={layers}", *ACCUMULATE, *mode]
    eager: Compiled = gang.run(four_steps, arguments, world=2)[0]
    compiled: Compiled = gang.run(four_steps, [*arguments, "train.compile=true"], world=2, timeout=280)[0]
    assert eager.graphs == [(0, 0)] * STEPS
    assert compiled.graphs == [(kinds, 0)] + [(kinds, kinds)] * (STEPS - 1)
    assert compiled.all_graphs == 2 * kinds
    assert compiled.breaks == 0
    assert compiled.products == 4 * (layers * 3 * 7 + 3 + again)  # a block has seven forward, the head one
    for ours, expected in zip(compiled.numbers, eager.numbers, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
    assert compiled.scores == pytest.approx(eager.scores, rel=1e-5)
    assert relative_norm(compiled.gradients, eager.gradients) < 1e-5  # measured 4e-7


def test_blocks_whose_experts_are_on_other_ranks(gang: Gang, paragraphs: Path) -> None:
    """Certified: their pieces, between which tokens travel, are compiled once, and give the loss and the gradients of
    one plain process, while experts get other numbers of tokens each time."""
    keys = [f"data.corpus={paragraphs}", "train.compile=true", "parallel.ep=2", "data.seq_len=32", "model.n_layers=1"]
    keys.append("model.moe={n_experts: 4, d_ff: 32, n_shared_experts: 1}")
    rows = gang.run(certified, keys, world=2, timeout=280)[0]
    assert [row.subject() for row in rows if not row.passed] == []
    worst = worst_of(rows)
    assert worst["gradient"] < 5e-6
    assert "late compilations" in worst
    assert any(row.parameter == "blocks.0.moe.experts.w_down" for row in rows)
