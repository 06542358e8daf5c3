"""Which checkpoints of a run stay."""

from __future__ import annotations

import shutil

from trainer.manifest import sizes_agree
from trainer.rundir import COMMIT, RunDirectory


def prune(run: RunDirectory, keep: int, keep_every: int) -> None:
    """Remove committed checkpoints before the newest `keep`, and what was never committed before the newest.

    A checkpoint whose files are not as long as they were is not counted, so that it takes the place of no good one.
    Those at multiples of `keep_every` stay for good, unless that is 0.
    """
    steps = [step for step in run.committed() if sizes_agree(run.checkpoint(step))]
    if not steps:
        return
    for step, folder in run.saved().items():
        committed = (folder / COMMIT).exists()
        permanent = committed and keep_every > 0 and step % keep_every == 0
        if not permanent and step < (steps[-keep:][0] if committed else steps[-1]):
            (folder / COMMIT).unlink(missing_ok=True)  # first: a half-removed checkpoint must not look whole
            shutil.rmtree(folder)
