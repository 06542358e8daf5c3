"""One training process: `torchrun --nproc-per-node N -m launch.worker CONFIG [key.path=value ...]`.

It knows its place among the others from the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), as
torchrun and the launchers that follow it set it. Started alone it is the only process.
"""

from __future__ import annotations

import sys

from common.errors import UserError
from common.logs import setup_logging
from common.ranks import read_place
from launch.finish import finish_run, is_finished, print_ways_on
from launch.report_errors import leave, user_errors
from trainer.config import load_config
from trainer.layout import plan_layout
from trainer.rundir import run_directory


def run(config_path: str, overrides: list[str]) -> None:
    """Train in this process, as one of the ranks that the environment describes."""
    place = read_place()
    setup_logging()
    config = load_config(config_path, overrides)
    directory = run_directory(config)
    directory.check_config(config)
    # What can be known is found before torch is imported, which takes seconds.
    if is_finished(config, directory):
        if place.rank == 0:
            print_ways_on(config, directory)
        return
    directory.check_writable()
    plan_layout(config, place.world_size)

    from trainer.loop import train
    from trainer.runtime import start_runtime

    # The inner `user_errors` leaves its report before the group is taken down, and so before the others fail over that.
    with start_runtime(config.train.deterministic) as runtime, user_errors():
        done = train(config, runtime)
        if runtime.is_main:
            finish_run(config, done)


def main(arguments: list[str]) -> None:
    """Command line of a worker."""
    with user_errors():
        if not arguments:
            raise UserError("usage: torchrun --nproc-per-node N -m launch.worker CONFIG [key.path=value ...]")
        run(arguments[0], arguments[1:])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        leave(end.code)  # type: ignore[arg-type]  # our own are numbers
    leave(0)
