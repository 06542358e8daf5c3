"""A new run's architecture and weights, from where `model.init_from` points. Imports no torch at first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from models.config import ModelConfig
from trainer.exchange.folders import CONFIG, HuggingFaceFolder
from trainer.manifest import read_trainer_state
from trainer.rundir import find_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

# What a run may choose for itself: it is of training, or no weight depends on it.
_FREE = {
    *("init_from", "init_std", "mup_base_width", "max_seq_len", "moe.capacity_factor"),
    *("moe.aux_loss_coef", "moe.aux_loss_over", "moe.z_loss_coef", "moe.bias_update_rate"),
}


@dataclass(frozen=True)
class Source:
    """A Hugging Face folder or a checkpoint."""

    path: Path
    config: ModelConfig
    folder: HuggingFaceFolder | None = None  # None: a checkpoint

    def tokenizer_hash(self) -> str | None:
        """Hash of all that decides its token ids; None if there is no tokenizer, or none that we can read."""
        if self.folder is None:
            return read_trainer_state(self.path)["tokenizer_hash"]  # type: ignore[no-any-return]
        try:
            tokenizer = self.folder.tokenizer()
        except UserError:
            return None
        return None if tokenizer is None else tokenizer.hash


def open_source(where: str) -> Source:
    """What `model.init_from` names. Raises `UserError` for a folder that is neither, or of another architecture."""
    path = Path(where).expanduser()
    try:
        if (path / CONFIG).is_file():
            folder = HuggingFaceFolder.open(path)
            return Source(path, folder.config, folder)
        path = find_checkpoint(path)
        return Source(path, ModelConfig.model_validate(read_trainer_state(path)["model"]))
    except UserError as error:
        raise UserError(f"'model.init_from': {error}") from None


def lay_architecture_under(given: dict[str, Any]) -> dict[str, Any]:
    """The `model` section that a config gives, with the architecture of its `init_from` for what it does not give.

    Raises:
        UserError: a key that is given says something else than the architecture.
    """
    source = open_source(given["init_from"])
    if given.get("preset") is not None:
        raise UserError("'model.preset' and 'model.init_from' both give an architecture; remove model.preset")
    theirs = source.config.model_dump(mode="json", exclude={"preset", "init_from"})
    free = _FREE - ({"max_seq_len"} if source.config.position == "learned" else set())
    return _laid_under(theirs, given, "", free, source.path)


def _laid_under(
    theirs: dict[str, Any], given: dict[str, Any], prefix: str, free: set[str], where: Path
) -> dict[str, Any]:
    result = dict(theirs)
    for key, value in given.items():
        name, other = f"{prefix}{key}", theirs.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            result[key] = _laid_under(other, value, f"{name}.", free, where)
        elif name in free or key not in theirs:  # what is no key at all is found by those who read the config
            result[key] = value
        elif not _same(value, other) and not (name == "vocab_size" and value is None):
            raise UserError(
                f"'model.{name}' is {json.dumps(value)}, but the weights of {where} have {json.dumps(other)}; "
                f"remove model.{name}, or model.init_from"
            )
    return result


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, str) and isinstance(other, int | float):  # YAML's reading of 1e-5
        try:
            return float(value) == other
        except ValueError:
            return False
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def load_folder(folder: HuggingFaceFolder, weights: Mapping[str, Tensor]) -> None:
    """Fill live weights, plain or DTensors, by our names. One tensor at a time is whole in this rank's memory."""
    from optim.boxes import local
    from trainer.initialize import local_box

    stored = folder.tensors()
    for entry in folder.family.imports(folder.config):
        tensor = weights[entry.name]
        shape, offset = local_box(tensor)
        if math.prod(shape) == 0:
            continue
        whole = entry.build([stored.read(theirs) for theirs in entry.reads])
        local(tensor).copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))])
