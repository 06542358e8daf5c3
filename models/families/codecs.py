"""Keys of a config.json beside ours, each way. What is settled here holds for every family; imports no torch.

Defaults are those of the published classes, for files that leave a key out. A codec has two methods: `read(hf, where)`
gives our keys (`moe.top_k` is a section's) and their values from the content of a config.json, `write(config)` theirs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from common.errors import UserError
from models.config import ModelConfig, RopeScaling

REQUIRED: Any = object()  # instead of a default, for sizes: a number must be there
FULL, SLIDING = "full_attention", "sliding_attention"


class Codec(Protocol):
    """One key or some that belong together; see above."""

    def read(self, hf: dict[str, Any], where: str) -> dict[str, Any]: ...

    def write(self, config: ModelConfig) -> dict[str, Any]: ...


def refused(where: str, key: str, value: Any, only: str) -> UserError:
    """The one line for a setting that this project's model cannot follow."""
    return UserError(f"{where}: {key}: {json.dumps(value, default=str)} is not supported; import a model with {only}")


class Key(NamedTuple):
    """A value that both have, under two names."""

    ours: str
    theirs: str
    default: Any = REQUIRED
    """Where the file leaves it out. A function is given the file's content, and answers for null as well."""
    to_ours: Callable[[Any], Any] = lambda value: value
    """Raises `KeyError` for what we have not."""
    to_theirs: Callable[[Any], Any] = lambda value: value

    def read(self, hf: dict[str, Any], where: str) -> dict[str, Any]:
        value = hf.get(self.theirs, None if callable(self.default) or self.default is REQUIRED else self.default)
        if self.default is REQUIRED and not isinstance(value, int | float):
            found = json.dumps(value, default=str)
            raise UserError(f"{where}: '{self.theirs}' must be a number, got {found}; give the file of these weights")
        try:
            if value is None and callable(self.default):
                value = self.default(hf)
            return {self.ours: self.to_ours(value)}
        except (KeyError, TypeError, ArithmeticError):
            raise refused(where, self.theirs, value, f"another {self.theirs}") from None

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {self.theirs: self.to_theirs(value_of(config, self.ours))}


class Rope(NamedTuple):
    """Rotary positions: `rope_theta`, `rope_scaling` and their kin, or all in `rope_parameters` (transformers 5).

    Written in the older spelling, which transformers 5 reads too.
    """

    theta: float = 10000.0
    theta_local: float | None = None
    """Not None in a family whose blocks with a window have a base of their own, and are not scaled."""
    fraction: float | None = None
    """Not None in a family that rotates a part of each head: the part where a file says nothing."""
    scaling: dict[str, Any] | None = None
    """What a file without scaling means, if not none."""
    kinds: tuple[str, ...] = ("linear", "llama3", "yarn")

    def read(self, hf: dict[str, Any], where: str) -> dict[str, Any]:
        old, new = (_section(hf, key, where) for key in ("rope_scaling", "rope_parameters"))
        rope, found = old or new or self.scaling or {}, {}
        name = "rope_scaling" if old else "rope_parameters"
        if self.theta_local is not None:
            rope, local = {**_section(new, FULL, where), **old}, _section(new, SLIDING, where)
            if (kind := local.get("rope_type", local.get("type", "default"))) != "default":
                raise refused(where, f"rope_parameters.{SLIDING}.rope_type", kind, "default")
            found["rope_theta_local"] = local.get("rope_theta", hf.get("rope_local_base_freq", self.theta_local))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", *self.kinds):
            raise refused(where, f"{name}.rope_type", kind, " or ".join(("default", *self.kinds)))
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SCALING.values()}
        for key in rope.keys() - known:
            if rope[key] is not None:
                raise refused(where, f"{name}.{key}", rope[key], f"no {key}")
        part = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", self.fraction))
        if self.fraction is None and part not in (None, 1):
            raise refused(where, "partial_rotary_factor", part, "1")
        if self.fraction is not None:
            found["rope_fraction"] = part
        found["rope_theta"] = rope.get("rope_theta", hf.get("rope_theta", self.theta))
        if kind != "default":
            # One that stands outside of the section wins, and the longest sequence is what is meant by none.
            original = hf.get(_ORIGINAL, rope.get(_ORIGINAL, hf.get("max_position_embeddings")))
            rope = {**rope, "rope_type": kind, _ORIGINAL: original}
            found["rope_scaling"] = {ours: rope.get(_SCALING[ours]) for ours in _READ_BY[kind]}
        return found

    def write(self, config: ModelConfig) -> dict[str, Any]:
        scaling, section = config.rope_scaling, None
        if scaling is not None:
            values = {**_with_defaults(scaling), "attention_factor": scaling.attention_factor}
            section = {_SCALING[key]: values[key] for key in _READ_BY[scaling.kind] if values[key] is not None}
        elif self.scaling is not None:
            section = {"rope_type": "default"}
        written = {"rope_theta": config.rope_theta, "rope_scaling": section}
        if self.theta_local is not None:
            written["rope_local_base_freq"] = config.rope_theta_local or config.rope_theta
        if self.fraction is not None:
            written["partial_rotary_factor"] = config.rope_fraction
        return written


_ORIGINAL = "original_max_position_embeddings"
_SCALING = {  # keys of our section to theirs
    "kind": "rope_type",
    "original_max_seq_len": _ORIGINAL,
    **{key: key for key in RopeScaling.model_fields if key not in ("kind", "original_max_seq_len")},
}
_LLAMA3 = ("kind", "factor", "original_max_seq_len", "low_freq_factor", "high_freq_factor")
_YARN = ("kind", "factor", "original_max_seq_len", "beta_fast", "beta_slow", "truncate", "attention_factor")
_READ_BY = {"linear": ("kind", "factor"), "llama3": _LLAMA3, "yarn": _YARN}


