"""Which tokens a run has trained on: each worker writes down a hash of its rows of every step."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path

from tests.faults import patched_when_imported

# A step counts as consumed when its forward pass begins; a restart does it again, and writes it down again.
_PATCH = """
def patch(loop):
    import hashlib, json, os, time
    place = os.environ["CONSUMED"]

    def prefetched(self, step, rank, world, get=loop.Prefetched.train):
        batch = get(self, step, rank, world)
        time.sleep(1.5 * os.path.exists(f"{place}/slowly"))
        digest = hashlib.blake2b(batch.tokens.tobytes() + batch.mask.tobytes(), digest_size=16).hexdigest()
        with open(f"{place}/rank-{rank}.jsonl", "a") as file:
            file.write(json.dumps([step, digest]) + "\\n")
        return batch

    loop.Prefetched.train = prefetched
"""


def written_down(folder: Path) -> dict[str, str]:
    """Variables with which workers write into `folder`/consumed."""
    (folder / "consumed").mkdir()
    patched_when_imported(folder, "trainer.loop", _PATCH)
    return {"PYTHONPATH": str(folder), "CONSUMED": str(folder / "consumed")}


def hash_chain(folder: Path) -> list[str]:
    """The chain over the rows of all ranks, step after step. A step that was done again must have had the same rows."""
    rows: dict[int, dict[str, str]] = defaultdict(dict)
    for file in sorted((folder / "consumed").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            step, digest = json.loads(line)
            assert rows[step].setdefault(file.name, digest) == digest, (
                f"{file.name} had other rows at step {step} again"
            )
    chain, links = hashlib.blake2b(), []
    for step in sorted(rows):
        chain.update("".join(rows[step][name] for name in sorted(rows[step])).encode())
        links.append(chain.copy().hexdigest())
    assert sorted(rows) == list(range(len(rows)))
    return links
