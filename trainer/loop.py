"""The training loop, read top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.ranks import attempt
from data.loader import Feed
from data.packing import Batch
from data.prefetch import Prefetched
from models.flops import training_flops_per_token
from models.moe_config import MoEConfig
from optim.build import set_lr
from optim.schedules import lr_factor
from optim.table import routing_table
from trainer.batch import micro_batches, pinned
from trainer.build import build_engine
from trainer.checkpoint import Checkpointer
from trainer.config import TrainingConfig
from trainer.ending import saved_when_stopped, watched
from trainer.engines.base import Engine
from trainer.evaluate import evaluate
from trainer.health import or_none
from trainer.layout import Layout, plan_layout
from trainer.metrics import Reporter
from trainer.outcome import outcome_told
from trainer.preflight import preflight
from trainer.provenance import check_shared, record_start
from trainer.recovery import give_up, look_at, may_roll_back, roll_back, weights_are_finite
from trainer.resume import Progress, resume, trainer_state
from trainer.routing import Load, auxiliary_loss, move_selection_bias
from trainer.rundata import batches_of, open_run_data
from trainer.rundir import RunDirectory, run_directory
from trainer.runtime import Runtime
from trainer.spectra import SpectraLog
from trainer.start import evaluation_is_due, owes_evaluation
from trainer.throughput import peak_flops


def train(config: TrainingConfig, runtime: Runtime, say_hang: Callable[[str], None] = print) -> RunDirectory:
    """Train a config on the ranks at hand, from the start or from the newest committed checkpoint.

    Raises:
        Requeue: the ranks were told to stop; the newest checkpoint is that of the last step made.
    """
    run = run_directory(config)
    with run.in_use() if runtime.is_main else nullcontext(), outcome_told(run, owned=True):
        if runtime.is_main:
            run.outcome_file.unlink(missing_ok=True)
            runtime.stop.limit(config.train.max_hours)
        with watched(run, runtime, config.train.hang_minutes, say_hang):
            _train(config, run, runtime)
    return run


def _train(config: TrainingConfig, run: RunDirectory, runtime: Runtime) -> None:
    run.check_config(config)
    check_shared(run, runtime)
    layout = plan_layout(config, runtime.world_size)
    runtime = replace(runtime, tp=layout.tp)
    data = open_run_data(config)
    runtime.pulse.at("set-up")
    model_config = config.model.with_vocab_size(data.vocab_size)
    batches = batches_of(config, data)

    engine = build_engine(config, model_config, layout, runtime)
    checkpointer = Checkpointer(run, runtime, config.checkpoint)
    done = resume(config, run, data, engine, runtime)
    dist.barrier()  # every rank has read the directory before rank 0 writes to it
    record_start(run, runtime, config, layout, done.step, data)
    if runtime.is_main:
        run.write_config(config)
        run.truncate_metrics(done.step)
    owed = runtime.sum(runtime.is_main and owes_evaluation(config, run, done.step)) > 0

    peak, peak_source = peak_flops(runtime.device, config.train.precision)
    peak = runtime.sum(peak) * layout.tp
    token_bytes = data.tokenizer().token_bytes
    steps, tokens, health, made = config.train.steps, done.tokens, done.health, done.step

    def evaluate_at(step: int) -> None:
        stage = config.stage_at(step)
        scores = evaluate(engine.model, batches.stages[stage.number], token_bytes, runtime, stage.config)
        reporter.row({"step": step, **scores})

    def save(last: bool) -> bool:
        """Save what is made; False: its weights are not finite, and it is not saved."""
        runtime.pulse.at("the save", made)
        if made > done.step:
            if health.in_a_row and not weights_are_finite(engine, runtime):
                return False
            begin = time.perf_counter()
            state = trainer_state(config, model_config, data, Progress(made, tokens, engine.scaler_state(), health))
            checkpointer.save(engine, state, data.tokenizer_path, last)
            if runtime.is_main:
                runtime.stop.saves_take(max(time.perf_counter() - begin, checkpointer.longest))
        return True

    def save_now() -> None:
        save(last=True)
        checkpointer.wait()

    feed = Prefetched(batches, steps, finish=pinned if runtime.device.type == "cuda" else None)
    reporter = Reporter(run, runtime.is_main, done.step, steps)
    if config.launch.preflight:
        preflight(runtime, reporter.say)
    with checkpointer, feed, reporter, saved_when_stopped(run, runtime, save_now):
        reporter.say(layout.describe())
        if (routing := engine.routing()) is not None:
            reporter.say(routing_table(routing, config.optim.name, config.optim.lr))
        if runtime.is_main:  # it may take a look at every document
            reporter.say(batches.describe())
        reporter.say(f"speed  {peak / 1e9:,.0f} GFLOP/s at most over all ranks ({peak_source}); MFU counts against it")
        spectra = SpectraLog(config, engine, reporter)
        if owed:
            evaluate_at(done.step)
        clock, tokens_logged = time.perf_counter(), tokens
        for step in range(done.step + 1, steps + 1):
            stage = config.stage_at(step)
            with spectra.around(step):
                result = step_at(step, engine, feed, layout, runtime, config)
            tokens, made, last = tokens + result.tokens, step, step == steps
            if step == done.step + 1 and runtime.is_main:
                run.events.record("running", attempt=attempt(), step=step)
            spike = look_at(step, result, health, config, reporter)
            if spike and may_roll_back(health, config):
                checkpointer.wait()
                health = roll_back(step, health, config, run, engine, runtime, reporter)
            if last or result.skipped or step % config.log.every == 0:
                seconds = time.perf_counter() - clock
                rate = (tokens - tokens_logged) / seconds
                flops_per_token = training_flops_per_token(model_config, stage.config.data.seq_len, causal=True)
                scaler = engine.scaler_state()
                skipped = health.skipped + scaler.get("skipped_steps", 0)
                reporter.row(
                    {
                        "step": step,
                        "tokens": tokens,
                        "loss": or_none(result.loss),
                        "grad_norm": None if result.skipped else result.grad_norm,
                        "lr": learning_rate(step, config),
                        "tokens_per_second": rate,
                        "mfu": rate * flops_per_token / peak,
                        "seconds": seconds,
                        **result.routing,
                        **({"stage": stage.number} if config.stages else {}),
                        **({"loss_scale": scaler["loss_scale"]} if scaler else {}),
                        **({"skipped_steps": skipped} if scaler or skipped else {}),
                    }
                )
                clock, tokens_logged = time.perf_counter(), tokens
                if runtime.is_main and (slow := runtime.own_times.told(run.events, step)):
                    reporter.say(slow)
            pause = time.perf_counter()
            if evaluation_is_due(config, step):
                evaluate_at(step)
            hopeless = health.in_a_row >= config.train.max_skipped_steps
            if checkpointer.due(step) or last or hopeless:
                whole = save(last or hopeless)
                if hopeless or (last and not whole):
                    checkpointer.wait()
                    give_up(step, health)
            clock += time.perf_counter() - pause  # evaluating and saving do not count as training time
        runtime.pulse.at("the save")
    dist.barrier()  # the last checkpoint is committed before any rank goes on


class StepResult(NamedTuple):
    """What a training step tells: numbers of the whole global batch, the same on every rank."""

    loss: float  # nats per valid token
    grad_norm: float  # before clipping
    tokens: int  # valid ones
    skipped: bool  # something was not finite, and no update was made
    bad: bool  # and that was no overflow of fp16, which a smaller loss scale mends
    routing: dict[str, Any]  # of experts, see `Load.row`; empty in a dense model


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Of update number `step`, counted from 1, before the factors of roles."""
    stage = config.stage_at(step)
    if stage.own_schedule:
        factor = lr_factor(stage.config.schedule, step - stage.first, stage.steps)
    else:
        factor = lr_factor(config.schedule, step, config.train.steps)
    return stage.config.optim.lr * factor


