"""Twelve ways to be wrong with experts, a line each, and what tells of each.

Faults of the trainer are those that certification finds: the plain process has none of its lines. The layer itself is
the same in both, so that its faults are found where it is held to loops in float64 that share no code with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experts import KINDS, LAYOUTS, SMALL, Fault, against_loops
from tests.gang import Gang
from tests.trainer.test_certify import certified

EXPERTS = "            _sum_gradients(layer.experts)"
WHERE = "if not place.is_replicate()"

# The fault -> its line, layout, kind and keys, and a finding of certification that must tell it.
CERTIFIED: dict[str, tuple[Fault, str, str, list[str], str]] = {
    "expert gradient times ep": (
        ("trainer.parallelize", EXPERTS, f"{EXPERTS}; layer.experts.set_gradient_divide_factor(1 / layout.ep)"),
        "fsdp4-ep2",
        "softmax",
        [],
        "gradient of blocks.0.moe.experts.w_down",
    ),
    "expert gradient over ep": (
        ("trainer.parallelize", EXPERTS, f"{EXPERTS}; layer.experts.set_gradient_divide_factor(layout.ep)"),
        "fsdp4-ep2",
        "softmax",
        [],
        "gradient of blocks.1.moe.experts.w_gate",
    ),
    "auxiliary denominator local": (
        ("trainer.routing", "return layout.global_batch_size if", "return layout.micro_batch_size if"),
        "fsdp4-ep2",
        "softmax",
        [],
        "gradient of blocks.0.moe.router.weight",
    ),
    "auxiliary loss detached": (
        ("trainer.routing", "balance = routing.balance / ", "balance = routing.balance.detach() / "),
        "fsdp4-ep2",
        "softmax",
        [],
        "gradient of blocks.0.moe.router.weight",
    ),
    "bias moved in forward": (
        (
            "models.moe",
            "        dropped = counts_BE.new_zeros(())\n",
            "        dropped = counts_BE.new_zeros(())\n"
            "        self.selection_bias += 0.01 * (counts_BE.sum(0).float().mean() - counts_BE.sum(0)).sign()\n",
        ),
        "fsdp4-ep2",
        "sigmoid",
        [],  # under activation checkpointing torch finds other shapes when it computes again
        "update of blocks.0.moe.selection_bias",
    ),
    "count reduction removed": (
        ("trainer.routing", "self._sums = runtime.sums(self._sums)", "self._sums = self._sums.double()"),
        "fsdp4-ep2",
        "sigmoid",
        [],
        "copies that differ",
    ),
    "norm without the expert mesh": (
        ("trainer.clip", WHERE, f"{WHERE} and mesh.mesh_dim_names[dim] != 'ep'"),
        "fsdp4-ep2",
        "softmax",
        [],
        "gradient norm",
    ),
    "norm counting replicas": (
        ("trainer.clip", WHERE, "if True"),
        "hsdp2x2-ep2",
        "softmax",
        [],
        "gradient norm",
    ),
    "expert-parallel ranks reading one stream": (
        (
            "trainer.loop",
            "batches.train(step - 1, runtime.data_rank, ",
            "batches.train(step - 1, runtime.data_rank // layout.ep * layout.ep, ",
        ),
        "fsdp4-ep2",
        "softmax",
        [],
        "loss",
    ),
}


@pytest.mark.parametrize("name", CERTIFIED)
def test_certification_finds_it(gang: Gang, paragraphs: Path, name: str) -> None:
    """In two steps of four ranks. Without a fault the same configs pass, in test_expert_parallel.py."""
    fault, layout, kind, keys, subject = CERTIFIED[name]
    world, layout_keys = LAYOUTS[layout]
    arguments = [f"data.corpus={paragraphs}", *SMALL, *KINDS[kind], *layout_keys, *keys]
    rows = gang.run(certified, arguments, fault, 2, world=world)[0]
    assert subject in [row.subject() for row in rows if not row.passed]


# The fault -> its line, kind, what is done to the weights, and whether it is the choices that differ, or gradients.
LOOPED: dict[str, tuple[Fault, str, str, bool]] = {
    "bias added to the gate": (
        (
            "models.moe",
            "weights_BTK = scores_BTE.gather(-1, chosen_BTK)",
            "weights_BTK = (scores_BTE + self.selection_bias).gather(-1, chosen_BTK)",
        ),
        "sigmoid",
        "steep, biased",
        False,
    ),
    "combine in bf16": (
        (
            "models.moe",
            "Combine.apply(arrival(), weights_NK, ",
            "Combine.apply(arrival().bfloat16(), weights_NK.bfloat16(), ",
        ),
        "softmax",
        "steep",
        False,
    ),
    "capacity off by one": (
        ("models.moe", "assigned_BTE.cumsum(1) <= max(1,", "assigned_BTE.cumsum(1) < max(1,"),
        "switch",
        "steep",
        True,
    ),
}


@pytest.mark.parametrize("name", LOOPED)
def test_the_loops_in_float64_find_it(gang: Gang, paragraphs: Path, name: str) -> None:
    """On two ranks, where without the fault choices are the same and gradients within 1e-5."""
    fault, kind, edit, chooses = LOOPED[name]
    tiny = ["data.seq_len=16", "train.global_batch_size=4", "train.micro_batch_size=2", "parallel.ep=2"]
    arguments = [f"data.corpus={paragraphs}", *KINDS[kind], *tiny]
    right = gang.run(against_loops, arguments, edit, world=2)[0]
    assert right.same_routing
    assert max(right.gradients.values()) < 1e-5
    wrong = gang.run(against_loops, arguments, edit, fault, world=2)[0]
    assert wrong.same_routing != chooses
    assert max(wrong.gradients.values()) > 1e-4
