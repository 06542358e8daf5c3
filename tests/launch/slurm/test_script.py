"""Whatever a value holds, a job's script keeps it as a value."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from launch.slurm.cluster import ClusterConfig, ContainerConfig, load_cluster
from launch.slurm.script import TEMPLATE, Plan, render, sbatch_lines
from launch.slurm.submit import _array, _gpus
from tests.launch.commands import BIN, environment

NASTY = "a 'b' \"c\" $(touch pwned) `touch pwned` $HOME ; touch pwned #x @@run@@ %j é"


def plan(folder: Path, **changes: Any) -> Plan:
    whole = Plan(
        name="run",
        nodes=2,
        nproc=4,
        gpus=0,
        directory=folder,
        submission=folder / "runs" / "run" / "slurm" / "0000",
        run=folder / "runs" / "run",
        words=[f"train.sample_prompt={NASTY}", "run.name=run"],
        elements={},
        array=None,
    )
    return dataclasses.replace(whole, **changes)


def every_kind(folder: Path) -> dict[str, tuple[Plan, ClusterConfig]]:
    container = ContainerConfig(image=NASTY, mounts=[f"{NASTY}:/x"])
    pyxis = ContainerConfig(runtime="pyxis", image=NASTY)
    everything = ClusterConfig(
        partition=NASTY,
        account=NASTY,
        modules=[NASTY],
        venv=NASTY,
        conda=NASTY,
        env={"VARIABLE": NASTY},
        interface=NASTY,
        setup="ulimit -n 65536",
        cpus_per_task=8,
        exclusive=True,
        memory=0,
    )
    elements = {0: [f"optim.lr={NASTY}"], 1: ["optim.lr=1"]}
    return {
        "plain": (plan(folder), ClusterConfig()),
        "tasks": (plan(folder, gpus=4), ClusterConfig(start="task", gpu_option="gres")),
        "all": (plan(folder, name="a run"), everything),
        "array": (plan(folder, elements=elements, array="0-1%1"), ClusterConfig()),
        "apptainer": (plan(folder), ClusterConfig(container=container)),
        "pyxis": (plan(folder), ClusterConfig(container=pyxis)),
        "example": (plan(folder, gpus=8), load_cluster("example")),
    }


@pytest.mark.parametrize("kind", ["plain", "tasks", "all", "array", "apptainer", "pyxis", "example"])
def test_scripts_pass_bash_and_shellcheck(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / NASTY.replace("/", "")
    script = render(*every_kind(folder)[kind])
    for command in (["bash", "-n", "/dev/stdin"], [str(BIN / "shellcheck"), "-s", "bash", "-"]):
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"


def test_templates_pass_shellcheck() -> None:
    scripts = sorted(TEMPLATE.parent.glob("*.sh"))
    assert len(scripts) == 2
    for script in scripts:
        done = subprocess.run([str(BIN / "shellcheck"), str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_values_stay_values(tmp_path: Path) -> None:
    """The script is run, with an interpreter that prints what it is given."""
    folder = tmp_path / NASTY.replace("/", "")
    (folder / "runs").mkdir(parents=True)
    echo = folder / "echo"
    echo.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['V']]))\n")
    echo.chmod(0o755)
    cluster = ClusterConfig(
        python=str(echo), env={"V": NASTY}, container=ContainerConfig(image=NASTY, python=str(echo))
    )
    job = plan(folder, elements={0: ["optim.lr=1"], 1: [f"optim.lr={NASTY}"]}, array="0-1")
    script = tmp_path / "job.sh"
    script.write_text(render(job, cluster))
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=environment(SLURM_ARRAY_TASK_ID="1"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    words, variable = json.loads(done.stdout)
    assert variable == NASTY
    before, _, command = words[: (split := words.index("--"))], None, words[split + 1 :]
    assert before[before.index("--run") + 1] == f"{job.run}-1"
    assert before[before.index("--submission") + 1] == str(job.submission)
    assert command[0] == "srun"
    assert NASTY in command  # the image
    assert command[-4:] == [str(job.submission / "config.yaml"), *job.words, f"optim.lr={NASTY}"]
    assert not list(tmp_path.rglob("pwned"))


def test_what_sbatch_cannot_read_is_refused(tmp_path: Path) -> None:
    for value in ("a\nb", "a\\b"):
        with pytest.raises(UserError, match="sbatch cannot read"):
            sbatch_lines(plan(tmp_path), ClusterConfig(account=value))
    (log,) = (line for line in sbatch_lines(plan(tmp_path / "100%j"), ClusterConfig()) if line.startswith("--output"))
    assert "/100%%j/runs/run/slurm/0000/log-%j.txt" in log


def test_templates_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.sh"
    own.write_text("#!/bin/bash\n@@sbatch@@\nmine @@words@@\n")
    script = render(plan(tmp_path), ClusterConfig(template=str(own)))
    assert script.splitlines()[0] == "#!/bin/bash"
    assert "\nmine --nproc 4 " in script
    own.write_text("@@wrods@@")
    with pytest.raises(UserError, match="@@wrods@@ is nothing to fill in; known are "):
        render(plan(tmp_path), ClusterConfig(template=str(own)))
    with pytest.raises(UserError, match="is not there; give the path of a copy of"):
        render(plan(tmp_path), ClusterConfig(template=str(tmp_path / "absent.sh")))


def test_cluster_files(tmp_path: Path) -> None:
    assert load_cluster("default", partition="p").partition == "p"
    with pytest.raises(UserError, match=r"no such file in .*; did you mean default\?"):
        load_cluster("defualt")
    file = tmp_path / "mine.yaml"
    file.write_text("partiton: gpu\n")
    with pytest.raises(UserError, match=r"did you mean 'partition'\?"):
        load_cluster(str(file))
    file.write_text("env: {'A B': '1'}\n")
    with pytest.raises(UserError, match="'A B' is no name of a variable"):
        load_cluster(str(file))


def test_gpus_of_nodes() -> None:
    known = {"(null)": 0, "gpu:8": 8, "gpu:h100:4(S:0-1)": 4, "gpu:a100:2,gpu:v100:1,shard:8": 3, "shard:gpu:4": 0}
    assert {gres: _gpus(gres) for gres in known} == known


def test_arrays() -> None:
    four: dict[int, list[str]] = {number: [] for number in range(4)}
    assert [_array(given, four) for given in (None, "%2", "1,3", "0-2:2%1")] == ["0-3", "0-3%2", "1,3", "0-2:2%1"]
    assert _array(None, {}) is None
    for wrong in ("4", "0-9", "all", "1;2"):
        with pytest.raises(UserError, match="--array"):
            _array(wrong, four)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--array", "0-3"], "--array needs --vary KEY=[VALUE, ...]"),
        (["--vary", "run.seed=3"], "must be KEY=[VALUE, ...], for example run.seed=[0, 1, 2, 3]"),
        (["--vary", "run.seed=[0, 1]", "--vary", "optim.lr=[1]"], "lists of 1 and 2 values; give all the same number"),
        (["--vary", "run.sed=[0, 1]"], "unknown key 'run.sed'; did you mean 'run.seed'?"),
        (["--nodes", "3"], "'train.global_batch_size' (32) is not divisible by the 3 processes"),
    ],
)
def test_wrong_words(gramian: Any, tmp_path: Path, words: list[str], message: str) -> None:
    from tests.runs import TINY

    code, _, error = gramian("slurm", "submit", TINY, *words, f"run.dir={tmp_path}")
    assert (code, len(error.splitlines())) == (2, 1)
    assert message in error


def test_without_slurm(gramian: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.runs import TINY

    monkeypatch.setenv("PATH", str(BIN))
    code, _, error = gramian("slurm", "submit", TINY, f"run.dir={tmp_path}")
    assert code == 2
    assert error == (
        "gramian: there is no SLURM on this machine (sinfo is not on the PATH); go to a login node of the cluster, or "
        "train here with `gramian train`\n"
    )
    assert not list(tmp_path.iterdir())
    assert gramian("slurm", "submit", TINY, "--dry-run", f"run.dir={tmp_path}").code == 0  # needs none
    (tmp_path / "old" / "slurm" / "0000").mkdir(parents=True)
    record = {"job": "1", "log": "log.txt", "elements": {}}
    (tmp_path / "old" / "slurm" / "0000" / "submit.json").write_text(json.dumps(record))
    for command in ("status", "cancel"):
        assert "there is no SLURM on this machine" in gramian("slurm", command, tmp_path / "old").err
    assert "this run is not there" in gramian("slurm", "status", tmp_path / "absent").err
