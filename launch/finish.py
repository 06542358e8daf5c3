"""What a finished run tells: its sample, where things are, and how to go on."""

from __future__ import annotations

from common.files import atomic_write
from trainer.config import TrainingConfig
from trainer.outcome import read_outcome, write_outcome
from trainer.rundir import RunDirectory, find_checkpoint
from trainer.start import owes_evaluation

SAMPLE_TOKENS = 128


def is_finished(config: TrainingConfig, run: RunDirectory) -> bool:
    """Whether a committed checkpoint of the run has all the steps that the config asks for, and they are evaluated."""
    committed = run.committed()
    if not committed or committed[-1] < config.train.steps:
        return False
    return committed[-1] > config.train.steps or not owes_evaluation(config, run, committed[-1])


def finish_run(config: TrainingConfig, run: RunDirectory) -> None:
    """Write a sample of the trained model, if the config asks for one, and print the summary."""
    _write_sample(config, run)
    print_summary(config, run)


def tell_done(config: TrainingConfig, run: RunDirectory) -> None:
    """Write down that all is done, unless it stands there."""
    outcome = read_outcome(run)
    if outcome is None or outcome["outcome"] != "done":
        write_outcome(run, "done", f"all {config.train.steps} steps are made")


def _write_sample(config: TrainingConfig, run: RunDirectory) -> None:
    if config.train.sample_prompt is not None:
        from trainer.generate import Settings, generate

        settings = Settings(SAMPLE_TOKENS, temperature=0.8, top_k=50, seed=config.run.seed)
        (sample,) = generate(find_checkpoint(run.path), [config.train.sample_prompt], settings)
        atomic_write(run.sample_file, sample.prompt + sample.text)


def print_summary(config: TrainingConfig, run: RunDirectory) -> None:
    """Print the sample, the places of the results and what to try next."""
    if run.sample_file.exists():
        print(f"\nsample\n------\n{run.sample_file.read_text(encoding='utf-8')}\n------")
    evaluations = [row for row in run.read_metrics() if "eval_loss" in row]
    if evaluations:
        last = evaluations[-1]
        print(
            f"\nheld-out loss {last['eval_loss']:.4f} nats per token, "
            f"{last['eval_bits_per_byte']:.4f} bits per byte at step {last['step']}"
        )
    if counts := run.events.counts():
        print(f"on the way    {counts}; see {run.events.path}")
    print(f"checkpoint    {find_checkpoint(run.path)}")
    print(f"metrics       {run.metrics_file}")
    print(f"try           gramian generate {run.path} --prompt 'def'", flush=True)


def print_ways_on(config: TrainingConfig, run: RunDirectory) -> None:
    """Say that the run is done, and the two ways on. A sample that was asked for and an outcome, if they are missing,
    are made up for: a start may have been killed just before its end."""
    if not run.sample_file.exists():
        _write_sample(config, run)
    tell_done(config, run)
    step = run.committed()[-1]
    print(f"run '{config.run.name}' is finished: {step} steps are done and {config.train.steps} were asked for")
    print_summary(config, run)
    stretched = (
        "" if config.schedule.name in ("constant", "inverse_sqrt") else " (the schedule then is that of the new length)"
    )
    if config.stages:
        print(f"go on         with another stage:   under a new name, and checkpoint.resume={run.path}")
    else:
        print(f"go on         with more steps:      train.steps={2 * step}{stretched}")
    print(f"              or under a new name:  run.name={config.run.name}-2", flush=True)
