"""Datasets of the `datasets` library: those that it saved to a folder, and whatever it knows by name, as a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.formats.records import Progress, Record, TextField

PREFIX = "hf:"


@dataclass(frozen=True)
class HubShard:
    """One of the files of a dataset that is streamed; rows keep their order over all of them."""

    name: str  # for messages
    dataset: Any  # datasets.IterableDataset
    index: int
    count: int
    identity: str  # hash of the dataset's version, configuration and split


def saved_files(folder: Path, split: str | None, called: str) -> list[Path] | None:
    """Arrow files of a dataset that `save_to_disk` wrote, in order; None if the folder is none such.

    Raises `UserError` for a dictionary of datasets of which `split` names none.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _read(folder / "dataset_dict.json", "splits")
        folder = folder / _choose(split, splits, str(folder), called)
    elif split is not None and (folder / "state.json").is_file():
        raise UserError(f"{called}: {folder} has no splits; leave out ':{split}'")
    if not (folder / "state.json").is_file():
        return None
    return [folder / file["filename"] for file in _read(folder / "state.json", "_data_files")]


def _read(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_bytes())[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not as `datasets` writes it ({error}); save the dataset again") from None


def streamed(name: str, words: list[str], called: str) -> list[HubShard]:
    """The files of a dataset by name or folder; `words` are its configuration and split, or one of them, or neither."""
    datasets = _library()
    where = ":".join([PREFIX + name, *words])
    try:
        config, split = _config_and_split(datasets, name, words)
        builder = datasets.load_dataset_builder(name, config)
        splits = builder.as_streaming_dataset()
    except Exception as error:  # of the library, of its network clients, of file systems: all mean the same
        raise UserError(f"{called}: {where} cannot be opened: {error}; check the name and the network") from None
    split = _choose(split, list(splits), where, called)
    dataset = splits[split]
    label = ":".join([PREFIX + name, builder.config.name, split])
    identity = f"{builder.hash or builder.config.name}:{builder.config.name}:{split}"
    count = dataset.num_shards
    return [HubShard(f"{label}:{i}", dataset, i, count, identity) for i in range(count)]


def _library() -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what goes wrong is raised, and told once
    # It would import torch to make its streams torch datasets, which they need not be here.
    datasets.config.TORCH_AVAILABLE = False
    return datasets


def _config_and_split(datasets: Any, name: str, words: list[str]) -> tuple[str | None, str | None]:
    if len(words) == 1:
        return (words[0], None) if words[0] in datasets.get_dataset_config_names(name) else (None, words[0])
    config, split = [*words, None, None][:2]
    return config, split


def _choose(split: str | None, splits: list[str], where: str, called: str) -> str:
    if split is None and "train" in splits:
        return "train"
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        what = f"no split '{split}'" if split else "several splits"
        raise UserError(f"{called}: {where} has {what}; add one of :{', :'.join(splits)}")
    return split


def hub_records(shard: HubShard, field: TextField, skip: int, progress: Progress) -> Iterator[Record]:
    """A row is a record. What is skipped is still fetched: the library knows no places inside a file."""
    dataset = shard.dataset.shard(shard.count, shard.index)
    rows = iter(dataset.skip(skip) if skip else dataset)
    progress.records = skip
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # of the library, of what it reads with, of the network
            n = f"{progress.records:,}"
            raise UserError(f"{shard.name}: reading stopped after {n} records ({error}); try again") from None
        if row is None:
            return
        progress.records += 1
        yield progress.records - 1, field.of(row, f"{shard.name}: record {progress.records}")