class Windows(NamedTuple):
    """Which blocks see how far: `sliding_window`, and `layer_types` where blocks may differ."""

    default: int | None
    """Tokens, where a file does not say."""
    every: int | None = None
    """Not None in a family with `layer_types`: a file without them means that every n-th block sees all tokens."""
    switch: str | None = None
    """A key without which being true there is no window."""

    def read(self, hf: dict[str, Any], where: str) -> dict[str, Any]:
        window, n_layers = hf.get("sliding_window", self.default), hf.get("num_hidden_layers")
        if self.switch is not None and not hf.get(self.switch, False):
            window = None
        if self.every is None:
            return {"attention_window": window}
        if type(n_layers) is not int:  # which will be said
            return {}
        types = hf.get("layer_types")
        if not isinstance(types, list | None):
            raise refused(where, "layer_types", types, "a list")
        if types is None and self.switch is not None:  # Qwen 3: the first ones see all, if there is a window
            n_full = n_layers if window is None else min(hf.get("max_window_layers", 28), n_layers)
            types = [FULL] * n_full + [SLIDING] * (n_layers - n_full)
        elif types is None:
            types = _types(hf.get("sliding_window_pattern", self.every), n_layers)
        every = types.index(FULL) + 1 if FULL in types else None
        if types != _types(every, n_layers):
            raise refused(where, "layer_types", types, f"{FULL} in every n-th layer, {SLIDING} in the others")
        if every == 1:
            return {}
        if window is None:
            raise refused(where, "sliding_window", window, f"a number, since layer_types has {SLIDING}")
        return {"attention_window": window, "attention_global_every": every}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        window = config.attention_window
        written: dict[str, Any] = {"sliding_window": window}
        if self.switch is not None:
            written[self.switch] = window is not None
        if self.every is not None:
            every = 1 if window is None else config.attention_global_every
            written["layer_types"] = _types(every, config.n_layers)
            if window is None and self.switch is None:  # transformers wants a number, if only to make an unused mask
                written["sliding_window"] = config.max_seq_len
        return written


def _types(every: int | None, n_layers: int) -> list[str]:
    return [FULL if every and (i + 1) % every == 0 else SLIDING for i in range(n_layers)]


class DenseList:
    """Which blocks have an MLP, as Qwen3-MoE writes it."""

    def read(self, hf: dict[str, Any], where: str) -> dict[str, Any]:
        step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
        if step != 1:
            raise refused(where, "decoder_sparse_step", step, "1")
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            raise refused(where, "mlp_only_layers", dense, "none, or the first ones")
        return {"moe.n_dense_layers": len(dense)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {"decoder_sparse_step": 1, "mlp_only_layers": list(range(value_of(config, "moe.n_dense_layers")))}


def _section(hf: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = hf.get(key) or {}
    if not isinstance(value, dict):
        raise refused(where, key, value, f"a section of keys as {key}")
    return value


def _with_defaults(scaling: RopeScaling) -> dict[str, Any]:
    """Every key of the section, with what is left out filled in as `models/positions.py` does."""
    filled: dict[str, Any] = {
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
    }.get(scaling.kind, {})
    if scaling.kind == "yarn":
        filled["attention_factor"] = 0.1 * math.log(scaling.factor) + 1.0
    return {**scaling.model_dump(), **filled, **scaling.model_dump(exclude_none=True)}


_FILLED_IN: dict[str, Callable[[ModelConfig], Any]] = {  # keys whose meaning is not the value alone
    "n_kv_heads": lambda c: c.kv_heads,
    "head_dim": lambda c: c.d_head,
    "activation_limit": lambda c: c.activation_limit or (7.0 if c.activation == "swiglu_clamped" else None),
    "rope_fraction": lambda c: c.d_rotated,
    "rope_scaling": lambda c: None if c.rope_scaling is None else _with_defaults(c.rope_scaling),
    "rope_theta_local": lambda c: (
        None if c.rope_theta_local == c.rope_theta and c.rope_scaling is None else c.rope_theta_local
    ),
    "attention_out_bias": lambda c: c.attention_bias if c.attention_out_bias is None else c.attention_out_bias,
    "attention_scale": lambda c: c.d_head**-0.5 if c.attention_scale is None else c.attention_scale,
    "attention_window": lambda c: c.attention_window if any(map(c.window_of, range(c.n_layers))) else None,
    "attention_global_every": lambda c: (
        [i for i in range(c.n_layers) if c.window_of(i) is None] if any(map(c.window_of, range(c.n_layers))) else None
    ),
    "moe.d_ff": lambda c: c.d_ff_expert,
}


def value_of(config: ModelConfig, key: str) -> Any:
    """What a key means, filled in where it is left out."""
    if key in _FILLED_IN:
        return _FILLED_IN[key](config)
    section, _, leaf = key.rpartition(".")
    return getattr(config.moe if section else config, leaf)


def meanings(config: ModelConfig) -> dict[str, Any]:
    """All that decides what a model computes: two configs with the same meanings are the same function of weights."""
    keys = ModelConfig.model_fields.keys() - {"preset", "init_from", "init_std", "mup_base_width", "moe"}
    idle = set() if config.position == "rope" else {"rope_theta", "rope_theta_local", "rope_scaling", "rope_fraction"}
    idle |= set() if config.position == "relative" else {"relative_clip"}
    if config.moe is not None:
        training = {"aux_loss_coef", "aux_loss_over", "z_loss_coef", "bias_update_rate"}
        keys |= {f"moe.{key}" for key in type(config.moe).model_fields.keys() - training}
        idle |= set() if config.moe.n_dense_layers else {"d_ff"}
    return {key: value_of(config, key) for key in sorted(keys - idle)}
