"""The command `gramian`. Heavy imports happen inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from launch.report_errors import user_errors

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train decoder-only language models, with the same numbers on any layout.",
)


@app.callback()
def _commands() -> None:
    """Keep `train` a word of its own however many commands there are."""


@app.command()
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML config, for example configs/quickstart.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key.path=value]...", help="Values laid over the config.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine. Default: one per GPU, or one on the CPU.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the config and the plan, and stop.")] = False,
) -> None:
    """Train a model. Under torchrun (RANK and WORLD_SIZE set) this is one worker."""
    with user_errors():
        from launch.train import run_train

        run_train(config, list(overrides or []), nproc, dry_run)


@app.command()
def generate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run directory or checkpoint folder.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Divides the logits; 0: the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many likeliest tokens; 0: all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
) -> None:
    """Continue a text with a trained model."""
    with user_errors():
        from trainer.rundir import find_checkpoint

        folder = find_checkpoint(checkpoint)

        from trainer.generate import generate as continue_text

        print(continue_text(folder, prompt, max_tokens, temperature, top_k or None, seed))


def run() -> None:
    """Entry point of the console command."""
    # A worker's log lines and a user's pipe see output as it is made.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    app(prog_name="gramian")
