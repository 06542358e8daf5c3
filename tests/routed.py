"""A layout against one plain process, and what the routers of both choose.

Shapes: B row, T position, K choice of a token, E expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from models.moe import MoE
from models.transformer import Transformer
from tests.experts import SMALL, Fault, Masked, edited
from tests.faults import one_line_fault
from tests.runs import TINY
from trainer.certify.findings import Finding

# Between two experts whose scores are nearer to one another than this, a near tie, rounding may decide.
TIE = 1e-5


class Routed(NamedTuple):
    """Tokens of all layers and steps whose choice was compared."""

    tokens: int
    differ: int
    """Whose experts differ although it is no near tie."""
    ties: int
    """That have a near tie; these are excused."""
    flipped: int
    """Of those, with other experts. They were sent to the plain process's, so that all the rest can be compared."""
    margin: float
    """Smallest gap between the last expert chosen and the first one not."""


class _Choices:
    """Remembers what the routers of one model choose, and holds another one's choices to it."""

    def __init__(self, layout: Any) -> None:
        self._layout, self._rank = layout, 0
        self._model: Transformer | None = None
        self._micro = -1
        self._seen: dict[tuple[int, int], Tensor] = {}  # of micro-batch and layer
        self._expected: dict[int, Tensor] | None = None  # of a layer, all rows of the global batch
        self._compared: dict[Any, Tensor] = {}
        self._step = 0

    def start(self, expected: dict[int, Tensor] | None, step: int, rank: int) -> None:
        self._expected, self._step, self._rank, self._micro = expected, step, rank, -1
        self._seen = {}

    def enter(self, model: Transformer) -> None:
        self._model, self._micro = model, self._micro + 1

    def seen(self, order: Any) -> dict[int, Tensor]:
        """Of each layer the choices of all rows; `order`: which rows were looked at one after the other."""
        by_layer: dict[int, Tensor] = {}
        for layer in {layer for _, layer in self._seen}:
            rows = torch.cat([self._seen[key] for key in sorted(self._seen) if key[1] == layer])
            by_layer[layer] = torch.empty_like(rows).index_copy_(0, torch.as_tensor(order), rows)
        return by_layer

    def choose(self, moe: MoE, scores_BTE: Tensor, chosen_BTK: Tensor, weights_BTK: Tensor) -> tuple[Tensor, Tensor]:
        """What a router has chosen, or what the other model did where that is a near tie.

        A router may be asked again for the same micro-batch, under activation checkpointing.
        """
        assert self._model is not None
        layer = self._model.expert_layers().index(moe)
        ours_BTK = chosen_BTK.sort(-1).values
        if self._expected is None:
            assert torch.equal(self._seen.setdefault((self._micro, layer), ours_BTK), ours_BTK)
            return chosen_BTK, weights_BTK
        rows = self._layout.micro_batch_size
        first = (self._rank * self._layout.accumulation + self._micro) * rows
        theirs_BTK = self._expected[layer][first : first + rows]
        wanted_BTE = scores_BTE.detach() + (moe.selection_bias if moe.moe.selection_bias else 0.0)
        best_BTE = wanted_BTE.sort(-1, descending=True).values
        k = moe.moe.top_k
        gap_BT = best_BTE[..., k - 1] - best_BTE[..., k]
        other_BT, tie_BT = (ours_BTK != theirs_BTK).any(-1), gap_BT < TIE
        counts = [tie_BT.numel(), (other_BT & ~tie_BT).sum(), tie_BT.sum(), (other_BT & tie_BT).sum()]
        key = self._step, self._micro, layer
        self._compared[key] = torch.tensor([*map(float, counts), float(gap_BT.min())], dtype=torch.float64)
        if (flipped_BT := other_BT & tie_BT).any():
            chosen_BTK = theirs_BTK.where(flipped_BT[..., None], chosen_BTK)
            weights_BTK = scores_BTE.gather(-1, chosen_BTK)
            if moe.moe.normalize:
                weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
            weights_BTK = weights_BTK * moe.moe.routed_scale
        return chosen_BTK, weights_BTK

    def result(self) -> Routed:
        """Of all ranks."""
        import torch.distributed as dist

        mine = torch.stack(list(self._compared.values()))
        counts, margin = mine[:, :4].sum(0), mine[:, 4].min()
        dist.all_reduce(counts)
        dist.all_reduce(margin, dist.ReduceOp.MIN)
        return Routed(*map(int, counts.tolist()), margin=float(margin))


