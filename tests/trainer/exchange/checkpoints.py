"""Checkpoints made without training, and what a folder holds, read with safetensors alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from common.files import hash_file
from models.config import ModelConfig
from models.families.weights import our_shapes
from trainer.exchange.tensors import Item, plan_files, write_file
from trainer.manifest import FORMAT_VERSION, STATE, TOKENIZER, commit, fingerprint
from trainer.rundir import COMMIT


def random_checkpoint(folder: Path, tokenizer: Path | None = None, seed: int = 0, **keys: Any) -> Path:
    """A committed checkpoint of weights alone, all of them random."""
    config = ModelConfig(**keys)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    shapes = our_shapes(config)

    def make(name: str) -> Tensor:
        return 0.1 * torch.randn(shapes[name.removeprefix("model.")], generator=generator)

    items = [Item(f"model.{name}", shape, "F32") for name, shape in shapes.items()]
    (file,) = plan_files(items, 10**12, lambda i, n: "shard-00001-model-00001-of-00001.safetensors", sharded=True)
    write_file(folder, file, make)
    if tokenizer is not None:
        (folder / TOKENIZER).write_bytes(tokenizer.read_bytes())
    state = {"format": FORMAT_VERSION, "step": 0, "tokens": 0, "model": config.model_dump(mode="json")}
    (folder / STATE).write_text(json.dumps({**state, "weights_only": True, "tokenizer_hash": None}))
    commit(folder, {path.name: fingerprint(path) for path in folder.iterdir()})
    return folder


def sparse_checkpoint(folder: Path, ranks: int, config: ModelConfig) -> Path:
    """A checkpoint as this many ranks write it under FSDP and AdamW: true headers, and files of holes."""
    folder.mkdir(parents=True)
    shapes = {
        f"{kind}.{name}{state}": shape
        for name, shape in our_shapes(config).items()
        for kind, state in (("model", ""), ("optim", ".exp_avg"), ("optim", ".exp_avg_sq"))
    }
    for rank in range(ranks):
        header: dict[str, Any] = {}
        places, end = {}, 0
        for name, (rows, *inner) in shapes.items():
            size = -(-rows // ranks)
            first, last = min(rank * size, rows), min((rank + 1) * size, rows)
            if first == last:
                continue
            begin, end = end, end + 4 * (last - first) * torch.Size(inner).numel()
            header[name] = {"dtype": "F32", "shape": [last - first, *inner], "data_offsets": [begin, end]}
            places[name] = {"saved_offsets": [first, *[0] * len(inner)]}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places)}
        text = json.dumps({"__metadata__": metadata, **header}).encode()
        with open(folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    state = {"format": FORMAT_VERSION, "step": 1, "model": config.model_dump(mode="json")}
    (folder / STATE).write_text(json.dumps(state))
    manifest = {"format": FORMAT_VERSION, "files": {STATE: fingerprint(folder / STATE)}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / COMMIT).write_text(hash_file(folder / "manifest.json") + "\n")
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def tree(folder: Path) -> list[str]:
    """All that is there."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# For a process of its own: bytes of memory that a function takes at its peak, above what was in use before. It runs in
# a child, since memory that is given back may be kept for the next one.
PEAK = """
def peak_of(function):
    import os
    def status(key):
        with open("/proc/self/status") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))
    reading, writing = os.pipe()
    if os.fork() == 0:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        before = status("VmRSS")
        function()
        os.write(writing, str(status("VmHWM") - before).encode())
        os._exit(0)
    _, end = os.wait()
    assert end == 0
    return int(os.read(reading, 100))
"""
