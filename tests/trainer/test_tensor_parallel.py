"""Ranks that share matrices, vocabulary and rows compute what one process computes, send what the formula says, and
keep less."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from tests.gang import Gang
from tests.runs import TINY, losses_and_norms, read_state, started, train_worker
from tests.trainer.test_certify import Fault, certified, worst_of
from trainer.config import load_config
from trainer.layout import plan_layout
from trainer.rundir import RunDirectory

MOE = "model.moe={n_experts: 4, d_ff: 32, n_shared_experts: 1, capacity_factor: 1.0, bias_update_rate: 0.01}"
# name -> (ranks, keys)
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp 2, fsdp 2, uneven masks": (4, ["parallel.tp=2", "data.packing=pad"]),
    "tp 4, accumulation": (4, ["parallel.tp=4", "model.n_kv_heads=4", "train.micro_batch_size=4"]),
    "tp 2, HSDP, recomputed": (
        4,
        ["parallel.tp=2", "parallel.dp_replicate=2", "train.activation_checkpointing=full"],
    ),
    "tp 2, ep 2": (4, ["parallel.tp=2", "parallel.ep=2", MOE]),
    "tp 2, ep 4, load of all ranks, selective": (
        4,
        [
            "parallel.tp=2",
            "parallel.ep=4",
            f"{MOE[:-1]}, aux_loss_over: batch}}",
            "train.activation_checkpointing=selective",
        ],
    ),
    "tp 2, no ep, documents kept apart": (4, ["parallel.tp=2", MOE, "data.document_mask=true"]),
    "biases, learned positions, tied": (
        2,
        [
            *("parallel.tp=2", "model.position=learned", "model.norm=layernorm", "model.norm_bias=true"),
            *("model.attention_out_bias=true", "model.mlp_bias=true", "model.tie_embeddings=true"),
        ],
    ),
    "relative positions, sinks, caps, all norms": (
        2,
        [
            *("parallel.tp=2", "model.position=relative", "model.attention_sinks=true", "model.attention_softcap=5"),
            *("model.qk_norm=true", "model.norm_placement=both", "model.logit_softcap=3"),
        ],
    ),
}


# In CI the command of docs/parallelism.md certifies the first of these, see tests/docs/test_parallelism_page.py; of the
# others every part is in a layout that CI has too.
LONG = ("tp 2, ep 2", "tp 2, HSDP, recomputed", "tp 2, no ep, documents kept apart")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.verify] * (name in LONG)) for name in LAYOUTS])
def test_layouts_are_certified(gang: Gang, paragraphs: Path, name: str) -> None:
    world, keys = LAYOUTS[name]
    rows = gang.run(certified, [f"data.corpus={paragraphs}", *keys], None, 2, world=world, timeout=240)[0]
    assert [row.subject() for row in rows if not row.passed] == []
    assert worst_of(rows)["gradient"] < 5e-6


# The fault -> the line as it stands and as it would be wrong, and a finding that must tell it.
FAULTS: dict[str, tuple[Fault, str]] = {
    "missing all-reduce": (
        (
            "trainer.tensors",
            "sums_N, targets_of_all_N = _Total.apply(shares_2N, group)",
            "sums_N, targets_of_all_N = shares_2N",
        ),
        "loss",
    ),
    "missing sum over ranks of a copy's gradient": (
        ("trainer.tensors", "[Partial() if place.is_replicate() else place]", "[place]"),
        "gradient of blocks.0.attention_norm.weight",
    ),
    "doubled bias": (
        ("trainer.tensors", "return y_BTD if linear.bias is None else y_BTD + ", "return y_BTD + mesh.size() * "),
        "gradient of blocks.0.attention.wo.bias",
    ),
    "wrong vocabulary shard": (
        ("trainer.tensors", "tokens - group.rank() * len(weight_VD)", "tokens - (1 - group.rank()) * len(weight_VD)"),
        "loss",
    ),
    "every rank takes the first part of the positions": (
        ("trainer.tensors", "x.chunk(group.size(), dim)[group.rank()]", "x.chunk(group.size(), dim)[0]"),
        "gradient of position_embedding.weight",
    ),
    "ranks of a group read rows of their own": (
        (
            "trainer.loop",
            "(step - 1, runtime.data_rank, runtime",
            "(step - 1, runtime.rank % runtime.data_ranks, runtime",
        ),
        "loss",
    ),
}


IN_CI = ("missing all-reduce", "wrong vocabulary shard", "ranks of a group read rows of their own")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.verify] * (name not in IN_CI)) for name in FAULTS]
)
def test_faults_are_found(gang: Gang, paragraphs: Path, name: str) -> None:
    fault, subject = FAULTS[name]
    keys = [f"data.corpus={paragraphs}", "parallel.tp=2", "model.attention_bias=true", "model.mlp_bias=true"]
    keys += ["model.position=learned", "model.init_std=0.2"]
    world = 4 if "rows" in name else 2
    rows = gang.run(certified, keys, fault, 1, world=world, timeout=240)[0]
    assert subject in [row.subject() for row in rows if not row.passed]


class Sent(TorchDispatchMode):
    """Bytes that go into every kind of collective, as the tensors that ranks hold together."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self._size = size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        kind = name.split(".")[1] if name.startswith("_c10d_functional.") else ""
        if kind in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            whole = args[0].nbytes * (self._size if kind == "all_gather_into_tensor" else 1)
            self.bytes[kind] += whole
        return function(*args, **(kwargs or {}))