@contextmanager
def _watched(choices: _Choices) -> Iterator[None]:
    forward, choose = Transformer.forward, MoE._choose

    def seen_forward(self: Transformer, *arguments: Any, **keys: Any) -> Any:
        choices.enter(self)
        return forward(self, *arguments, **keys)

    def seen_choose(self: MoE, scores_BTE: Tensor) -> tuple[Tensor, Tensor]:
        return choices.choose(self, scores_BTE, *choose(self, scores_BTE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transformer, "forward", seen_forward)
        patch.setattr(MoE, "_choose", seen_choose)
        yield


class Compared(NamedTuple):
    """Differences of a layout from one plain process, worst first (rank 0 has them), and of its routing."""

    findings: list[Finding]
    routed: Routed
    missing: list[str]
    """Parameters that this rank had no gradient of, not even zeros."""
    learning: list[int]
    """Experts of the last layer whose gradient was not zero in the last step."""

    def failed(self) -> list[str]:
        """What is beyond its tolerance."""
        return [f"{row.subject()}, step {row.step}: {row.difference:.1e}" for row in self.findings if not row.passed]

    def worst(self) -> dict[str, float]:
        """Of every quantity."""
        worst: dict[str, float] = {}
        for row in self.findings:
            worst[row.quantity] = max(worst.get(row.quantity, 0.0), row.difference)
        return worst


def against_one_process(
    overrides: Sequence[str], steps: int, edit: str = "as it starts", masked: bool = False, fault: Fault | None = None
) -> Compared:
    """In a rank: certify a config, with routing compared beside all that certification compares.

    Each step starts at the same weights in both, those of the layout.

    Args:
        edit: what is done to the weights and buffers of both before the first step.
        masked: whether masks are `uneven`.
        fault: a line that is wrong.
    """
    import torch.distributed as dist

    import trainer.certify.layout as module
    from trainer.certify.looking import weights, whole
    from trainer.certify.reference import Reference
    from trainer.config import load_config
    from trainer.layout import plan_layout
    from trainer.runtime import start_runtime

    config = load_config(TINY, [*SMALL, *overrides])
    with ExitStack() as stack:
        stack.enter_context(one_line_fault(*fault) if fault else nullcontext())
        runtime = stack.enter_context(start_runtime())
        choices = _Choices(plan_layout(config, runtime.world_size))
        stack.enter_context(_watched(choices))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        build, step_at, batches_of = module.build_engine, module.step_at, module.batches_of
        compare, missing, learning = module._compare_gradients, set(), []
        of_reference: list[Any] = [None]

        def build_edited(*arguments: Any) -> Any:
            engine = build(*arguments)
            edited(edit, weights(engine))
            return engine

        class Edited(Reference):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                edited(edit, self._state)

            def start_step(self, step: int) -> tuple[float, float]:
                choices.start(None, step, 0)
                numbers = super().start_step(step)
                order = self._micro_batches(config.train.global_batch_size, step).reshape(-1)
                of_reference[0] = choices.seen(order)
                return numbers

        def compared_step(step: int, *arguments: Any) -> Any:
            dist.broadcast_object_list(of_reference)
            choices.start(of_reference[0], step, runtime.rank)
            return step_at(step, *arguments)

        def seen_gradients(engine: Any, *arguments: Any) -> None:
            gradients = engine.gradients()
            missing.update(engine.parameters.keys() - gradients.keys())
            *_, last = (gradient for name, gradient in gradients.items() if name.endswith("experts.w_down"))
            learning[:] = whole(last).flatten(1).any(1).nonzero().flatten().tolist()
            compare(engine, *arguments)

        patch.setattr(module, "_compare_gradients", seen_gradients)
        patch.setattr(module, "build_engine", build_edited)
        patch.setattr(module, "Reference", Edited)
        patch.setattr(module, "step_at", compared_step)
        if masked:
            patch.setattr(module, "batches_of", lambda *arguments: Masked(batches_of(*arguments)))
        findings, _ = module.certify_layout(config, runtime, steps, False, lambda _: None)
        return Compared(findings.worst_first(), choices.result(), sorted(missing), learning)