def step_at(
    step: int, engine: Engine, batches: Feed, layout: Layout, runtime: Runtime, config: TrainingConfig
) -> StepResult:
    """Update number `step`, counted from 1, with the learning rate, the rows and the layout that belong to it."""
    set_lr(engine.optimizer, learning_rate(step, config))
    runtime.pulse.at("data", step)
    batch = batches.train(step - 1, runtime.data_rank, runtime.data_ranks)
    layout = layout.at(config.stage_at(step).number)
    return train_step(engine, batch, layout, runtime, config.train.grad_clip, config.model.moe)


def train_step(
    engine: Engine,
    batch: Batch,
    layout: Layout,
    runtime: Runtime,
    grad_clip: float | None,
    moe: MoEConfig | None = None,
) -> StepResult:
    """One update from this rank's rows of the global batch, or none where loss or gradient norm is not finite.

    Raises:
        Stopping: a rank was told to stop; no rank has begun the step.
    """
    # Rule 1: the denominator counts the whole global batch and is known before the first backward pass.
    valid = runtime.count(int(batch.mask.sum()))
    runtime.pulse.at("the step")
    loss_sum, load = torch.zeros((), dtype=torch.float64, device=runtime.device), Load()
    for index, micro in enumerate(micro_batches(batch, layout.micro_batch_size, runtime.device)):
        losses = engine.model(*micro)
        loss = losses.cross_entropy / max(1.0, valid)
        if moe is not None:
            loss = loss + auxiliary_loss(moe, losses.routing, layout)
            load.add(losses.routing)
        engine.micro_backward(loss, last=index == layout.accumulation - 1)
        loss_sum += losses.cross_entropy.detach().double()
    mean_loss = runtime.sum(loss_sum) / max(1.0, valid)
    counts_LE = load.sum(runtime)
    grad_norm = engine.grad_norm()
    # Both are known to all ranks, so that all do the same, and the weights are untouched yet.
    skipped = not (math.isfinite(mean_loss) and math.isfinite(grad_norm))
    overflow = math.isfinite(mean_loss) and engine.loss_scale > 1.0
    if skipped:
        engine.skip(overflow)
    else:
        engine.step(scale=clip_scale(grad_norm, grad_clip))
        if moe is not None and moe.bias_update_rate and counts_LE is not None:
            move_selection_bias(engine.model, counts_LE, moe.bias_update_rate)
    return StepResult(mean_loss, grad_norm, int(valid), skipped, skipped and not overflow, load.row(moe, layout))


def clip_scale(grad_norm: float, grad_clip: float | None) -> float:
    """Factor that brings a gradient of this norm down to the largest allowed one."""
    return 1.0 if grad_clip is None or grad_norm <= grad_clip else grad_clip / grad_norm