def collectives(keys: list[str]) -> dict[str, int]:
    """In a rank: bytes of the collectives of a forward and backward pass of one micro-batch."""
    with started(keys) as here:
        batch = here.batches.train(0, 0, here.runtime.data_ranks)
        tokens, targets = (torch.from_numpy(a[:2]) for a in (batch.tokens, batch.targets))
        with Sent(here.layout.tp) as sent:
            here.engine.micro_backward(here.engine.model(tokens, targets).cross_entropy, last=True)
    return dict(sent.bytes)


# The formula does not know how many ranks share.
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.verify)])
def test_a_layer_sends_what_the_formula_says(gang: Gang, corpus: Path, tp: int) -> None:
    """Forward, two gatherings and two scatterings of B T D numbers, and backward as many; recomputing, all forward ones
    once more but the last scattering, whose result is not asked for. And the gradients of two norms are added up."""
    keys = [f"data.corpus={corpus}", f"parallel.tp={tp}", "model.n_kv_heads=4", "parallel.dp_shard=1"]
    numbers = 2 * 64 * 64 * 4  # bytes of B T D in fp32

    def of_a_layer(*more: str) -> dict[str, int]:
        three, two = (gang.run(collectives, [*keys, *more, f"model.n_layers={n}"], world=tp)[0] for n in (3, 2))
        assert three.keys() == two.keys()
        return {kind: three[kind] - two[kind] for kind in three if three[kind] != two[kind]}

    norms = {"all_reduce": 2 * 64 * 4}
    assert of_a_layer() == {"all_gather_into_tensor": 4 * numbers, "reduce_scatter_tensor": 4 * numbers, **norms}
    recomputed = of_a_layer("train.activation_checkpointing=full")
    assert recomputed == {"all_gather_into_tensor": 6 * numbers, "reduce_scatter_tensor": 5 * numbers, **norms}


