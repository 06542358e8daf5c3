"""Writes docs/configuration.md, and the table of keys in docs/sweeps.md, from the config models: `python
docs/configuration.py`. Imports no torch."""

from __future__ import annotations

import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the packages of this checkout, whatever is installed

from pydantic.fields import FieldInfo  # noqa: E402
from pydantic_core import PydanticUndefined  # noqa: E402

from common.config import Config  # noqa: E402
from launch.slurm.cluster import ClusterConfig  # noqa: E402
from models.config import ModelConfig, load_preset, preset_names  # noqa: E402
from optim.config import OPTIONS  # noqa: E402
from scaling.sweepfile import SweepConfig  # noqa: E402
from trainer.config import TrainingConfig  # noqa: E402

PAGE = Path(__file__).with_name("configuration.md")
SWEEPS = Path(__file__).with_name("sweeps.md")

HEADER = """\
# Configuration

<!-- Written by docs/configuration.py from the config models. Change the descriptions there, not here. -->

A config is a YAML file of sections; [configs/](../configs) has runnable ones. Every key has a default, and an unknown
key is an error that names the nearest known one. Words of the form `key.path=value` on the command line are laid over
the file, their values read as YAML:

    gramian train configs/quickstart.yaml run.name=wide model.d_model=256 optim.betas='[0.9, 0.98]'

`1e-3` is read as a number, though YAML makes it a string. A boolean (also YAML's reading of `off` and `no`) is refused
where a number or a word is meant. `gramian train CONFIG --dry-run` prints the resolved config, the mesh, the batch
arithmetic and the size of the model, and stops.

Which keys a run may change between two starts is in [checkpoints.md](checkpoints.md).
"""

CLUSTER = """
## Cluster files

What `gramian slurm submit --cluster FILE` reads, see [slurm.md](slurm.md). None of these keys changes what is trained.

"""

TABLE = "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
_TYPES: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true or false"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def main() -> None:
    """Write the page and the table."""
    PAGE.write_text(page(), encoding="utf-8")
    SWEEPS.write_text(sweeps_page(), encoding="utf-8")


def sweeps_page() -> str:
    """docs/sweeps.md with the table of a sweep's keys as they are now."""
    before, start, rest = SWEEPS.read_text(encoding="utf-8").partition("<!-- keys -->\n")
    _, end, after = rest.partition("<!-- end of keys -->\n")
    return "".join([before, start, TABLE, *rows(SweepConfig, ""), end, after])


def page() -> str:
    """The whole page."""
    parts = [HEADER]
    for name, field in TrainingConfig.model_fields.items():
        parts.append(f"\n## {name}\n\n{field.description}\n\n{TABLE}")
        section, placeholder = inner_section(field.annotation)
        assert section is not None
        if placeholder:
            parts.append(row_of(name, field))
        parts += rows(section, f"{name}.{placeholder}")
        if name == "model":
            parts.append(presets())
        if name == "optim":
            parts.append(optimizer_options())
    parts.append(CLUSTER + TABLE + "".join(rows(ClusterConfig, "")))
    return "".join(parts)


def rows(section: type[Config], prefix: str) -> list[str]:
    """Table rows of a section; those of a section inside it follow under a longer prefix."""
    result: list[str] = []
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        inner, placeholder = inner_section(field.annotation)
        if inner is None or placeholder or field.default is None:
            result.append(row_of(key, field))
        if inner is not None:
            result += rows(inner, f"{key}.{placeholder}")
    return result


def row_of(key: str, field: FieldInfo) -> str:
    """Table row of one key."""
    cells = (f"`{key}`", type_of(field), default_of(field), field.description or "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def inner_section(annotation: Any) -> tuple[type[Config] | None, str]:
    """The section that a field holds, and `<name>.` if it holds one per name or number."""
    for kind in typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,):
        if isinstance(kind, type) and issubclass(kind, Config):
            return kind, ""
    if typing.get_origin(annotation) is dict:
        inner, _ = inner_section(typing.get_args(annotation)[1])
        return inner, "<role>." if inner else ""
    if typing.get_origin(annotation) is list:
        inner, _ = inner_section(typing.get_args(annotation)[0])
        return inner, "<n>."
    return None, ""


def type_of(field: FieldInfo) -> str:
    """A field's type in words, with its choices or its bounds."""
    bounds = [
        f"{sign} {bound_of(getattr(rule, name))}"
        for rule in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return " ".join([in_words(field.annotation), ", ".join(bounds)]).strip()


def bound_of(value: float) -> str:
    """A bound; a power of two that only a machine would count to is written as one."""
    if isinstance(value, int) and value >= 2**31 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:g}"


def in_words(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(a) for a in arguments if a is not type(None))
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is list:
        return f"list of {in_words(arguments[0])}".replace("list of a section", "list of sections")
    if origin is tuple:
        return f"list of {len(arguments)} {in_words(arguments[0])}s"
    if origin is dict:
        return f"sections under {in_words(arguments[0])}" if inner_section(annotation)[0] else "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return "a section"
    return _TYPES[annotation]


def default_of(field: FieldInfo) -> str:
    """A field's default as YAML would have it."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    return f"`{json.dumps(default) if not isinstance(default, str) else default}`"


def presets() -> str:
    """The table of presets."""
    keys = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "max_seq_len", "position", "norm", "activation")
    lines = [
        "\n`model.preset` takes these; a key that is given beside it wins over the preset's.\n",
        f"| preset | {' | '.join(keys)} |",
        f"| --- {'| --- ' * len(keys)}|",
    ]
    for name in preset_names():
        model = ModelConfig.model_validate({**load_preset(name), "preset": name})
        values = [model.kv_heads if key == "n_kv_heads" else getattr(model, key) for key in keys]
        lines.append(f"| `{name}` | {' | '.join(str(value) for value in values)} |")
    return "\n".join(lines) + "\n"


def optimizer_options() -> str:
    """The table of what each optimizer takes."""
    lines = [
        "\nKeys that each optimizer takes beside `lr`, `weight_decay` and `roles`, with the value of an absent key. "
        "Any other is refused. [optimizers.md](optimizers.md) has the formulas.\n",
        "| optimizer | keys |",
        "| --- | --- |",
    ]
    for name, options in OPTIONS.items():
        lines.append(f"| `{name}` | {', '.join(f'`{key}` {json.dumps(value)}' for key, value in options.items())} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
