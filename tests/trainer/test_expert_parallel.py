"""A model with experts is the same model at every layout: routing, gradients, losses, copies; and what travels."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.packing import Batch
from models.moe import MoE
from tests.experts import CHECKPOINTING, KINDS, LAYOUTS, SMALL, Ran, against_loops, free_run
from tests.gang import Gang
from tests.routed import Compared, against_one_process
from tests.runs import relative_difference, started

PAD, ACCUMULATE = "data.packing=pad", "train.micro_batch_size=1"
FULL, SELECTIVE = CHECKPOINTING["full"], CHECKPOINTING["selective"]

# Each layout, kind of router and knob at least once; `make verify` has them all with one another. (layout, kind, keys)
CASES = {
    "a": ("fsdp4-ep4", "biases", [SELECTIVE, PAD]),
    "b": ("fsdp4-ep2", "sigmoid", [ACCUMULATE, FULL]),
    "c": ("hsdp2x2-ep2", "batch", ["train.micro_batch_size=2", FULL]),
    "d": ("ddp4", "softmax", [PAD, ACCUMULATE]),
    "e": ("fsdp4", "switch", [SELECTIVE]),
}


def hold(compared: Compared, kind: str, steps: int) -> None:
    """To the tolerances of certification: loss and norm 1e-6, gradients and updates 1e-5, the rest to the bit."""
    assert (compared.failed(), compared.missing) == ([], [])
    assert {row.quantity for row in compared.findings} >= {"initial weight", "loss", "gradient norm", "gradient"}
    assert any("experts.w_down" in row.parameter for row in compared.findings)
    assert any("selection_bias" in row.parameter for row in compared.findings) == (kind in ("sigmoid", "biases"))
    routed = compared.routed
    assert routed.tokens == steps * 2 * 16 * 32
    assert routed.differ == 0, routed
    assert routed.ties < 0.01 * routed.tokens, routed


@pytest.mark.parametrize("case", CASES)
def test_a_layout_is_the_plain_process(gang: Gang, paragraphs: Path, case: str) -> None:
    """Steps 1 to 3, each from equal weights. Measured: gradients 3e-7, norms 5e-9, losses 4e-8; 2 ties in 3,072."""
    layout, kind, keys = CASES[case]
    world, layout_keys = LAYOUTS[layout]
    arguments = [f"data.corpus={paragraphs}", *KINDS[kind], *layout_keys, *keys]
    hold(gang.run(against_one_process, arguments, 3, world=world)[0], kind, 3)


@pytest.mark.verify
def test_and_after_twenty_steps(gang: Gang, paragraphs: Path) -> None:
    world, keys = LAYOUTS["hsdp2x2-ep2"]
    arguments = [f"data.corpus={paragraphs}", *KINDS["sigmoid"], *keys, PAD]
    hold(gang.run(against_one_process, arguments, 20, world=world)[0], "sigmoid", 20)


def test_another_choice_is_noticed(gang: Gang, paragraphs: Path) -> None:
    """Of a rank whose tokens go to the experts that they like least."""
    where = "(1 if __import__('os').environ['RANK'] != '1' else -1)"
    fault = ("models.moe", "chosen_BTK = wanted_BTE.topk(", f"chosen_BTK = (wanted_BTE * {where}).topk(")
    world, keys = LAYOUTS["fsdp4-ep4"]
    arguments = [f"data.corpus={paragraphs}", *KINDS["softmax"], *keys]
    compared = gang.run(against_one_process, arguments, 1, "as it starts", False, fault, world=world)[0]
    assert 0.9 * 2 * 128 < compared.routed.differ <= 2 * 128
    assert any(name.startswith("gradient of blocks.0.moe.router.weight") for name in compared.failed())


@pytest.mark.parametrize(
    ("layout", "kind", "edit", "masked"),
    [
        ("fsdp4-ep4", "biases", "one expert", False),
        ("fsdp4-ep4", "biases", "dead experts", False),
        ("hsdp2x2-ep2", "sigmoid", "as it starts", True),
    ],
)
def test_nothing_to_send(gang: Gang, paragraphs: Path, layout: str, kind: str, edit: str, masked: bool) -> None:
    """All tokens go to one expert, or none to those of a rank; a rank has no target that counts."""
    world, keys = LAYOUTS[layout]
    arguments = [f"data.corpus={paragraphs}", *KINDS[kind], *keys]
    if edit == "one expert":
        arguments += ["model.moe.top_k=1", "model.moe.normalize=false"]
    gang.run(int, world=world)  # the time is for the steps, and not for the start of processes
    compared = gang.run(against_one_process, arguments, 2, edit, masked, world=world, timeout=60)[0]
    hold(compared, kind, 2)
    assert compared.learning == {"one expert": [5], "dead experts": [0, 1, 4, 5, 6, 7]}.get(edit, [*range(8)])


# ------------------------------------------------------------------------------------------------------- float64 loops


@pytest.mark.parametrize(
    ("layout", "kind", "edit", "seed"),
    [
        ("hsdp2x2-ep2", "softmax", "steep, one dead", 0),
        ("fsdp4-ep4", "sigmoid", "steep, a rank dead", 1),
        ("fsdp4-ep2", "switch", "steep", 2),
    ],
)
def test_gradients_are_those_of_loops_in_float64(
    gang: Gang, paragraphs: Path, layout: str, kind: str, edit: str, seed: int
) -> None:
    """Router weights times 20, dead experts, uneven masks and a rank without targets. `make verify` has more seeds.

    A dead expert's gradient is zero, and not missing. Measured: 4e-6, of the keys' weights; of experts 1e-6.
    """
    world, keys = LAYOUTS[layout]
    tiny = ["data.seq_len=16", "train.global_batch_size=4", "train.micro_batch_size=1", f"run.seed={seed}"]
    dead = ["model.moe.selection_bias=true"] if "dead" in edit else []
    arguments = [f"data.corpus={paragraphs}", *KINDS[kind], *dead, *keys, *tiny]
    ranks = gang.run(against_loops, arguments, edit, world=world)
    assert [rank.missing for rank in ranks] == [[]] * world
    looped = ranks[0]
    assert looped.same_routing, f"another choice than in float64, where the margin is {looped.margin:.1e}"
    assert (looped.idle > 0, looped.dropped > 0) == ("dead" in edit, kind == "switch")
    assert looped.loss < 1e-6
    assert {name: d for name, d in looped.gradients.items() if d >= 1e-5} == {}, f"margin {looped.margin:.1e}"
    assert len(looped.gradients) > 20


# ---------------------------------------------------------------------------------------------------------- free steps

STEPS = 20
CLIP = "train.grad_clip=0.2"
FREE = {
    "one": ("one", []),
    "ep4": ("fsdp4-ep4", []),
    "HSDP, ep2, accumulation": ("hsdp2x2-ep2", [FULL, "train.micro_batch_size=2"]),
    "ddp": ("ddp4", []),
}


@pytest.fixture(scope="module")
def free(gang: Gang, paragraphs: Path) -> dict[str, list[Ran]]:
    """What each rank saw of 20 steps in a row, whose gradients are all clipped."""
    runs = {}
    for name, (layout, keys) in FREE.items():
        world, layout_keys = LAYOUTS[layout]
        arguments = [f"data.corpus={paragraphs}", *KINDS["sigmoid"], *layout_keys, *keys, CLIP]
        runs[name] = gang.run(free_run, arguments, STEPS, world=world)
    return runs


@pytest.mark.parametrize("name", [name for name in FREE if name != "one"])
def test_free_steps(free: dict[str, list[Ran]], name: str) -> None:
    """Losses to 1e-5 over 20 steps; norms to 1e-3, as near ties may make them jump, also between accumulations.

    Measured: losses 7e-8, norms 2e-6.
    """
    ours, (plain,) = free[name][0], free["one"]
    for key, tolerance in {"loss": 1e-5, "aux_loss": 1e-5, "z_loss": 1e-5, "grad_norm": 1e-3}.items():
        pairs = list(zip(getattr(ours, key), getattr(plain, key), strict=True))
        assert len(pairs) == STEPS
        assert max(relative_difference(*pair) for pair in pairs) < tolerance, key
    assert plain.loss[-1] < plain.loss[0] - 0.3
    assert plain.aux_loss[0] > 1.0


def test_the_selection_bias_has_moved_as_often_everywhere(free: dict[str, list[Ran]]) -> None:
    """An expert's bias is a number of moves times the rate, the same at every layout and on every rank."""
    expected = free["one"][0].bias[:10]
    moves = [[round(bias / 0.01) for bias in layer] for layer in expected[-1]]
    assert len({abs(n) for layer in moves for n in layer}) > 2
    assert all(abs(n) <= 10 for layer in moves for n in layer)
    for name, ranks in free.items():
        for rank in ranks:
            assert rank.bias[:10] == expected, name
    assert expected[-1] == [[pytest.approx(0.01 * n, abs=1e-7) for n in layer] for layer in moves]


