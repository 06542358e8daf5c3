"""A Hugging Face folder as a checkpoint of weights, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import atomic_write
from trainer.exchange.export import Progress
from trainer.exchange.folders import HuggingFaceFolder, check_new, new_folder
from trainer.exchange.tensors import Item, Shape, plan_files, write_file
from trainer.manifest import FORMAT_VERSION, STATE, TOKENIZER, commit, fingerprint

_FILE_BYTES = 5 * 10**9


def write_checkpoint(
    out: Path,
    shapes: Mapping[str, Shape],
    make: Callable[[str], Tensor],
    state: dict[str, Any],
    save_tokenizer: Callable[[Path], None],
) -> None:
    """Write the checkpoint `out`, fp32, with one tensor in memory at a time.

    Args:
        out: folder to make.
        shapes: of the tensors, by their names in checkpoints.
        make: gives the tensor of a name.
        state: for trainer.json.
        save_tokenizer: puts the tokenizer, if there is one, into the folder that it is given.
    """
    files = plan_files(
        [Item(name, tuple(shape), "F32") for name, shape in shapes.items()],
        _FILE_BYTES,
        lambda i, n: f"shard-00001-model-{i:05d}-of-{n:05d}.safetensors",
        sharded=True,
    )
    with new_folder(out, sum(file.bytes for file in files)) as partial:
        for file in files:
            write_file(partial, file, make)
        atomic_write(partial / STATE, json.dumps(state, indent=1))
        save_tokenizer(partial)
        commit(partial, {file.name: fingerprint(file) for file in partial.iterdir()})


def import_folder(
    path: Path, out: Path, eos: str | None = None, progress: Progress = lambda n_parameters: None
) -> dict[str, Any]:
    """Write the checkpoint `out`, of step 0 and without optimizer state; returns what was done as plain data.

    One tensor is in memory at a time, with what it is put together from.

    Args:
        path: a Hugging Face folder.
        out: folder to make.
        eos: name of the token that ends a document, where the folder's tokenizer does not tell.

    Raises:
        UserError: a folder of something else, or one that is not whole; nothing is left of `out` then.
    """
    check_new(out)
    folder = HuggingFaceFolder.open(path)
    stored, tokenizer = folder.tensors(), folder.tokenizer(eos)
    imports = {f"model.{entry.name}": entry for entry in folder.family.imports(folder.config)}

    def make(name: str) -> Tensor:
        tensor = imports[name].build([stored.read(theirs) for theirs in imports[name].reads])
        progress(tensor.numel())
        return tensor

    state = {
        "format": FORMAT_VERSION,
        "step": 0,
        "tokens": 0,
        "weights_only": True,
        "model": folder.config.model_dump(mode="json"),
        "tokenizer_hash": None if tokenizer is None else tokenizer.hash,
        "torch": torch.__version__,
        "imported_from": str(path.absolute()),
    }

    def save_tokenizer(folder: Path) -> None:
        if tokenizer is not None:
            (folder / tokenizer.save(folder)).rename(folder / TOKENIZER)

    shapes = {name: tuple(entry.shape) for name, entry in imports.items()}
    write_checkpoint(out, shapes, make, state, save_tokenizer)
    parameters = sum(map(math.prod, shapes.values()))
    notes = [] if tokenizer else ["the folder has no tokenizer.json or tokenizer.model, and so the checkpoint has none"]
    return {
        "checkpoint": str(out),
        "model_type": folder.family.model_type,
        "parameters": parameters,
        "notes": notes,
    }
