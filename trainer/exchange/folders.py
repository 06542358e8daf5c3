"""Folders of others: what a Hugging Face folder holds, and folders of ours that appear whole or not at all.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import sync_directory
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizers import huggingface, sentencepieces
from models.config import ModelConfig
from models.families import Family, read_folder_config
from trainer.exchange.tensors import DTYPES, StoredTensors

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"  # in every family's files
_TOGETHER = f"give the {CONFIG} and the weights that belong together"
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG, errno.ENOTDIR)


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder as `save_pretrained` of transformers writes it."""

    path: Path
    family: Family
    config: ModelConfig
    hf: dict[str, Any]  # content of config.json

    @classmethod
    def open(cls, path: Path) -> HuggingFaceFolder:
        """Read a folder's config.json. Raises `UserError` for a family, or a setting of one, that we have not."""
        hf = _read_json(path / CONFIG)
        if hf is None:
            raise UserError(f"{path}: no Hugging Face folder (no {CONFIG}); give one that save_pretrained has written")
        return cls(path, *read_folder_config(hf, str(path / CONFIG)), hf)

    def tensors(self) -> StoredTensors:
        """The weights.

        Raises:
            UserError: there are none that are safe to read, or not those of the architecture; the line says which.
        """
        stored = StoredTensors(self._files(), self.family.canonical)
        expected = {export.name: tuple(export.shape) for export in self.family.exports(self.config)}
        there = {name for name in stored.shapes if name in expected or not self.family.ignored(name)}
        whose = f"{self.family.model_type} of this {CONFIG}"
        if missing := expected.keys() - there:
            raise UserError(f"{self.path}: lacks {_listed(missing)}, which {whose} has; {_TOGETHER}")
        if unknown := there - expected.keys():
            raise UserError(f"{self.path}: holds {_listed(unknown)}, for which {whose} has no place; {_TOGETHER}")
        for name, shape in expected.items():
            if stored.shapes[name] != shape:
                raise UserError(
                    f"{self.path}: '{name}' has the shape {stored.shapes[name]}, but {CONFIG} means {shape}; "
                    f"{_TOGETHER}"
                )
            if unread := {part.dtype for part in stored.parts[name]} - DTYPES.keys():
                raise UserError(
                    f"{self.path}: '{name}' is of type {min(unread)}, which is read by none of ours; give a copy of "
                    f"the weights in one of {', '.join(DTYPES)}"
                )
        if self.config.tie_embeddings and HEAD in stored.shapes:
            (embedding,) = next(i.reads for i in self.family.imports(self.config) if i.name == "embedding.weight")
            if not stored.same(HEAD, embedding):
                raise UserError(
                    f"{self.path}: '{HEAD}' differs from '{embedding}', and {CONFIG} ties the two; set "
                    f"tie_word_embeddings to false there if the model has a head of its own, else remove '{HEAD}' "
                    f"from the weights"
                )
        return stored

    def _files(self) -> list[Path]:
        index = _read_json(self.path / INDEX)
        if index is not None:
            weight_map = index.get("weight_map")
            names = list(weight_map.values()) if isinstance(weight_map, dict) else []
            if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
                raise UserError(f"{self.path / INDEX}: no index of weights; bring it again from where a good copy is")
            return [self.path / name for name in sorted(set(names))]
        if (self.path / WEIGHTS).is_file():
            return [self.path / WEIGHTS]
        if pickled := sorted(self.path.glob("*.bin")) + sorted(self.path.glob("*.pt*")):
            raise UserError(
                f"{self.path}: has its weights only in {pickled[0].name}, a pickle, which is not read because it can "
                f"run code; save them as safetensors (save_pretrained of transformers does)"
            )
        raise UserError(f"{self.path}: has no weights (neither {WEIGHTS} nor {INDEX})")

    def tokenizer(self, eos: str | None = None) -> Tokenizer | None:
        """Its tokenizer; None if it has no file that we read.

        Args:
            eos: name of the token that ends a document; by default what the folder says.
        """
        path = next(
            (self.path / n for n in (huggingface.FILE_NAME, sentencepieces.FILE_NAME) if (self.path / n).is_file()),
            None,
        )
        if path is None:
            return None
        tokenizer = load_tokenizer(path, eos or self._eos(path))
        if tokenizer.max_id >= self.config.vocab:
            raise UserError(
                f"{path}: has {tokenizer.max_id + 1} tokens, but the model of {CONFIG} has a vocab_size of "
                f"{self.config.vocab}; give the tokenizer that belongs to the weights"
            )
        return tokenizer

    def _eos(self, path: Path) -> str | None:
        """Name of the end of a document: what tokenizer_config.json says, else the token of config.json's number."""
        name = (_read_json(self.path / "tokenizer_config.json") or {}).get("eos_token")
        name = name.get("content") if isinstance(name, dict) else name
        number = self.hf.get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if name is None and path.name == huggingface.FILE_NAME:
            added = (_read_json(path) or {}).get("added_tokens")
            tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
            name = next((token.get("content") for token in tokens if token.get("id") == number), None)
        return name if isinstance(name, str) else None


def _read_json(path: Path) -> dict[str, Any] | None:
    """An object from a file; None if there is no such file."""
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must be a JSON object; bring it again from where a good copy is")
    return tree


def _listed(names: set[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{min(names)}'{more}"


@contextlib.contextmanager
def new_folder(out: Path, needed: int) -> Iterator[Path]:
    """A folder to fill, that takes the name `out` when it is whole. After an error nothing is left of it.

    Args:
        needed: bytes that will be written.

    Raises:
        UserError: the name is taken, or the file system refuses or has too little room.
    """
    check_new(out)
    out = out.absolute()
    partial = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if needed > (free := shutil.disk_usage(out.parent).free):
            raise UserError(f"--out {out}: {needed:,} bytes are needed and {free:,} are free; make room")
        partial.mkdir()
        try:
            yield partial
            sync_directory(partial)
            os.rename(partial, out)
        except BaseException:
            shutil.rmtree(partial)
            raise
        sync_directory(out.parent)
    except FileExistsError:
        raise UserError(
            f"--out {out}: {partial.name} is there, the remains of a killed command, or of one at work; "
            f"remove it, or give another name"
        ) from None
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        raise UserError(f"--out {out}: cannot be written: {error.strerror}; make room or mend permissions") from None


def check_new(out: Path) -> None:
    """Raise `UserError` if there is something of that name already; an empty folder is nothing."""
    if (out.exists() and not out.is_dir()) or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"--out {out}: is there already; give the name of a new folder")
