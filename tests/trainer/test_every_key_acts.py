"""No key is decoration: changing it alone changes the operators that run, the files that are left, or the output."""

from __future__ import annotations

import json
import random
import shutil
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config
from common.errors import UserError
from tests.data.tokenizers_of_every_kind import byte_level_bpe
from tests.datasets import make_dataset, random_texts
from tests.gang import Gang
from tests.observe import Seen, differences, observe
from tests.trainer.exchange.checkpoints import random_checkpoint
from tests.trainer.key_changes import BASE, CHANGES, EXCEPTIONS, UNSET, Change
from trainer.config import TrainingConfig, load_config

MISSING = (
    "config keys without an entry in CHANGES of tests/trainer/key_changes.py: {}. Give each two values (and what else "
    "must be set) that make a run differ; if nothing can ever show what the key does, ask whether it is needed"
)


def leaves(section: type[Config], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and annotation of every key under a section, also of sections in dictionaries, by their keys."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if typing.get_origin(field.annotation) is dict and typing.get_args(field.annotation)[1] is not Any:
            names, inner = typing.get_args(field.annotation)
            for entry in typing.get_args(names):
                yield from leaves(inner, f"{key}.{entry}.")
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            yield from leaves(field.annotation, f"{key}.")
        else:
            yield key, field.annotation
            if section_or_none := _optional_section(field.annotation):
                yield from leaves(section_or_none, f"{key}.")


def _optional_section(annotation: Any) -> type[Config] | None:
    """The section of a key that may be null."""
    for part in typing.get_args(annotation) if isinstance(annotation, types.UnionType) else ():
        if isinstance(part, type) and issubclass(part, Config):
            return part
    return None


KEYS = dict(leaves(TrainingConfig))


def alternatives(annotation: Any) -> tuple[str, ...]:
    """All values of a boolean or of a list of words, as YAML; with null, where that is one of them, left out."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # the second, of a list of words or null
        (annotation,) = (part for part in typing.get_args(annotation) if part is not types.NoneType)
    if annotation is bool:
        return "false", "true"
    assert typing.get_origin(annotation) is typing.Literal, f"give the values: {annotation} has no list of them"
    return typing.get_args(annotation)


class Runs:
    """Runs of BASE with overrides, each made once."""

    def __init__(self, gang: Gang, folder: Path) -> None:
        self._gang, self._folder = gang, folder
        self._seen: dict[str, Seen] = {}
        self.newest = folder  # the folder of the run that was made last
        self.config = folder / "base.yaml"
        self.config.write_text(BASE, encoding="utf-8")
        (folder / "inputs").mkdir()
        write_corpora(folder / "inputs")
        write_data(folder / "inputs")
        self._defaults = load_config(self.config).tree()
        self._prepared: Path | None = None
        self.run([[]])
        self._prepared = self.newest / "cache"

    def of(self, change: Change, key: str, value: str, again: bool = False) -> Seen:
        """The run with one of a key's values; `again`: another one of the same config."""
        words = [*change.needs]
        if value not in (UNSET, self._default(key)):
            words.append(f"{key}={value}")
        starts = [words] if change.earlier is None else [[*words, *change.earlier], words]
        return self.run(starts, change.world, again=again)

    def run(self, starts: list[list[str]], world: int = 1, again: bool = False, echo: list[str] | None = None) -> Seen:
        name = repr((starts, world, again, echo))
        if name not in self._seen:
            self.newest = self._folder / f"run-{len(self._seen)}"
            self.newest.mkdir()
            (self.newest / "inputs").symlink_to(self._folder / "inputs")
            if self._prepared:  # half of a run's time; what a key makes other than in BASE comes beside it
                shutil.copytree(self._prepared, self.newest / "cache")
            self._seen[name] = observe(self._gang, self.config, starts, self.newest, world, echo)
        return self._seen[name]

    def _default(self, key: str) -> str | None:
        """The value in BASE, as YAML, of a key that may be left out for it."""
        tree: Any = self._defaults
        for part in key.split("."):
            tree = tree.get(part) if isinstance(tree, dict) else None
        return None if tree is None else json.dumps(tree).strip('"')


def write_corpora(folder: Path) -> None:
    """Two files of sixty documents with two texts in each, all different."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 7))) for _ in range(60)]
    for name in ("corpus", "other"):
        texts = [[" ".join(generator.choices(words, k=30)) for _ in range(2)] for _ in range(60)]
        lines = [json.dumps({"text": text, "title": title}) + "\n" for text, title in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_data(folder: Path) -> None:
    """Two dataset folders, two tokenizer files, two checkpoints of the model of BASE, and two files of DeepSpeed's."""
    for number, name in enumerate(("a", "b")):
        make_dataset(folder / name, random_texts(number, 60), held_out=0.2)
        random_checkpoint(folder / f"weights-{name}", seed=number, **yaml.safe_load(BASE)["model"], vocab_size=300)
    for number, name in enumerate(("one", "two")):
        text = byte_level_bpe(random_texts(number, 60)).to_str()
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    for name, size in (("a", 500), ("b", 50_000)):
        zero = {"zero_optimization": {"stage": 2, "reduce_bucket_size": size}}
        (folder / f"zero-{name}.json").write_text(json.dumps(zero), encoding="utf-8")


@pytest.fixture(scope="module")
def runs(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(gang, tmp_path_factory.mktemp("keys"))


def test_every_key_has_an_entry() -> None:
    known = CHANGES.keys() | EXCEPTIONS.keys()
    assert not (missing := KEYS.keys() - known), MISSING.format(", ".join(sorted(missing)))
    assert not (gone := known - KEYS.keys()), f"no such keys any more, remove their entries: {', '.join(sorted(gone))}"
    assert not CHANGES.keys() & EXCEPTIONS.keys()
    assert len(EXCEPTIONS) <= 5, "too many keys that nothing shows to act"
    assert all(EXCEPTIONS.values())


def test_the_keys_are_those_of_a_resolved_config() -> None:
    """Found another way: in the tree of one, where no role of parameters is set."""

    def names(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                yield from names(value, f"{prefix}{key}.")
            else:
                yield prefix + key

    of_tree = set(names(TrainingConfig().tree()))
    assert len(of_tree) > 60
    absent = ("optim.roles.", *(f"{key}." for key, annotation in KEYS.items() if _optional_section(annotation)))
    assert {key for key in KEYS if not key.startswith(absent)} == of_tree - {"optim.roles"}
    assert {key.split(".")[2] for key in KEYS if key.startswith("optim.roles.")} >= {"embedding", "head", "vector"}


@pytest.mark.parametrize("key", sorted(KEYS.keys() - EXCEPTIONS.keys()))
def test_key_acts(runs: Runs, key: str) -> None:
    """Two runs without the key show no difference, and any two of its values show one.

    Were runs with it not alike, that would be its doing. Where it cannot be left out, two of its first value are alike.
    """
    assert key in CHANGES, MISSING.format(key)
    change = CHANGES[key]
    first, *others = values = change.values or alternatives(KEYS[key])
    assert others, "one value makes no difference"
    left_out = runs.of(change, key, UNSET).output[0] == "exit code 0"
    twice = (runs.of(change, key, UNSET if left_out else first, again) for again in (False, True))
    again = differences(*twice)
    assert again == [], "runs of the same config differ, so that a difference would tell nothing"
    for i, value in enumerate(values):
        for other in values[i + 1 :]:
            assert differences(runs.of(change, key, value), runs.of(change, key, other)), (
                f"{key}={value or '(unset)'} and {key}={other} gave the same operators, files and output"
            )


def test_what_is_only_written_down_is_not_seen(runs: Runs) -> None:
    """A run that follows BASE, and writes down a config in which most keys differ, is seen as a run of BASE.

    So is a key that nothing reads: it would be recorded, and act no more than these do.
    """
    echo: list[str] = []
    for key, change in CHANGES.items():
        if change.world == 1 and change.earlier is None:
            value = (change.values or alternatives(KEYS[key]))[-1]
            words = [*echo, *change.needs, f"{key}={value}"]
            try:
                load_config(runs.config, words)
            except UserError:  # keys that exclude one another
                continue
            echo = words
    assert len({word.partition("=")[0] for word in echo}) > 50
    assert differences(runs.run([[]]), runs.run([[]], echo=echo)) == []
    written = yaml.safe_load((runs.newest / "runs" / "base" / "config.yaml").read_text(encoding="utf-8"))
    assert written == load_config(runs.config, echo).tree()