def kept(keys: list[str]) -> int:
    """In a rank: bytes that a forward pass keeps for the backward pass, parameters left out."""
    with started(keys) as here:
        batch = here.batches.train(0, 0, here.runtime.data_ranks)
        tokens, targets = (torch.from_numpy(a[:2]) for a in (batch.tokens, batch.targets))
        known = {p.data_ptr() for p in here.engine.model.parameters()}
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if local.data_ptr() not in known and local.dtype.is_floating_point:
                sizes[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            here.engine.model(tokens, targets)
    return sum(sizes.values())


def test_less_is_kept(gang: Gang, corpus: Path) -> None:
    """What lies between blocks is shared exactly: with checkpointing a block keeps its part of the rows and no more."""
    keys = [f"data.corpus={corpus}", "model.n_kv_heads=4", "parallel.dp_shard=1"]

    def of_a_layer(tp: int, *more: str) -> int:
        words = [*keys, f"parallel.tp={tp}", *more]
        return (
            gang.run(kept, [*words, "model.n_layers=3"], world=tp)[0]
            - gang.run(kept, [*words, "model.n_layers=2"], world=tp)[0]
        )

    alone, two, four = (of_a_layer(tp) for tp in (1, 2, 4))
    assert four < two < 0.75 * alone
    full = "train.activation_checkpointing=full"
    assert of_a_layer(2, full) * 2 == of_a_layer(4, full) * 4 == of_a_layer(1, full)


@pytest.mark.parametrize(
    "layouts",
    [
        (("tp1", 1, 1), ("fsdp", 2, 1)),
        pytest.param((("tp4", 4, 4),), marks=pytest.mark.verify),
    ],
    ids=["fewer", "more"],
)
def test_resumed_at_another_tp(
    gang: Gang, corpus: Path, tmp_path: Path, layouts: tuple[tuple[str, int, int], ...]
) -> None:
    """Saved at tp 2, resumed at tp 1, at tp 4 and under fsdp alone: losses as of an unbroken run in one process, and as
    many tokens seen."""
    keys = [TINY, f"data.corpus={corpus}", "model.n_kv_heads=4", "schedule.warmup_steps=4", "eval.batches=0"]
    keys += ["train.steps=8", "checkpoint.every=4", "train.global_batch_size=16"]

    def run(name: str, world: int, *more: str) -> RunDirectory:
        folder = tmp_path / name
        assert gang.run(train_worker, [*keys, f"run.dir={folder}", *more], world=world) == [0] * world
        return RunDirectory(folder / "tiny")

    unbroken = run("unbroken", 1)
    half = run("half", 4, "parallel.tp=2", "train.steps=4")
    for name, world, tp in layouts:
        shutil.copytree(half.path, tmp_path / name / "tiny")
        resumed = run(name, world, f"parallel.tp={tp}")
        pairs = zip(losses_and_norms(resumed), losses_and_norms(unbroken), strict=True)
        assert max(abs(a[0] - b[0]) / b[0] for a, b in pairs) < 1e-5
        rows, others = ([r["tokens"] for r in d.read_metrics() if "loss" in r] for d in (resumed, unbroken))
        assert rows == others
        ours, theirs = (read_state(d.checkpoint(8)) for d in (resumed, unbroken))
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            if key.startswith("model."):
                assert (ours[key] - value).norm() <= 1e-4 * value.norm(), key


@pytest.mark.parametrize(
    ("keys", "world", "message"),
    [
        (["parallel.tp=3"], 3, "'parallel.tp' (3) does not divide 'model.n_heads' (4); set model.n_heads=6"),
        (["parallel.tp=4"], 4, "does not divide 'model.n_kv_heads' (2); set model.n_kv_heads=a multiple of it"),
        (["parallel.tp=2", "model.d_ff=127"], 2, "'model.d_ff' (127); set model.d_ff=128"),
        (["parallel.tp=2", "model.vocab_size=513"], 2, "'model.vocab_size' (513); set model.vocab_size=514"),
        (["parallel.tp=2", "data.seq_len=63"], 2, "'data.seq_len' (63); set data.seq_len=64"),
        (["parallel.tp=2"], 3, "'parallel.tp' (2) does not divide the 3 processes"),
        (["parallel.tp=2", "parallel.dp_shard=4"], 4, "but there are 2 processes (groups of 2, by parallel.tp)"),
        (["parallel.tp=2", "parallel.engine=ddp"], 2, "engine ddp replicates everything; remove tp"),
    ],
)
def test_wrong_input_is_one_line(keys: list[str], world: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_layout(load_config(TINY, keys), world)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tp_over_machines_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(UserError, match=r"does not divide the 1 processes of a machine.*tp_across_nodes=true"):
        plan_layout(load_config(TINY, ["parallel.tp=2"]), 2)
    assert plan_layout(load_config(TINY, ["parallel.tp=2", "parallel.tp_across_nodes=true"]), 2).tp == 2
