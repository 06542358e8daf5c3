"""What the loop does about a step that was skipped and a loss that jumped."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from common.errors import CheckFailed
from optim.boxes import pieces
from trainer.config import TrainingConfig
from trainer.engines.base import Engine
from trainer.health import Health, or_none
from trainer.metrics import Reporter
from trainer.resume import load_newest
from trainer.rundir import RunDirectory
from trainer.runtime import Runtime

if TYPE_CHECKING:
    from trainer.loop import StepResult

# How often a run goes back after a spike, unless told otherwise.
_ROLL_BACKS = 3


def look_at(step: int, result: StepResult, health: Health, config: TrainingConfig, reporter: Reporter) -> bool:
    """Count and report a bad step or a spike; whether it was a spike."""
    if result.bad:
        health.bad()
        reporter.event(
            "skip",
            f"step {step:>6}  loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}: not finite, update skipped "
            f"({health.in_a_row} in a row; the run ends at {config.train.max_skipped_steps})",
            step=step,
            loss=or_none(result.loss),
            grad_norm=or_none(result.grad_norm),
        )
    elif not result.skipped:
        score = health.good(result.loss)
        if config.train.spike_score is not None and score > config.train.spike_score:
            reporter.event(
                "spike",
                f"step {step:>6}  loss {result.loss:.4f} is a spike, {score:.1f} standard deviations above the last",
                step=step,
                loss=result.loss,
                score=score,
            )
            return True
        health.keep(result.loss)
    return False


def may_roll_back(health: Health, config: TrainingConfig) -> bool:
    """Whether a spike is to be answered so, and has not been too often."""
    return config.train.on_spike == "roll_back" and health.roll_backs < (config.train.max_roll_backs or _ROLL_BACKS)


def roll_back(
    step: int,
    health: Health,
    config: TrainingConfig,
    run: RunDirectory,
    engine: Engine,
    runtime: Runtime,
    reporter: Reporter,
) -> Health:
    """Go back to the newest checkpoint, but not in the data: batches since then are left out."""
    back = load_newest(config, run, engine, runtime)
    if back is None:
        reporter.say("there is no checkpoint to go back to")
        return health
    back.health.rolled_back(back.step + 1, step)
    reporter.event(
        "roll_back",
        f"back to the weights of step {back.step}: the updates of steps {back.step + 1} to {step} are undone and their "
        f"batches left out",
        step=step,
        to=back.step,
    )
    return back.health


def give_up(step: int, health: Health) -> NoReturn:
    """End a run whose steps are bad.

    Raises:
        CheckFailed: always.
    """
    raise CheckFailed(
        f"loss or gradient norm was not finite in {health.in_a_row} steps in a row, the last of them step {step}; no "
        f"update was made since. From a checkpoint before, a lower optim.lr, a longer warm-up or a smaller "
        f"train.grad_clip may help: start under another run.name with checkpoint.resume=PATH"
    )


def weights_are_finite(engine: Engine, runtime: Runtime) -> bool:
    """Whether all weights are, on all ranks. A step that is skipped leaves them alone, but they may be why it was."""
    weights = [tensor for name, tensor in engine.state_dict().items() if name.startswith("model.")]
    return runtime.sum(sum(int(not part.isfinite().all()) for weight in weights for part in pieces(weight))) == 0
