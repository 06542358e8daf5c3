"""What a run does, seen from outside: its operators, its files, its output and exit code.

Left out is what would differ between two runs of one config (times, speeds, places in memory), and what merely repeats
the config: a key that is only written down somewhere has no effect.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optim import products
from tests.gang import Gang
from tests.runs import train_worker
from trainer.config import TrainingConfig, load_config


class Seen(NamedTuple):
    """One run: how often each operator ran on which types and shapes; digests of files by path; lines and exit code."""

    graph: dict[str, int]
    files: dict[str, list[str]]
    output: list[str]


def observe(
    gang: Gang, config: Path, starts: list[list[str]], folder: Path, world: int = 1, echo: list[str] | None = None
) -> Seen:
    """Start a run in an empty folder, once for each list of overrides, and look at the last start.

    Args:
        config: the config file. Relative paths in it are those of `folder`.
        echo: overrides of another config, which the run writes down as its own while it follows `starts`.
    """
    for overrides in starts:
        graph, output = gang.run(_start, str(config), overrides, str(folder), echo, world=world, timeout=200)[0]
    return Seen(graph, fingerprints(folder), output)


def differences(a: Seen, b: Seen) -> list[str]:
    """What differs between two runs, a line each."""
    ours, theirs = ({"output": seen.output, **seen.graph, **seen.files} for seen in (a, b))
    return [
        f"{name}: {ours.get(name, 'absent')} / {theirs.get(name, 'absent')}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]


# ---------------------------------------------------------------------------------------------------------- in a rank


def _start(config: str, overrides: list[str], folder: str, echo: list[str] | None) -> tuple[dict[str, int], list[str]]:
    """In a rank: a start of the worker, watched."""
    import launch.worker
    import trainer.loop  # noqa: F401 - so that its names are there to be replaced

    before, compile_block = os.getcwd(), torch.compile
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        os.chdir(folder)
        stack.callback(os.chdir, before)
        stack.enter_context(mock.patch.dict(os.environ, GRAMIAN_CACHE="cache"))
        # Time spent on what no key decides: the machine's speed, the state of the checkout.
        stack.enter_context(mock.patch("trainer.loop.peak_flops", return_value=(1e12, "not measured")))
        stack.enter_context(mock.patch("trainer.provenance.commit_and_diff", return_value=(None, None)))
        # Whether blocks are compiled is seen in dynamo's graphs; what inductor makes of them takes a C++ compiler long.
        eager = mock.patch("torch.compile", lambda f, **options: compile_block(f, **{**options, "backend": "eager"}))
        stack.enter_context(eager)
        if echo is not None:
            load = lambda path, words: _Echoing.of(load_config(path, words), load_config(path, echo))  # noqa: E731
            stack.enter_context(mock.patch.object(launch.worker, "load_config", load))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # shown once a process, so not in the second of two equal runs
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(out))
        _reset_dynamo()
        products._is_exact_in_batches.cache_clear()  # a trial of the library, the first time in a process
        with Trace() as trace:
            code = train_worker([config, *overrides])
    return {**trace.calls, **_dynamo_graphs()}, [f"exit code {code}", *_lines(out.getvalue())]


class Trace(TorchDispatchMode):
    """Counts the operators of this thread by name, types, shapes and, of distributed tensors, placements."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let dynamo compile although a mode is active."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Bytes are objects on their way between ranks; their length depends on how paths and times are written.
        if not any(tensor.dtype == torch.uint8 for tensor in tensors):
            self.calls[f"graph {function}({', '.join(map(_signature, tensors))})"] += 1
        return function(*args, **(kwargs or {}))


def _signature(tensor: torch.Tensor) -> str:
    placements = getattr(tensor, "placements", "")
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{placements}"


def _reset_dynamo() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


