"""One training process: `torchrun --nproc-per-node N -m launch.worker CONFIG [key.path=value ...]`.

It knows its place among the others from the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), as
torchrun and the launchers that follow it set it. Started alone it is the only process.
"""

from __future__ import annotations

import os
import sys

from common.logs import setup_logging
from launch.finish import finish_run, is_finished, print_ways_on
from launch.report_errors import user_errors


def run(config_path: str, overrides: list[str]) -> None:
    """Train in this process, as one of the ranks that the environment describes."""
    from trainer.config import load_config
    from trainer.rundir import run_directory

    setup_logging()
    config = load_config(config_path, overrides)
    directory = run_directory(config)
    directory.check_config(config)
    if is_finished(config, directory):  # quick, and before torch is imported
        if os.environ.get("RANK", "0") == "0":
            print_ways_on(config, directory)
        return

    from trainer.loop import train
    from trainer.runtime import start_runtime

    with start_runtime() as runtime:
        done = train(config, runtime)
        if runtime.is_main:
            finish_run(config, done)


def main(arguments: list[str]) -> None:
    """Command line of a worker."""
    with user_errors():
        if not arguments:
            from common.errors import UserError

            raise UserError("usage: torchrun --nproc-per-node N -m launch.worker CONFIG [key.path=value ...]")
        run(arguments[0], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
