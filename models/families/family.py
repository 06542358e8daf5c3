"""A published architecture: the keys of its config.json and the names of its tensors, beside ours. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.config import validate
from common.errors import UserError
from models.config import ModelConfig
from models.families.codecs import Codec, Key, meanings, refused
from models.families.weights import Export, Import, Rule, exports, imports, within

# Settings that change any model, and the value that leaves it as it is.
_NEVER: dict[str, Any] = {"quantization_config": None, "per_layer_config": None, "is_encoder_decoder": False}
# Written as null, since a class may have others of its own than the tokenizer; the exchange fills them in.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, eq=False)
class Family:
    """Data alone; see `models/families/table.py`."""

    model_type: str
    architecture: str
    """The class in transformers."""
    keys: tuple[Codec, ...]
    """What a config may choose."""
    fixed: Mapping[str, Any]
    """Our keys that the architecture settles, where it is not by our defaults."""
    outside: Mapping[str, Rule]
    """Their names of tensors outside of blocks to ours; see `models/families/weights.py`."""
    blocks: str
    """Their name of the list of blocks, with its point."""
    block: Mapping[str, Rule]
    """Names within a block. Those that a model has not are passed over."""
    demanded: Mapping[str, Any] = field(default_factory=dict)
    """Keys of theirs that we follow at one value only."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Keys of theirs that mean nothing to us, and must not be left to their default."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of their keys."""
    without_meaning: str = r"\.rotary_emb\.inv_freq$|^lm_head\.weight$"
    """What `ignored` looks for."""

    @property
    def sparse(self) -> bool:
        """Whether its models have experts."""
        return any(isinstance(key, Key) and key.ours.startswith("moe.") for key in self.keys)

    def read_config(self, hf: Mapping[str, Any], where: str) -> ModelConfig:
        """Our config from the content of a config.json; `UserError` names `where` and what is not supported."""
        content = {self.aliases.get(key, key): value for key, value in hf.items()}
        for key, only in {**_NEVER, **self.demanded}.items():
            value = content.get(key, only)
            if value != only and (value or only):
                raise refused(where, key, value, f"{key}: {json.dumps(only)}")
        values = dict(self.fixed)
        try:
            for codec in self.keys:
                values |= codec.read(content, where)
        except (TypeError, ArithmeticError) as error:
            raise UserError(f"{where}: a value is of no use ({error}); give the file of these weights") from None
        if values.get("attention_window") is None:
            values.pop("rope_theta_local", None)
        tree: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
        if self.sparse:
            tree["moe"] = {key.removeprefix("moe."): value for key, value in values.items() if "." in key}
        return validate(ModelConfig, tree, where)

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """The content of a config.json, without the type of the weights; for a config of this family."""
        content: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for codec in self.keys:
            content |= codec.write(config)
        return {**content, **self.demanded, **self.written, **dict.fromkeys(_TOKENS)}

    def differences(self, config: ModelConfig) -> list[str]:
        """Our keys whose meaning this family's config.json would not bring back."""
        ours = meanings(config)
        try:
            back = meanings(self.read_config(self.write_config(config), "config.json"))
        except UserError:
            return list(ours)
        return [key for key, value in ours.items() if value != back.get(key)]

    def exports(self, config: ModelConfig) -> list[Export]:
        """All tensors of their files, from ours."""
        return exports(self._rules(config), config)

    def imports(self, config: ModelConfig) -> list[Import]:
        """All our tensors, from theirs, whose names are the `canonical` ones."""
        return imports(self._rules(config), config)

    def canonical(self, name: str) -> str:
        """A tensor's name in a file of the whole model, from that in one of a model without its head."""
        prefix = self.blocks.partition(".")[0] + "."
        return name if name.startswith((prefix, "lm_head.")) else prefix + name

    def ignored(self, name: str) -> bool:
        """Whether a tensor of their files that no import reads carries nothing: tables, a tied head, or heads that
        predict further tokens."""
        return re.search(self.without_meaning, name) is not None

    def _rules(self, config: ModelConfig) -> dict[str, Rule]:
        rules = dict(self.outside)
        for i in range(config.n_layers):
            rules |= {f"{self.blocks}{i}.{theirs}": within(f"blocks.{i}.", rule) for theirs, rule in self.block.items()}
        return rules
