"""A config's layout against one plain process, at identical weights, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError
from common.machine import available_memory
from models.config import ModelConfig
from trainer.build import build_engine
from trainer.certify.copies import copies_that_differ
from trainer.certify.findings import Findings, relative
from trainer.certify.fit import model_that_fits
from trainer.certify.looking import weights, whole
from trainer.certify.reference import Reference
from trainer.compiled import compiled_graphs
from trainer.config import TrainingConfig
from trainer.determinism import fresh_memory_is_nan
from trainer.engines.base import Engine
from trainer.layout import Layout, plan_layout
from trainer.looking import looked_at
from trainer.loop import step_at
from trainer.rundata import batches_of, open_run_data
from trainer.runtime import Runtime

Say = Callable[[str], None]


def certify_layout(
    config: TrainingConfig, runtime: Runtime, steps: int, may_shrink: bool, say: Say
) -> tuple[Findings, ModelConfig]:
    """Run the first `steps` steps of a config on all ranks, and on rank 0 beside them as one plain process.

    Both start a step at identical weights, those of the layout: differences do not grow from step to step. Returns what
    was found (on rank 0; empty on others) and the model that was used.

    Raises:
        UserError: the model does not fit in one process and may not be shrunken.
    """
    layout = plan_layout(config, runtime.world_size)
    runtime = replace(runtime, tp=layout.tp)
    data = open_run_data(config)
    wanted = config.model.with_vocab_size(data.vocab_size)
    model = _agree_on_model(wanted, layout, runtime, may_shrink)
    say(layout.describe())
    if model != wanted:
        say(
            f"model  shrunken to fit in one process: n_layers {wanted.n_layers} -> {model.n_layers}, "
            f"d_model {wanted.d_model} -> {model.d_model}, d_ff {wanted.d_ff} -> {model.d_ff}"
        )
    batches = batches_of(config, data)
    with fresh_memory_is_nan():
        engine = build_engine(config, model, layout, runtime)
    together = model.moe is not None and model.moe.aux_loss_over == "batch"
    findings = Findings(config.train.precision, rounds_apart=config.train.compile or together or layout.tp > 1)
    reference = Reference(config, model, batches, runtime) if runtime.is_main else None

    def compare_weights(quantity: str, step: int) -> None:
        """With the plain ones, which take them over; and copies with one another."""
        live = weights(engine)
        for name, weight in live.items():
            theirs = whole(weight)
            if reference is not None:
                findings.add(quantity, name, step, reference.difference_of_weight(name, theirs))
        if runtime.world_size > 1:
            findings.add("copies that differ", "", step, copies_that_differ(live))

    compare_weights("initial weight", 0)

    graphs = compiled_graphs()
    for step in range(1, steps + 1):
        if reference is not None:
            loss, norm = reference.start_step(step)
        look = partial(_compare_gradients, engine, reference, findings, step)
        with looked_at(engine, look):
            result = step_at(step, engine, batches, layout, runtime, config)
        if result.bad:
            findings.add("loss", "", step, float("nan"))
            break
        if reference is not None:
            findings.add("loss", "", step, relative(result.loss, loss))
            findings.add("gradient norm", "", step, 0.0 if result.skipped else relative(result.grad_norm, norm))
            updated = reference.update(step)
            if config.train.precision == "fp16":
                findings.add("skipped update", "", step, float(updated == result.skipped))
        compare_weights("update", step)
        if step - config.stage_at(step).first <= 2:  # a stage may have shapes of its own
            graphs = compiled_graphs()
        say(f"step   {step}/{steps}  loss {result.loss:.4f}  grad norm {result.grad_norm:.4f}")
    if config.train.compile and steps > 2:
        findings.add("late compilations", "", steps, runtime.sum(compiled_graphs() - graphs))
    return findings, model


def _compare_gradients(engine: Engine, reference: Reference | None, findings: Findings, step: int) -> None:
    gradients, scale, live = engine.gradients(), engine.loss_scale, weights(engine)
    for name, _ in engine.model.named_parameters():
        weight = live[name]
        theirs = whole(gradients[name] if name in gradients else torch.zeros_like(weight)) / scale
        if reference is not None:
            findings.add("gradient", name, step, reference.difference_of_gradient(name, theirs))


def _agree_on_model(model: ModelConfig, layout: Layout, runtime: Runtime, may_shrink: bool) -> ModelConfig:
    """Rank 0 looks at the memory that is left, where the plain process will be; all take what it chooses."""
    answer: list[Any] = [None]
    if runtime.is_main:
        if runtime.device.type == "cuda":
            memory, ranks_here = torch.cuda.mem_get_info(runtime.device)[0], 1
        else:
            memory = available_memory()
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", runtime.world_size))
        try:
            answer[0] = model_that_fits(model, layout, ranks_here, memory, may_shrink)
        except UserError as error:
            answer[0] = str(error)
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], str):
        raise UserError(answer[0])
    chosen: ModelConfig = answer[0]
    return chosen
