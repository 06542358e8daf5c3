"""A checkpoint as a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import UserError
from common.files import atomic_write
from data.tokenizer import load_tokenizer
from models.config import ModelConfig
from models.families import Export, family_for
from trainer.exchange.folders import CONFIG, INDEX, WEIGHTS, check_new, new_folder
from trainer.exchange.tensors import DTYPES, Item, PlannedFile, StoredTensors, plan_files, write_file
from trainer.exchange.tokenizers import tokenizer_files
from trainer.manifest import TOKENIZER, damage, read_trainer_state, refuse_damaged

PRECISIONS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
Progress = Callable[[int], None]  # is told how many parameters more are done


def checkpoint_tensors(folder: Path) -> StoredTensors:
    """The weights of a committed checkpoint, by the model's names."""
    prefix = "model."  # the state of the optimizer has another
    files = sorted(folder.glob("*.safetensors"))
    return StoredTensors(files, lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None)


@dataclass(frozen=True)
class Plan:
    """What an export would write; made from headers and small files alone."""

    checkpoint: Path
    model_type: str
    exports: dict[str, Export]
    stored: StoredTensors
    weights: list[PlannedFile]
    others: dict[str, bytes]  # files by name
    notes: list[str] = field(default_factory=list)

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file."""
        return {file.name: file.bytes for file in self.weights} | {name: len(c) for name, c in self.others.items()}

    def report(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "checkpoint": str(self.checkpoint),
            "model_type": self.model_type,
            "parameters": sum(math.prod(item.shape) for file in self.weights for item in file.items),
            "bytes": sum(self.files.values()),
            "files": [{"name": name, "bytes": size} for name, size in self.files.items()],
            "notes": self.notes,
        }


def plan_export(checkpoint: Path, precision: str, max_shard_bytes: int) -> Plan:
    """Find out what the folder of a checkpoint would hold.

    Args:
        checkpoint: a committed checkpoint.
        precision: of the weights, one of `PRECISIONS`.
        max_shard_bytes: most bytes of weights in a file, unless a single tensor has more.

    Raises:
        UserError: no Hugging Face class computes this model, or the checkpoint is not what it says.
    """
    config = ModelConfig.model_validate(read_trainer_state(checkpoint)["model"])
    family, stored = family_for(config), checkpoint_tensors(checkpoint)
    expected = {entry.name: tuple(entry.shape) for entry in family.imports(config)}
    if wrong := sorted(n for n in {*expected, *stored.shapes} if expected.get(n) != stored.shapes.get(n)):
        raise UserError(
            f"{checkpoint}: '{wrong[0]}' has the shape {stored.shapes.get(wrong[0])}, but its trainer.json "
            f"means {expected.get(wrong[0])}; bring the checkpoint again from where a good copy is"
        )
    exports = {entry.name: entry for entry in family.exports(config)}
    items = [Item(name, tuple(e.shape), _dtype(e, precision)) for name, e in exports.items()]
    weights = plan_files(items, max_shard_bytes, _file_name)
    others: dict[str, bytes] = {}
    eos = None
    if (path := checkpoint / TOKENIZER).is_file():
        tokenizer = load_tokenizer(path)
        eos = tokenizer.eos_id
        others, notes = tokenizer_files(tokenizer, path.read_bytes(), config.max_seq_len)
    else:
        notes = ["the checkpoint has no tokenizer, and so has the folder"]
    tokens = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}
    dtype = DTYPES[PRECISIONS[precision]][0]
    trees = {
        INDEX: {
            "metadata": {"total_size": sum(item.bytes for item in items)},
            "weight_map": {item.name: file.name for file in weights for item in file.items},
        },
        "generation_config.json": {key: token for key, token in tokens.items() if token is not None},
        CONFIG: {**family.write_config(config), **tokens, "torch_dtype": dtype},  # last: it makes the folder a model
    }
    if len(weights) == 1:
        del trees[INDEX]
    others |= {name: json.dumps(tree, indent=2).encode("utf-8") + b"\n" for name, tree in trees.items()}
    return Plan(checkpoint, family.model_type, exports, stored, weights, others, notes)


def export(plan: Plan, out: Path, progress: Progress = lambda n_parameters: None) -> None:
    """Write the folder `out`. One tensor is in memory at a time, with what it is put together from.

    Raises:
        UserError: the checkpoint is damaged, or `out` cannot be written.
    """
    check_new(out)
    refuse_damaged(plan.checkpoint, damage(plan.checkpoint))

    def make(name: str) -> Tensor:
        entry = plan.exports[name]
        pieces = [
            plan.stored.read(p.name) if p.index is None else plan.stored.read(p.name, p.index, p.index + 1)[0]
            for p in entry.reads
        ]
        tensor = entry.build(pieces)
        progress(tensor.numel())
        return tensor

    with new_folder(out, sum(plan.files.values())) as folder:
        for file in plan.weights:
            write_file(folder, file, make)
        for name, content in plan.others.items():
            atomic_write(folder / name, content)


def _dtype(entry: Export, precision: str) -> str:
    # A bias of selection moves in small steps, which half precision would swallow: transformers keeps it in fp32 too.
    return "F32" if entry.reads[0].name.endswith("selection_bias") else PRECISIONS[precision]


def _file_name(number: int, of: int) -> str:
    return WEIGHTS if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"
