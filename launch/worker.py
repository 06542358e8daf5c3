"""One training process: `torchrun --nproc-per-node N -m launch.worker CONFIG [key.path=value ...]`.

It knows its place among the others from the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), as
torchrun and the launchers that follow it set it. Started alone it is the only process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from common.errors import UserError
from common.logs import setup_logging
from common.ranks import read_place
from launch.finish import finish_run, is_finished, print_ways_on, tell_done
from launch.report_errors import TOLD_BY_LAUNCHER, leave, say_hang, user_errors
from trainer.config import load_config
from trainer.layout import plan_layout
from trainer.outcome import outcome_told, settled_before
from trainer.rundir import run_directory
from trainer.stop import heed_signals

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run(config_path: str, overrides: list[str]) -> None:
    """Train in this process, as one of the ranks that the environment describes."""
    _end_with_launcher()
    place = read_place()
    setup_logging()
    config = load_config(config_path, overrides)
    directory = run_directory(config)
    directory.check_config(config)
    if (code := settled_before(directory)) is not None:  # torchrun, to which one exit code is like another
        raise SystemExit(code)
    # What can be known is found before torch is imported, which takes seconds.
    if is_finished(config, directory):
        if place.rank == 0:
            print_ways_on(config, directory)
        return
    with heed_signals() as stop, outcome_told(directory):
        directory.check_writable()
        plan_layout(config, place.world_size)

        from trainer.loop import train
        from trainer.runtime import start_runtime

        # The inner `user_errors` leaves its report before the group is taken down, and so before the others fail over
        # that.
        with start_runtime(config.train.deterministic, config.train.hang_minutes, stop) as runtime, user_errors():
            train(config, runtime, say_hang)
            if runtime.is_main:
                finish_run(config, directory)
                directory.events.record("done", step=config.train.steps)
                tell_done(config, directory)


def _end_with_launcher() -> None:
    """A launcher that is killed cannot end its workers: let the kernel do it. Without one there is nothing to do."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.environ.get(TOLD_BY_LAUNCHER)
        end_with_parent(None if launcher is None else int(launcher))


def end_with_parent(parent: int | None) -> None:
    """Be killed when the process that started this one ends, or end now if that is not `parent` any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it was gone before
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Command line of a worker."""
    with user_errors():
        # The `deepspeed` launcher says in front what LOCAL_RANK says too.
        arguments = arguments[1:] if arguments and arguments[0].startswith("--local_rank=") else arguments
        if not arguments:
            raise UserError("usage: torchrun --nproc-per-node N -m launch.worker CONFIG [key.path=value ...]")
        run(arguments[0], arguments[1:])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        leave(end.code)  # type: ignore[arg-type]  # our own are numbers
    leave(0)
