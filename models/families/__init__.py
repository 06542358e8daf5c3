"""Published architectures whose models come from and go to Hugging Face folders. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.errors import UserError
from models.config import ModelConfig
from models.families.family import Family
from models.families.table import FAMILIES
from models.families.weights import Export, Import, Piece

__all__ = ["FAMILIES", "Export", "Family", "Import", "Piece", "family_for", "read_folder_config"]


def read_folder_config(hf: Mapping[str, Any], where: str) -> tuple[Family, ModelConfig]:
    """The family and our config that the content of a config.json describes.

    Raises:
        UserError: names `where` and the model_type, or the setting, that is not supported.
    """
    family = FAMILIES.get(str(hf.get("model_type")))
    if family is None:
        found = json.dumps(hf.get("model_type"), default=str)
        raise UserError(f"{where}: model_type {found} is not supported; import one of {', '.join(FAMILIES)}")
    return family, family.read_config(hf, where)


def family_for(config: ModelConfig) -> Family:
    """The family whose published architecture this is.

    Raises:
        UserError: there is none; names the keys in which the nearest one differs.
    """
    config = config.with_vocab_size(config.vocab)  # which says so while a tokenizer is still to give it
    sparse = config.moe is not None
    found = {family: family.differences(config) for family in FAMILIES.values() if family.sparse == sparse}
    nearest = min(found, key=lambda family: len(found[family]))
    if found[nearest]:
        what = ", ".join(f"model.{key}: {_shown(config, key)}" for key in found[nearest])
        raise UserError(
            f"no Hugging Face class has {what} (nearest: {nearest.model_type}); "
            f"only models of {', '.join(FAMILIES)} can be exported"
        )
    return nearest


def _shown(config: ModelConfig, key: str) -> str:
    value: Any = config.model_dump()
    for part in key.split("."):
        value = value[part]
    return value if isinstance(value, str) else json.dumps(value)
