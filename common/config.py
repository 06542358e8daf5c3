"""Strict, typed configuration: YAML files, `key.path=value` overrides, errors that name the key and the fix.

A config section is a subclass of `Config`. Unknown keys are refused with the nearest known one, and no value changes
its type silently: PyYAML's reading of `1e-3` (a string) is accepted as the number that was meant, its reading of `off`
(false) is refused where a word or a number is meant.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from common.errors import UserError

C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """Base of every config section: frozen, unknown keys forbidden, defaults validated."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, validate_by_name=True, serialize_by_alias=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_silent_booleans(cls, value: Any, info: Any) -> Any:
        """Refuse a boolean where a number is meant, and anything but a boolean where one is meant."""
        accepted = _leaf_types(cls.model_fields[info.field_name].annotation)
        if isinstance(value, bool) and bool not in accepted and accepted & {int, float}:
            raise ValueError(f"{str(value).lower()} is not a number")
        if accepted <= {bool, type(None)} and not isinstance(value, bool | None):
            raise ValueError(f"{value!r} is neither true nor false")
        return value


def _leaf_types(annotation: Any) -> set[Any]:
    """The plain types that an annotation such as `int | None` admits."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*(_leaf_types(a) for a in typing.get_args(annotation)))
    if typing.get_origin(annotation) is typing.Annotated:
        return _leaf_types(typing.get_args(annotation)[0])
    return {annotation}


class _UniqueKeyLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses a key given twice instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
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
    tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
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


def validate(cls: type[C], tree: dict[str, Any], where: str) -> C:
    """Build `cls` from plain data; the first problem becomes a one-line `UserError` that names the key."""
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # An unknown key explains what else is wrong (a misspelt key is also a missing one), so it goes first.
        problems.sort(key=lambda p: p["type"] != "extra_forbidden")
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"{where}: {_describe(cls, problems[0])}{more}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _describe(cls: type[BaseModel], problem: Any) -> str:
    # pydantic adds the tag of a union member or a validator function to the location; only field names are ours.
    location = [str(part) for part in problem["loc"] if "[" not in str(part)]
    key = ".".join(location) or "config"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(cls, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        prefix = "".join(f"{part}." for part in location[:-1])
        hint = f"did you mean '{prefix}{near[0]}'?" if near else f"known here: {', '.join(sorted(known))}"
        return f"unknown key '{key}'; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"'{key}' is required"
    if problem["type"] == "value_error":
        return f"'{key}': {message}" if location else message
    return f"'{key}': {_decapitalise(message)}, got {problem['input']!r}"


def _fields_at(cls: type[BaseModel], location: list[str]) -> list[str]:
    """Names of the keys of the section at `location`."""
    for part in location:
        field = next((f for n, f in cls.model_fields.items() if part in (n, f.alias)), None)
        inner = [t for t in _leaf_types(field.annotation if field else None) if _is_section(t)]
        inner += [
            a for t in _leaf_types(field.annotation if field else None) for a in typing.get_args(t) if _is_section(a)
        ]
        if inner:
            cls = inner[0]
    return [field.alias or name for name, field in cls.model_fields.items()]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _decapitalise(text: str) -> str:
    return text[:1].lower() + text[1:]


def _kind(value: Any) -> str:
    return {list: "list", str: "string", int: "number", float: "number", bool: "boolean"}.get(type(value), "value")


def _copy(tree: Any) -> Any:
    return {key: _copy(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
