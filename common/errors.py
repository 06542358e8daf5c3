"""How a command ends that has something to tell: the user's to mend, or a check that says no."""

from __future__ import annotations

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1
EXIT_HANG = 70
EXIT_REQUEUE = 75
EXITS_THAT_EXPLAIN = (EXIT_BAD_INPUT, EXIT_REQUEUE, EXIT_HANG)  # of a worker, the likeliest cause of others' ends first


class UserError(Exception):
    """Bad input: what is wrong, where, and what to do, in one line.

    Every command turns it into that line on standard error and exit code 2. It is deliberately no `ValueError`:
    pydantic would swallow one that is raised inside a validator and reword it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class Requeue(BaseException):
    """Not an error: the run was told to stop, and the same command goes on with it. Says so in one line, exit code 75.

    Like `KeyboardInterrupt` it is no `Exception`, so that nothing takes it for one on its way.
    """


class CheckFailed(Exception):
    """A check was made and says no: the finding in one line, which the command prints, exit code 1."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
