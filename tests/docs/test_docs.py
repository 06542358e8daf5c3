"""The documentation is true: its commands run, its links and names exist, what is generated is up to date."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import apply_overrides, read_tree
from tests.gang import Gang
from trainer import rundir
from trainer.config import TrainingConfig, load_config
from trainer.layout import plan_layout
from trainer.rundir import RunDirectory

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "slurm" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICKSTART = ROOT / "docs" / "quickstart.md"
FOLDERS = "common|launch|scaling|trainer|models|optim|data|configs|slurm|tests|benchmarks|docs"

# What the commands of the quickstart page run on here: its config with these values, and a fiftieth of the steps that a
# command asks for. Nothing else of a command is changed.
SMALLER = (
    "data.tokenizer.vocab_size=400",
    "data.seq_len=32",
    "model.n_layers=1",
    "model.d_model=32",
    "train.steps=6",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "checkpoint.every=4",
    "eval.every=3",
    "eval.batches=1",
    "log.every=1",
)
# These need a fresh machine, or the environment that runs the tests is already what they make.
SKIPPED = ("make ", ". .venv/bin/activate")

by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The lines of the shell blocks that can run here."""
    lines = "".join(blocks(page, "sh")).splitlines()
    return [line for line in lines if not line.startswith(SKIPPED)]


def spans(page: Path) -> list[str]:
    """Inline code, outside fenced blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def environment() -> dict[str, str]:
    """As a user's shell with the project's environment active."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def shell(command: str, folder: Path) -> str:
    """Run a command line; its output. The test fails with all of it if the command does."""
    script = f"set -euo pipefail\n{command}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def without_starting(gang: Gang, command: str, folder: Path) -> str:
    """Output of a `gramian` command, without the seconds that new processes take to import torch.

    The workers of what trains and certifies are ranks of the gang, which is told of their place as torchrun tells it;
    that `--nproc` starts them is held by tests/launch. All else runs in this process.
    """
    program, *words = shlex.split(command)
    assert program == "gramian"
    if words[0] not in ("train", "certify") or "--dry-run" in words:
        return gramian(words, str(folder))
    world = 1
    if "--nproc" in words:
        place = words.index("--nproc")
        world = int(words[place + 1])
        del words[place : place + 2]
    return str(gang.run(gramian, words, str(folder), world=world)[0])


def gramian(words: list[str], folder: str) -> str:
    """Standard output of a command, called in this process."""
    from launch.cli import app

    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        app(words, standalone_mode=False)
    return out.getvalue()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder that looks like the checkout, with the smaller quickstart config."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "docs").symlink_to(ROOT / "docs")
    return with_smaller_quickstart(folder, f"data.corpus={corpus}")


def with_smaller_quickstart(folder: Path, *words: str) -> Path:
    """The folder, with the checkout's configs in it, of which the quickstart is made smaller and changed by `words`."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    config = folder / "configs" / "quickstart.yaml"
    tree = apply_overrides(read_tree(config), [*SMALLER, *words])
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


# Each way to start a run is taken once as a user takes it: alone, with `--nproc`, and by torchrun.
AS_TYPED = re.compile(r"gramian train configs/quickstart\.yaml( --nproc 2 run\.name=two)?$|(?!gramian )")


@pytest.fixture(scope="module")
def outputs(gang: Gang, checkout: Path) -> dict[str, str]:
    """Output of every command of the quickstart page, run in the page's order."""
    done = {}
    for command in commands(QUICKSTART):
        smaller = re.sub(r"train\.steps=(\d+)", lambda steps: f"train.steps={int(steps[1]) // 50}", command)
        if AS_TYPED.match(command):
            done[command] = shell(smaller, checkout)
        else:
            done[command] = without_starting(gang, smaller, checkout)
    return done


def metrics(checkout: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in RunDirectory(checkout / "runs" / name).read_metrics() if "loss" in row]


