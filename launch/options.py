"""Arguments and options that commands of several files have."""

from __future__ import annotations

from typing import Annotated

import typer

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML config, for example configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key.path=value]...", help="Values laid over the config.")
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Processes on this machine. Default: one per GPU, or one on the CPU.")
]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write all that was found there; -: to the terminal.")
]
