"""A job whose time is over before it was told: SLURM ends it, and by itself would not begin it again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launch.commands import environment
from tests.launch.slurm.cluster import Cluster
from tests.runs import TINY

ROOT = Path(TINY).parent.parent
# The first start outlasts its limit, of which nobody has told it; the second is done at once.
STEP = """#!{python}
import json, os, time
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    time.sleep(300)
json.dump({{"outcome": "done", "time": time.time(), "exit_code": 0}}, open("{run}/outcome.json", "w"))
"""
SCRIPT = """#!/bin/bash
#SBATCH --requeue --open-mode=append --time=1 --output={log}
exec {python} -P -m launch.slurm.job --run {run} --submission {run} --max-requeues 3 -- srun {step}
"""


@pytest.mark.verify
@pytest.mark.timeout(400)
def test_a_job_that_was_cut_off_begins_anew(cluster: Cluster, tmp_path: Path) -> None:
    run, step, script, log = (tmp_path / name for name in ("run", "step.py", "job.sh", "log.txt"))
    run.mkdir()
    names = {"python": sys.executable, "run": run, "step": step, "log": log}
    for file, text in ((step, STEP), (script, SCRIPT)):
        file.write_text(text.format(**names))
        file.chmod(0o755)
    path = environment(**cluster.variables).get("PYTHONPATH", "")
    job = cluster.run("sbatch", "--parsable", str(script), PYTHONPATH=f"{ROOT}:{path}").strip()
    cluster.until(lambda: cluster.state(job) in ("COMPLETED", "TIMEOUT", "FAILED"), 300, log.read_text)
    assert cluster.state(job) == "COMPLETED", log.read_text()
    assert cluster.record(job)["Restarts"] == "1", log.read_text()
    assert json.loads((run / "outcome.json").read_text())["outcome"] == "done"
    assert "requeue 1 of 3" in log.read_text()