def test_quickstart_commands_run(outputs: dict[str, str], checkout: Path) -> None:
    """And do what the page says of them."""
    assert len(outputs) >= 10
    first, *others = (out for command, out in outputs.items() if command == "gramian train configs/quickstart.yaml")
    assert not others  # a dict: the page has the command twice, and the second output is kept
    assert "run 'quickstart' is finished" in first
    assert "sample\n------\ndef" in first
    assert [row["step"] for row in metrics(checkout, "quickstart")] == list(range(1, 17))
    assert len(list((checkout / "runs" / "quickstart" / "starts").iterdir())) == 2
    assert (checkout / "runs" / "two" / "logs").is_dir()
    assert (checkout / "runs" / "mine" / "checkpoints").is_dir()
    assert (checkout / "loss.png").is_file()
    (generated,) = (output for command, output in outputs.items() if command.startswith("gramian generate"))
    assert generated.startswith("def")


def test_more_processes_give_the_same_losses(outputs: dict[str, str], checkout: Path) -> None:
    alone = metrics(checkout, "quickstart")[:6]
    for name in ("two", "by-torchrun"):
        for row, expected in zip(metrics(checkout, name), alone, strict=True):
            # So few tokens a step are noisier than the 1e-6 that tests/trainer/test_layouts.py holds on larger batches.
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_checkpoint_snippet_reads_what_the_run_wrote(outputs: dict[str, str], checkout: Path) -> None:
    """The snippet of docs/checkpoints.md, with safetensors and torch alone, on two ranks' files."""
    (snippet,) = blocks(ROOT / "docs" / "checkpoints.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=checkout, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("runs/quickstart/checkpoints/step_00000016 (400, 32) ")
    assert len(list((checkout / "runs/quickstart/checkpoints/step_00000016").glob("*.safetensors"))) == 2


def test_checkpoint_files_are_those_of_the_page(outputs: dict[str, str], checkout: Path) -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (listing,) = re.findall(r"^    runs/quickstart/checkpoints/.*\n((?:      .*\n)+)", text, re.MULTILINE)
    named = {line.split()[0] for line in listing.splitlines()}
    folder = checkout / "runs" / "slower" / "checkpoints" / "step_00000006"  # of one process
    assert named == {path.name for path in folder.iterdir()}


def test_run_folder_is_that_of_the_readme(outputs: dict[str, str], checkout: Path) -> None:
    (listing,) = re.findall(r"^    runs/<name>/\n((?:      .*\n)+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    named = {line.split()[0].split("/")[0] for line in listing.splitlines() if line[6] != " "}
    run = checkout / "runs" / "two"  # its processes have logs
    assert named == {path.name for path in run.iterdir() if path.name != ".lock"}
    rows = RunDirectory(run).read_metrics()
    for keys, marker in ((r"a row per logged step \((.*?)\)", "loss"), (r"per evaluation \((.*?)\)", "eval_loss")):
        (listed,) = re.findall(keys, listing)
        assert listed.split(", ") == list(next(row for row in rows if marker in row))


def test_dry_run_output_is_that_of_the_page(outputs: dict[str, str]) -> None:
    text = QUICKSTART.read_text(encoding="utf-8")
    ((config, ranks, expected),) = re.findall(
        r"^<!-- dry run: (\S+) --nproc (\d+) -->\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    assert plan_layout(load_config(ROOT / config), int(ranks)).describe() == expected.strip()
    printed = outputs[f"gramian train {config} --dry-run --nproc {ranks}"]  # of the smaller config
    assert "mesh   fsdp: 2 ranks = dp_replicate 1 x dp_shard 2\nbatch  4 sequences = " in printed
    assert "FLOPs" in printed


def test_certifying_commands_run(gang: Gang, outputs: dict[str, str], checkout: Path) -> None:
    """Those of docs/how-we-know.md; the first is the README's and the quickstart's too."""
    alone, by_torchrun, repeat = commands(ROOT / "docs" / "how-we-know.md")
    assert "certified: 5 steps on 2 ranks equal one plain process" in outputs[alone]
    assert "certified: 1 step on 2 ranks equal one plain process" in shell(by_torchrun, checkout)
    assert "repeatable: 5 steps twice" in without_starting(gang, repeat, checkout)


def test_readme_commands_are_those_of_the_quickstart() -> None:
    """Which are run."""
    shown = commands(README)
    assert shown
    assert set(shown) <= set(commands(QUICKSTART))


def test_readme_has_every_command_and_option() -> None:
    import typer

    from launch.cli import app

    known: dict[str, set[str]] = {}

    def collect(group: Any, prefix: str) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                collect(command, f"{prefix}{name} ")
            else:
                words = {word for parameter in command.params for word in parameter.opts}
                known[prefix + name] = {word for word in words if word.startswith("--")}

    collect(typer.main.get_command(app), "")
    shown: dict[str, set[str]] = {}
    for row in README.read_text(encoding="utf-8").splitlines():
        for words in re.findall(r"(?<![\w-])gramian (\w+(?: \w+)?)", row if re.match(r"\| `|gramian", row) else ""):
            name = words if words in known else words.split()[0]
            shown.setdefault(name, set()).update(re.findall(r"--[a-z][a-z-]*", row))
    assert shown == {name: options - {"--help"} for name, options in known.items()}


def test_configuration_page_is_generated() -> None:
    """In a process of its own, where torch is not there to import."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, 'docs'); import configuration as c; "
        "pages = ((c.page(), c.PAGE), (c.sweeps_page(), c.SWEEPS)); "
        "sys.exit(any(text != file.read_text(encoding='utf-8') for text, file in pages))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"run `python docs/configuration.py`\n{done.stderr}"


def test_configuration_page_has_every_key() -> None:
    """Found another way than the generator finds them: in a resolved config."""
    keys: list[str] = []

    def collect(tree: dict[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                collect(value, f"{prefix}{key}.")
            else:
                keys.append(prefix + key)

    collect(TrainingConfig().tree(), "")
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert len(keys) > 50
    assert [key for key in keys if f"| `{key}` |" not in text] == []


def test_keys_that_may_change_are_those_of_the_run_directory() -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"<!-- free keys -->\n(.*?)<!-- end -->", text, re.DOTALL)
    named = {key if "." in key else f"{key}." for key in re.findall(r"`([^`]+)`", listed)}
    assert named == set(rundir._FREE)


def test_yaml_in_pages_is_valid(tmp_path: Path) -> None:
    for page in PAGES:
        for number, block in enumerate(blocks(page, "yaml")):
            file = tmp_path / f"{number}.yaml"
            file.write_text(block, encoding="utf-8")
            load_config(file)


def test_transformer_schedule_of_the_page() -> None:
    """The learning rate in docs/optimizers.md makes inverse_sqrt equation 3 of Vaswani et al. 2017."""
    from optim.schedules import lr_factor

    (block,) = blocks(ROOT / "docs" / "optimizers.md", "yaml")
    config = TrainingConfig.model_validate(yaml.safe_load(block))
    assert config.optim.resolved() == {"betas": (0.9, 0.98), "eps": 1e-9}
    for step in (1, 100, 4000, 100_000):
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert config.optim.lr * lr_factor(config.schedule, step, 100_000) == pytest.approx(expected, rel=1e-4)


@by_name
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, target


@by_name
def test_named_files_exist(page: Path) -> None:
    """Files and folders of the checkout in inline code, and tests in them (`file.py::test`)."""
    for span in spans(page):
        for name, test in re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*)(?:::(\w+))?", span):
            assert (ROOT / name).exists(), span
            assert not test or f"def {test}(" in (ROOT / name).read_text(encoding="utf-8"), span


@by_name
def test_named_keys_exist(page: Path) -> None:
    """`section.key` in inline code is a config key."""
    sections = "|".join(TrainingConfig.model_fields)
    for span in spans(page):
        for section, key in re.findall(rf"(?:^|(?<= ))({sections})\.(?!(?:py|worker)\b)(\w+)", span):
            fields = TrainingConfig.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
            assert key in {field.alias or name for name, field in fields.items()}, span