@pytest.mark.parametrize("name", [name for name in FREE if name != "one"])
def test_copies_stay_the_same_to_the_bit(free: dict[str, list[Ran]], name: str) -> None:
    """What several ranks hold is the same on all during 20 clipped steps, and so is the norm they clip by."""
    for rank in free[name]:
        assert rank.copies_that_differ == [0] * (STEPS // 5)
        assert rank.grad_norm == free[name][0].grad_norm
        assert min(rank.grad_norm) > float(CLIP.split("=")[1])


def gate_weights(bias: float) -> tuple[Tensor, Tensor, bool]:
    """The choice and the gate weights of a layer, and whether its selection bias is something to learn."""
    from tests.models.test_moe import GLM, make

    layer, chosen = make(GLM), []
    layer.selection_bias.zero_()[2] = bias

    def seen_choose(scores_BTE: Tensor) -> tuple[Tensor, Tensor]:
        chosen.append(MoE._choose(layer, scores_BTE))
        return chosen[0]

    layer._choose = seen_choose  # type: ignore[method-assign]
    y_BTD, routing = layer(torch.randn(3, 10, 16, generator=torch.Generator().manual_seed(1)))
    (y_BTD.sum() + routing.balance + routing.z).backward()
    return *chosen[0], layer.selection_bias.requires_grad or layer.selection_bias.grad is not None


def test_the_selection_bias_selects_and_no_more() -> None:
    """Where it does not change the choice, it does not change the weights either."""
    (plain, plain_weights, _), (chosen, weights, learns) = gate_weights(0.0), gate_weights(0.1)
    same = (plain.sort(-1).values == chosen.sort(-1).values).all(-1)
    assert 0.3 < same.float().mean() < 1.0
    assert torch.equal(weights[same].sort(-1).values, plain_weights[same].sort(-1).values)
    assert not learns


# ------------------------------------------------------------------------------------------------------- what travels


class Traffic(TorchDispatchMode):
    """Bytes that this rank gives to others in all-to-all messages, call by call, and those of all other collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.counts: list[int] = []
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "all_to_all" in name or "alltoall" in name:
            assert name == "_c10d_functional.all_to_all_single.default", name
            x, _, sizes, group_name = args
            group = torch._C._distributed_c10d._resolve_process_group(group_name)
            sizes = list(sizes)
            sizes.pop(dist.get_rank(group))
            row = x[:1].nbytes
            (self.tokens if x.is_floating_point() else self.counts).append(sum(sizes) * row)
        elif "c10d" in name and "wait" not in name and "wrap" not in name:
            self.others[name] += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return function(*args, **(kwargs or {}))


class Moved(NamedTuple):
    """Of two steps: one of rows, and one of their first halves."""

    tokens: list[list[int]]
    counts: list[list[int]]
    others: list[dict[str, int]]
    resident: float
    """Bytes of experts on this rank over those of all experts."""
    state: float
    """The same of the optimizer's state."""


def moved(overrides: list[str]) -> Moved:
    """In a rank: steps in which each expert gets as many tokens from each rank."""
    from trainer.loop import train_step

    def evenly(self: MoE, scores_BTE: Tensor) -> tuple[Tensor, Tensor]:
        b, t, e = scores_BTE.shape
        chosen_BTK = torch.arange(b * t * self.moe.top_k).remainder(e).view(b, t, -1)
        return chosen_BTK, scores_BTE.gather(-1, chosen_BTK)

    traffics = []
    with pytest.MonkeyPatch.context() as patch, started([*SMALL, *overrides]) as here:
        patch.setattr(MoE, "_choose", evenly)
        whole = here.batch(0)
        for length in (32, 16):
            batch = Batch(whole.tokens[:, :length], whole.targets[:, :length], whole.mask[:, :length])
            with Traffic() as traffic:
                train_step(here.engine, batch, here.layout, here.runtime, 1.0, here.config.model.moe)
            traffics.append(traffic)

        def share(prefix: str) -> float:
            state = here.engine.state_dict().items()
            kept = [t for name, t in state if name.startswith(prefix) and ".experts." in name and t.ndim > 1]
            return sum(t.to_local().untyped_storage().nbytes() for t in kept) / sum(4 * t.numel() for t in kept)

        shares = share("model."), share("optim.")
    return Moved([t.tokens for t in traffics], [t.counts for t in traffics], [t.others for t in traffics], *shares)


@pytest.mark.parametrize(
    ("layout", "keys", "passes", "size"),
    [
        ("fsdp4-ep2", [], 4, 4),
        ("fsdp4-ep4", [FULL], 6, 4),
        ("hsdp2x2-ep2", [SELECTIVE, "train.precision=bf16"], 4, 2),
    ],
)
def test_what_travels(gang: Gang, paragraphs: Path, layout: str, keys: list[str], passes: int, size: int) -> None:
    """Each token to k experts and back, forward and backward, and again where a block is computed again; no more.

    Of other collectives nothing grows with the number of tokens: none gathers them. And each rank keeps its share.
    """
    world, layout_keys = LAYOUTS[layout]
    arguments = [f"data.corpus={paragraphs}", *KINDS["softmax"], *layout_keys, *keys]
    ep, efsdp, n_layers, k, d = int(layout[-1]), 2 if layout == "fsdp4-ep2" else 1, 2, 2, 64
    for rank in gang.run(moved, arguments, world=world):
        for tokens, n in zip(rank.tokens, (4 * 32, 4 * 16), strict=True):
            assert tokens == [n * k * d * size * (ep - 1) // ep] * passes * n_layers
        # How many go to each expert is told once a layer, and once more where that is computed again.
        assert rank.counts == [[8 * 4 * (ep - 1) // ep] * (passes // 2 - 1) * n_layers] * 2
        assert rank.others[0] == rank.others[1]
        assert sum(rank.others[0].values()) > 0
        assert rank.resident == pytest.approx(1 / (ep * efsdp), rel=0.01)
        assert rank.state == pytest.approx(1 / (ep * efsdp), rel=0.01)


def samples(overrides: list[str]) -> list[int]:
    """In a rank: the numbers of the samples that a step reads."""
    from data.streams import Stream
    from trainer.loop import step_at

    read: list[int] = []
    ids = Stream.ids

    def seen(self: Stream, first: int, count: int) -> Any:
        numbers = ids(self, first, count)
        read.extend(numbers.tolist())
        return numbers

    with pytest.MonkeyPatch.context() as patch, started([*SMALL, *overrides]) as here:
        patch.setattr(Stream, "ids", seen)
        step_at(1, here.engine, here.batches, here.layout, here.runtime, here.config)
    return read


def test_ranks_read_samples_of_their_own(gang: Gang, paragraphs: Path) -> None:
    """Of 16, each of four ranks reads four, and together they read those of one process, in its order."""
    arguments = [f"data.corpus={paragraphs}", *KINDS["softmax"]]
    (expected,) = gang.run(samples, arguments, world=1)
    ranks = gang.run(samples, [*arguments, *LAYOUTS["hsdp2x2-ep2"][1]], world=4)
    assert [len(rank) for rank in ranks] == [4] * 4
    assert list(chain(*ranks)) == expected
    assert len(set(expected)) == 16