def _dynamo_graphs() -> dict[str, int]:
    """How many graphs were compiled, if any."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if "torch._dynamo" in sys.modules else 0
    return {"graph compiled": graphs} if graphs else {}


class _Echoing(TrainingConfig):
    """A config that gives out another one's tree for its own."""

    @classmethod
    def of(cls, config: TrainingConfig, other: TrainingConfig) -> TrainingConfig:
        echoing = cls.model_construct(**{name: getattr(config, name) for name in TrainingConfig.model_fields})
        object.__setattr__(echoing, "_other", other.tree())
        return echoing

    def tree(self) -> dict[str, Any]:
        return object.__getattribute__(self, "_other")


# ------------------------------------------------------------------------------------------ what is left out, and why

# Lines that repeat the config, or tell that the cache had nothing yet; and what follows the loss in a step's line: the
# learning rate (what it does is in the weights) and speeds.
_ECHOED_LINES = re.compile(r"(mesh|batch|speed) {2,}|training a tokenizer of |prepared [\d,]+ documents")
_AFTER_THE_LOSS = re.compile(r"  lr [\d.e+-]+  .*")


def _lines(text: str) -> list[str]:
    return [_AFTER_THE_LOSS.sub("", line) for line in text.splitlines() if not _ECHOED_LINES.match(line)]


def fingerprints(folder: Path) -> dict[str, list[str]]:
    """Digests of the files under a folder by path. Links are inputs, and not looked at."""
    found: dict[str, set[str]] = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names if not name.endswith(".lock")):
            # The folders of the cache are named by a hash of the config; what counts is what is in them.
            place = re.sub(r"/[0-9a-f]{24}/", "/*/", path.relative_to(folder).as_posix())
            content = _cleaned(path, place)
            if content is not None:
                found.setdefault(f"file {place}", set()).add(hashlib.blake2b(content, digest_size=8).hexdigest())
    return {place: sorted(digests) for place, digests in found.items()}


def _cleaned(path: Path, place: str) -> bytes | None:
    """Content of a file without times and echoes; None: nothing is left."""
    for pattern, clean in _CLEANERS.items():
        if re.search(pattern, place):
            return clean(path.read_bytes())
    return path.read_bytes()


def _without(*keys: str) -> Callable[[bytes], bytes]:
    """Removes keys of each JSON object, one a file or one a line."""

    def clean(content: bytes) -> bytes:
        whole = content.startswith(b"{\n")
        objects = [json.loads(text) for text in ([content] if whole else content.splitlines())]
        return json.dumps([{k: v for k, v in entry.items() if k not in keys} for entry in objects]).encode()

    return clean


def _names_of_files(content: bytes) -> bytes:
    """Of a checkpoint's manifest: the hashes in it are those of files that are looked at themselves."""
    return json.dumps(sorted(json.loads(content)["files"])).encode()


def _tensors(content: bytes) -> bytes:
    """A safetensors file with its tensors in the order of their names: DCP's threads write them in any order."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    places = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
    digest = hashlib.blake2b(json.dumps(places, sort_keys=True).encode())
    for name, entry in sorted(header.items()):
        first, end = entry.pop("data_offsets")
        digest.update(f"{name} {entry}".encode() + content[start + first : start + end])
    return digest.digest()


_CLEANERS: dict[str, Callable[[bytes], bytes | None]] = {
    r"/config\.yaml$": lambda _: None,
    r"/provenance\.json$": _without("time", "command", "hosts", "dp_replicate", "dp_shard", "data_folder"),
    r"/metrics\.jsonl$": _without("lr", "tokens_per_second", "mfu", "seconds"),
    r"/events\.jsonl$": _without("time", "seconds", "stall_seconds", "changed", "hosts"),
    r"/trainer\.json$": _without("config", "model"),
    r"/outcome\.json$": _without("time"),
    r"/step_\d+/manifest\.json$": _names_of_files,
    r"/COMMIT$": lambda _: b"",  # a hash of the manifest
    r"\.safetensors$": _tensors,
    r"/\*/manifest\.json$": _without("dtype"),
}
