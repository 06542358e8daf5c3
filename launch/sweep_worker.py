"""Trains one run after another in one process, as they come in: importing torch takes longer than a small run.

A line of JSON on standard input, `{"config": PATH, "words": [...]}`, is a run; a line `{"code": N}` on standard output
says how it ended. After one that did not end well the process ends too: what it left behind must not reach the next.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from common.errors import EXIT_REQUEUE
from launch import worker
from launch.report_errors import leave, user_errors


def main() -> None:
    """Until standard input ends."""
    worker.end_with_parent(int(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with open(sys.argv[1], "a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for line in sys.stdin:
        task, code = json.loads(line), 1
        print(f"--- {task['config']} {' '.join(task['words'])}", flush=True)
        try:
            with user_errors():
                worker.run(task["config"], task["words"])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        print(json.dumps({"code": code}), file=answers)
        if code:
            leave(code if code == EXIT_REQUEUE else 1)
    leave(0)


if __name__ == "__main__":
    main()
