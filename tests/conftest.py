"""Fixtures for the whole session: a small corpus, a cache folder, and the gang of ranks."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gang import Gang
from tests.launch.needs import skip_or_fail
from tests.launch.slurm.cluster import Cluster, missing

# The documents of the small corpus: modules of the standard library, about 200 kB of text.
MODULES = (
    "argparse",
    "ast",
    "bisect",
    "calendar",
    "cmd",
    "copy",
    "csv",
    "heapq",
    "inspect",
    "random",
    "shlex",
    "textwrap",
)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What child processes inherit: a cache that lives and dies with the session, and no GPU (tests/gpu takes it back).

    The tests start more ranks than a machine may have GPUs, and their tolerances are the CPU's.
    """
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAMIAN_CACHE", str(folder))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        # `datasets` keeps locks in a cache of its own, and asks the network for what it does not find.
        patch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve text documents."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES:
        text = (library / f"{name}.py").read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def paragraphs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus cut at blank lines: documents of 2 to 2,000 characters, a row each or a few when they are padded."""
    file = tmp_path_factory.mktemp("paragraphs") / "paragraphs.jsonl"
    texts = [part for path in sorted(corpus.iterdir()) for part in path.read_text(encoding="utf-8").split("\n\n")]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text.strip()), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def cluster(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real SLURM of four nodes, all of them this machine."""
    if (reason := missing()) is not None:
        skip_or_fail(f"no SLURM here: {reason}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=4)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def gang(cache: Path) -> Iterator[Gang]:
    """Four gloo ranks that wait for work."""
    gang = Gang()
    yield gang
    gang.stop()
