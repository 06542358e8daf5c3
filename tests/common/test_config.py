"""Strict configuration: what is refused, in which words, and what is read as what."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from common.config import Config, apply_overrides, parse_yaml, read_tree, validate
from common.errors import UserError


class Inner(Config):
    """A section."""

    rate: float = Field(0.1, gt=0)
    word: Literal["on", "off"] = "on"


class Outer(Config):
    """A tree."""

    count: int = 1
    flag: bool = False
    text: str | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    background: bool = Field(True, alias="async")
    inner: Inner = Inner()


def load(text: str, *overrides: str) -> Outer:
    return validate(Outer, apply_overrides(parse_yaml(text, "a.yaml"), overrides), "a.yaml", overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont: 3", "a.yaml: unknown key 'cuont'; did you mean 'count'?"),
        ("inner: {rat: 3}", "a.yaml: unknown key 'inner.rat'; did you mean 'inner.rate'?"),
        ("rate: 3", "unknown key 'rate'; did you mean 'inner.rate'?"),
        ("inner: {zzz: 3}", "unknown key 'inner.zzz'; known here: rate, word"),
        ("background: true", "unknown key 'background'"),  # the attribute's name is no second name of the key
        ("count: many", "'count': must be a number, got 'many'"),
        ("count: '5'", "'count': must be a number, got '5'"),
        ("count: 1.5", "'count': must be a whole number, got 1.5"),
        ("count: true", "'count': must be a number, got true"),
        ("count: off", "'count': must be a number, got false"),
        ("count: {a: 1}", "'count': must be a whole number"),
        ("pair: [0.5, true]", "'pair': must be a number, got true"),
        ("inner: {rate: .inf}", "'inner.rate': must be a finite number"),
        ("inner: {rate: 0}", "'inner.rate': must be greater than 0, got 0"),
        ("inner: {word: off}", "'inner.word': must be a word, got false (YAML reads on, off, yes and no so"),
        ("inner: {word: maybe}", "'inner.word': must be 'on' or 'off', got 'maybe'"),
        ("flag: 1", "'flag': must be true or false, got 1"),
        ("flag: 'yes'", "'flag': must be true or false, got 'yes'"),
        ("text: 5", "'text': must be a word (in quotes, where YAML reads something else), got 5"),
        ("inner: 3", "'inner': must be a section of keys, got 3"),
        ("3: 4", "keys must be words"),
    ],
)
def test_refused_values(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(text)
    assert message in str(caught.value)


def test_values_that_yaml_reads_otherwise() -> None:
    """`1e-3` is a string to PyYAML; a whole float is a whole number; quotes keep a word a word."""
    config = load("{count: 1e3, inner: {rate: 1e-3, word: 'off'}, flag: on, pair: [1E-2, 1], async: no, text: '5'}")
    assert (config.count, config.inner.rate, config.inner.word, config.flag) == (1000, 0.001, "off", True)
    assert (config.pair, config.background, config.text) == ((0.01, 1.0), False, "5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\n", "a.yaml, line 3: not valid YAML"),
        ("count: 1\ncount: 2\n", "a.yaml, line 2: not valid YAML: key 'count' is given twice"),
        ("inner: {rate: 1,\n rate: 2}\n", "line 2: not valid YAML: key 'rate' is given twice"),
        ("? [a, b]\n: 1\n", "line 1: not valid YAML: a key must be a word"),
        ("x: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_text_that_is_no_config(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "a.yaml")
    assert message in str(caught.value)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    for content, message in ((b"- a\n", "the top level must be sections"), (b"a: \xff", "not UTF-8 text at byte 3")):
        (tmp_path / "a.yaml").write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_tree(tmp_path / "a.yaml")
    with pytest.raises(UserError, match="no such config file; see configs/"):
        read_tree(tmp_path)


@pytest.mark.parametrize("word", ["count", "=3", ".count=3", "inner..rate=3"])
def test_malformed_override(word: str) -> None:
    with pytest.raises(UserError, match="is not of the form"):
        load("{}", word)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("inner.rat=3", "override 'inner.rat=3': unknown key 'inner.rat'; did you mean 'inner.rate'?"),
        ("iner.rate=3", "override 'iner.rate=3': unknown key 'iner'; did you mean 'inner'?"),
        ("count=abc", "override 'count=abc': 'count': must be a number"),
        ("count=[1", "override 'count=[1', line 1: not valid YAML"),
        ("count.x=3", "override 'count.x=3': 'count' is a value, not a section"),
    ],
)
def test_wrong_override_is_named(word: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load("{count: 2}", "flag=true", word)
    assert message in str(caught.value)


def test_the_file_is_named_when_it_is_at_fault() -> None:
    with pytest.raises(UserError, match=r"^a.yaml: 'count'"):
        load("{count: x}", "inner.rate=3")


def test_overrides_leave_the_tree_alone_and_the_last_wins() -> None:
    tree = {"inner": {"rate": 1.0}}
    result = apply_overrides(tree, ["inner.rate=2.0", "inner.word=on", "inner.rate=3", "text=a=b"])
    assert tree == {"inner": {"rate": 1.0}}
    assert result == {"inner": {"rate": 3, "word": True}, "text": "a=b"}
