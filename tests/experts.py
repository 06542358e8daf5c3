"""Models with experts for tests of layouts: their configs, and tools that run in a rank of the gang.

Shapes: B row, T position, K choice of a token, E expert, L layer with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from data.packing import Batch
from models.moe import MoE
from models.transformer import Transformer
from tests.faults import one_line_fault
from tests.runs import started

Fault = tuple[str, str, str]  # module, the line as it stands, as it would be wrong

# 512 tokens a step, or as many as are in its paragraphs. The learning rate moves weights visibly in a few steps.
SMALL = [
    "data.seq_len=32",
    "train.global_batch_size=16",
    "train.micro_batch_size=4",
    "schedule.warmup_steps=4",
    "eval.batches=0",
]
# What a model's routers are like: keys of model.moe, and others.
_MOE = "n_experts: 8, d_ff: 32, aux_loss_coef: 0.1, z_loss_coef: 0.01"
KINDS: dict[str, list[str]] = {
    "softmax": [f"model.moe={{{_MOE}}}"],
    "sigmoid": [
        f"model.moe={{{_MOE}, router: sigmoid, bias_update_rate: 0.01, n_shared_experts: 1, routed_scale: 2.5}}"
    ],
    "switch": [f"model.moe={{{_MOE}, top_k: 1, normalize: false, capacity_factor: 1.0}}", "model.activation=relu"],
    "biases": [
        f"model.moe={{{_MOE}, top_k: 4, router_bias: true, selection_bias: true}}",
        "model.activation=swiglu_clamped",
        "model.mlp_bias=true",
    ],
    "batch": [f"model.moe={{{_MOE}, aux_loss_over: batch}}"],
}
# name -> (ranks, keys)
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "fsdp4": (4, []),
    "fsdp4-ep2": (4, ["parallel.ep=2"]),
    "fsdp4-ep4": (4, ["parallel.ep=4"]),
    "hsdp2x2-ep2": (4, ["parallel.dp_replicate=2", "parallel.ep=2"]),
    "ddp4": (4, ["parallel.engine=ddp"]),
}
CHECKPOINTING = {kind: f"train.activation_checkpointing={kind}" for kind in ("none", "full", "selective")}


# --------------------------------------------------------------------------------------- what a test changes in a model


def steep_routers(state: dict[str, Tensor]) -> None:
    """Router weights times 20, so that gate weights are far from even ones."""
    for name, tensor in state.items():
        if name.endswith("router.weight"):
            tensor.detach().mul_(20.0)


def biased(*experts: int, by: float) -> Callable[[dict[str, Tensor]], None]:
    """All tokens go to these experts, or none does."""

    def edit(state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            if name.endswith("selection_bias"):
                tensor.zero_()[list(experts)] = by

    return edit


def differently_biased(state: dict[str, Tensor]) -> None:
    """Each expert has its own selection bias."""
    for name, tensor in state.items():
        if name.endswith("selection_bias"):
            tensor.copy_(0.1 * torch.arange(len(tensor)).cos())


_EDITS: dict[str, list[Callable[[dict[str, Tensor]], None]]] = {
    "as it starts": [],
    "one expert": [biased(5, by=9.0)],
    "dead experts": [biased(2, 3, by=-9.0)],  # of four ranks, the second one's
    "steep": [steep_routers],
    "steep, biased": [steep_routers, differently_biased],
    "steep, one dead": [steep_routers, biased(3, by=-9.0)],
    "steep, a rank dead": [steep_routers, biased(2, 3, by=-9.0)],
}


def edited(name: str, state: dict[str, Tensor]) -> None:
    """Change weights or buffers in place, plain or distributed ones alike."""
    for edit in _EDITS[name]:
        edit(state)


def uneven(mask: Any) -> None:
    """Mask a global batch in place: its first quarter, which of four ranks is one's, and more or less of other rows."""
    rows, length = mask.shape
    for row in range(rows):
        mask[row, 0 if row < rows // 4 else length - 5 * row % length :] = False


class Masked:
    """A feed with other masks."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def train(self, step: int, rank: int, world: int) -> Batch:
        batch = self._inner.train(step, 0, 1)
        uneven(batch.mask)
        n = len(batch.mask) // world
        mine = slice(rank * n, (rank + 1) * n)
        assert batch.documents is None
        return Batch(batch.tokens[mine], batch.targets[mine], batch.mask[mine])


# ------------------------------------------------------------------------------------------------------- free steps


class Ran(NamedTuple):
    """What some steps of a config gave, each from where the one before it ended."""

    loss: list[float]
    grad_norm: list[float]
    aux_loss: list[float]
    z_loss: list[float]
    bias: list[list[list[float]]]
    """Of each step, layer and expert the selection bias, where there is one."""
    copies_that_differ: list[int]
    """Of every fifth step."""


def free_run(overrides: Sequence[str], steps: int) -> Ran:
    """In a rank: train, and look at all that other ranks hold copies of."""
    from trainer.certify.copies import copies_that_differ
    from trainer.certify.looking import weights
    from trainer.loop import step_at

    ran = Ran([], [], [], [], [], [])
    with started([*SMALL, *overrides]) as here:
        for step in range(1, steps + 1):
            result = step_at(step, here.engine, here.batches, here.layout, here.runtime, here.config)
            ran.loss.append(result.loss)
            ran.grad_norm.append(result.grad_norm)
            ran.aux_loss.append(result.routing["aux_loss"])
            ran.z_loss.append(result.routing["z_loss"])
            live = weights(here.engine)
            ran.bias.append([t.tolist() for name, t in live.items() if name.endswith("selection_bias")])
            if step % 5 == 0:
                ran.copies_that_differ.append(copies_that_differ(live) if here.runtime.world_size > 1 else 0)
    return ran


# ----------------------------------------------------------------------------------------- against loops over experts


class Looped(NamedTuple):
    """A step of a layout against the loops of moe_reference.py in float64. Rank 0 has the numbers."""

    same_routing: bool
    margin: float
    """Smallest gap between the last expert chosen and the first one not, in the loops."""
    dropped: int
    idle: int
    """Experts that no token went to."""
    loss: float
    """Relative difference."""
    gradients: dict[str, float]
    """Relative differences, those of tensors under 1e-6 of the whole norm relative to that."""
    missing: list[str]
    """Parameters that this rank has no gradient of."""


def against_loops(overrides: Sequence[str], edit: str, fault: Fault | None = None) -> Looped:
    """In a rank: one step with uneven masks, whose gradients are held to those of a model in float64 on rank 0.

    That model's layers with experts are loops over tokens and experts which share no code with ours; see
    tests/models/moe_reference.py. The rest of it is ours.
    """
    import torch.distributed as dist

    from trainer.certify.looking import weights, whole
    from trainer.looking import looked_at

    sent: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(one_line_fault(*fault) if fault else nullcontext())
        here = stack.enter_context(started(overrides))
        engine, runtime, moe = here.engine, here.runtime, here.config.model.moe
        assert moe is not None
        edited(edit, weights(engine))
        state = {name: whole(tensor).double() for name, tensor in weights(engine).items()}
        gradients: dict[str, Tensor] = {}
        missing: list[str] = []

        def look() -> None:
            ours = engine.gradients()
            missing.extend(name for name in engine.parameters if name not in ours)
            gradients.update({name: whole(gradient).double() for name, gradient in ours.items()})

        def seen_mix(self: MoE, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, whole: bool) -> Tensor:
            sent.append(chosen_NK.tolist())
            return mix(self, x_ND, chosen_NK, weights_NK, whole=whole)

        mix = MoE.mix
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(MoE, "mix", seen_mix)
        feed = Masked(here.batches)
        assert here.layout.accumulation == 1
        with looked_at(engine, look):
            from trainer.loop import train_step

            batch = feed.train(0, runtime.rank, runtime.world_size)
            result = train_step(engine, batch, here.layout, runtime, None, moe)
        everyone: list[Any] = [None] * runtime.world_size
        dist.all_gather_object(everyone, sent)
        if not runtime.is_main:
            return Looped(True, 0.0, 0, 0, 0.0, {}, missing)
        n_layers = len(everyone[0])
        ours = [[token for rank in everyone for token in rank[layer]] for layer in range(n_layers)]
        return _held_to_loops(engine.model.config, state, feed.train(0, 0, 1), ours, result.loss, gradients, missing)


def _held_to_loops(
    config: Any,
    state: dict[str, Tensor],
    batch: Batch,
    ours: list[Any],
    loss: float,
    gradients: dict[str, Tensor],
    missing: list[str],
) -> Looped:
    from models.moe import Routing
    from tests.models import moe_reference

    model, answers = Transformer(config).double(), []
    model.load_state_dict(state)
    for layer in model.expert_layers():

        def loops(x_BTD: Tensor, counted_BT: Tensor, drop: bool, layer: MoE = layer) -> tuple[Tensor, Routing]:
            tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
            answer = moe_reference.answer(tensors, config, x_BTD, counted_BT.tolist(), drop)
            answers.append(answer)
            return answer.y, Routing(answer.balance, answer.z, torch.tensor(answer.counts), torch.tensor(0))

        layer.forward = loops  # type: ignore[method-assign, assignment]
    tokens, targets, mask = (torch.from_numpy(part) for part in (batch.tokens, batch.targets, batch.mask))
    losses = model(tokens, targets, mask)
    n_valid, n_rows = int(mask.sum()), len(mask)
    cross_entropy = losses.cross_entropy / n_valid
    balance = config.moe.aux_loss_coef * losses.routing.balance + config.moe.z_loss_coef * losses.routing.z
    (cross_entropy + balance / n_rows).backward()
    exact = {name: p.grad for name, p in model.named_parameters()}
    total = sum(float(g.square().sum()) for g in exact.values() if g is not None) ** 0.5

    def difference(name: str, want: Tensor | None) -> float:
        want = torch.zeros_like(state[name]) if want is None else want
        error, size = float((gradients[name] - want).norm()), max(float(want.norm()), 1e-6 * total)
        return error / size

    return Looped(
        same_routing=ours == [answer.sent for answer in answers],
        margin=min(answer.margin for answer in answers),
        dropped=sum(answer.dropped for answer in answers),
        idle=sum(
            not any(e in token for token in answer.sent) for answer in answers for e in range(config.moe.n_experts)
        ),
        loss=abs(loss - float(cross_entropy)) / float(cross_entropy),
        gradients={name: difference(name, want) for name, want in exact.items() if name in gradients},
        missing=missing,
    )
