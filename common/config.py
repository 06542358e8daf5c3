"""Strict, typed configuration: YAML files, `key.path=value` overrides, errors that name the key and the fix.

A config section is a subclass of `Config`. Unknown keys are refused with the nearest known one, and no value changes
its type silently: PyYAML's reading of `1e-3` (a string) is accepted as the number that was meant, its reading of `off`
(false) is refused where a word or a number is meant.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from common.errors import UserError

C = TypeVar("C", bound="Config")

# What PyYAML takes for a string though a number is meant: an exponent without a point or without a sign.
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_YAML_BOOLEANS = "YAML reads on, off, yes and no so; put the word in quotes if it is meant"
# pydantic's kinds of a wrong type, in the words of a config file.
_WRONG_TYPES = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a word (in quotes, where YAML reads something else)",
    "model_type": "must be a section of keys",
    "dict_type": "must be a section of keys",
    "tuple_type": "must be a list",
    "invalid_key": "keys must be words",
}


class Config(BaseModel):
    """Base of every config section: frozen, unknown keys forbidden, defaults validated."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, serialize_by_alias=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_silent_changes(cls, value: Any, info: Any) -> Any:
        """Keep pydantic from turning booleans and words into numbers, and numbers and words into booleans."""
        accepted = _leaf_types(cls.model_fields[info.field_name].annotation)
        if isinstance(value, list):
            return [_checked(element, accepted) for element in value]
        return _checked(value, accepted)


def _checked(value: Any, accepted: set[Any]) -> Any:
    """The value, with `1e-3` made a number; `ValueError` for one that is none of the `accepted` plain types."""
    number = bool(accepted & {int, float})
    if isinstance(value, bool) and bool not in accepted:
        what = "a number" if number else "a word"
        raise ValueError(f"must be {what}, got {_shown(value)}{'' if number else f' ({_YAML_BOOLEANS})'}")
    if isinstance(value, str) and number and str not in accepted:
        if not _NUMBER.fullmatch(value):
            raise ValueError(f"must be a number, got {value!r}")
        return float(value)
    if accepted <= {bool, type(None)} and not isinstance(value, bool | None):
        raise ValueError(f"must be true or false, got {_shown(value)}")
    return value


def _leaf_types(annotation: Any) -> set[Any]:
    """The plain types that an annotation such as `int | None` or `list[int]` admits, one by one or in a list."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, list):
        return set().union(*(_leaf_types(a) for a in typing.get_args(annotation)))
    if typing.get_origin(annotation) is typing.Annotated:
        return _leaf_types(typing.get_args(annotation)[0])
    return {annotation}


class _UniqueKeyLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses a key given twice instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; a syntax error becomes a `UserError` that names `where` and the line."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(f"{where}{line}: not valid YAML: {problem}") from None


def read_tree(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping."""
    if not path.is_file():
        raise UserError(f"{path}: no such config file; see configs/ for examples")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; mend its permissions") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}; save it as UTF-8") from None
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: the top level must be sections such as 'model:' and 'train:', not a {_kind(tree)}")
    return tree


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `tree` with `key.path=value` words applied, values read as YAML."""
    result = _copy(tree)
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"override '{word}' is not of the form key.path=value, for example train.steps=100")
        *parents, leaf = key.split(".")
        section = result
        for depth, parent in enumerate(parents, start=1):
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise UserError(f"override '{word}': '{'.'.join(parents[:depth])}' is a value, not a section")
        section[leaf] = parse_yaml(text, f"override '{word}'")
    return result


def validate(cls: type[C], tree: dict[str, Any], where: str, overrides: Iterable[str] = ()) -> C:
    """Build `cls` from plain data; the first problem becomes a one-line `UserError` that names the key.

    Args:
        where: where the data is from, usually a file.
        overrides: the words that were laid over it; one that brought the problem in is named instead of `where`.
    """
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # An unknown key explains what else is wrong (a misspelt key is also a missing one), so it goes first.
        problems.sort(key=lambda p: p["type"] != "extra_forbidden")
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        guilty = [word for word in overrides if _brings_in(word.partition("=")[0], problems[0])]
        source = f"override '{guilty[-1]}'" if guilty else where
        raise UserError(f"{source}: {_describe(cls, problems[0])}{more}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _location(problem: Any) -> list[str]:
    # pydantic adds the tag of a union member or a validator function to the location; only field names are ours.
    return [str(part) for part in problem["loc"] if "[" not in str(part)]


def _brings_in(key: str, problem: Any) -> bool:
    """Whether an override of `key` is what a problem is about."""
    place = ".".join(_location(problem)) + "."
    return place.startswith(f"{key}.") or (problem["type"] == "extra_forbidden" and key.startswith(place))


def _describe(cls: type[BaseModel], problem: Any) -> str:
    location = _location(problem)
    key = ".".join(location) or "config"
    kind, message = problem["type"], problem["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return f"unknown key '{key}'; {_hint(cls, location)}"
    if kind == "missing":
        return f"'{key}' is required"
    if kind == "value_error":
        return f"'{key}': {message}" if location else message
    message = _WRONG_TYPES.get(kind, message.replace("Input should be", "must be"))
    return f"'{key}': {message}, got {_shown(problem['input'])}"


def _hint(cls: type[BaseModel], location: list[str]) -> str:
    """What may have been meant by an unknown key: the nearest of its section, or the same word in another one."""
    *parents, word = location
    known = _fields_at(cls, parents)
    if near := difflib.get_close_matches(word, known, n=1, cutoff=0.65):
        return f"did you mean '{'.'.join([*parents, near[0]])}'?"
    for section in _fields_at(cls, []):
        if word in _fields_at(cls, [section]):
            return f"did you mean '{section}.{word}'?"
    return f"known here: {', '.join(sorted(known))}"


def _shown(value: Any) -> str:
    """A value as it would stand in a config file, cut if it is long."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fields_at(cls: type[BaseModel], location: list[str]) -> list[str]:
    """Names of the keys of the section at `location`."""
    for part in location:
        field = next((f for n, f in cls.model_fields.items() if part == (f.alias or n)), None)
        if field is None:  # the key of a dictionary of sections, which `cls` has become already
            continue
        leaves = _leaf_types(field.annotation)
        inner = [t for leaf in leaves for t in (leaf, *typing.get_args(leaf)) if _is_section(t)]
        if not inner:
            return []
        cls = inner[0]
    return [field.alias or name for name, field in cls.model_fields.items()]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _kind(value: Any) -> str:
    return {list: "list", str: "string", int: "number", float: "number", bool: "boolean"}.get(type(value), "value")


def _copy(tree: Any) -> Any:
    return {key: _copy(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
