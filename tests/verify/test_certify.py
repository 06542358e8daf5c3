"""`gramian certify` on the quickstart: every layout and knob, five steps each."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.verify.evidence import write_evidence
from tests.verify.test_quickstart import GRAMIAN, QUICKSTART

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3600)]

KNOBS: dict[str, list[str]] = {
    "fsdp": [],
    "ddp": ["parallel.engine=ddp"],
    "HSDP, 2 replicas": ["parallel.dp_replicate=2"],
    "accumulation": ["train.micro_batch_size=1"],
    "uneven masks": ["data.packing=pad"],
    "full checkpointing": ["train.activation_checkpointing=full"],
    "selective checkpointing": ["train.activation_checkpointing=selective"],
    "full checkpointing of every other block": [
        "train.activation_checkpointing=full",
        "train.activation_checkpointing_every=2",
    ],
    "compiled": ["train.compile=true"],
    "compiled, selective checkpointing": ["train.compile=true", "train.activation_checkpointing=selective"],
    "all at once": [
        "parallel.dp_replicate=2",
        "train.micro_batch_size=2",
        "data.packing=pad",
        "train.compile=true",
        "train.activation_checkpointing=selective",
    ],
}


def certify(report: Path, *words: str) -> dict[str, Any]:
    """Run the command; its report. The test fails if the config is not certified."""
    command = [GRAMIAN, "certify", QUICKSTART, *words, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    record: dict[str, Any] = json.loads(report.read_text())
    return record


def test_every_layout_and_knob(tmp_path: Path) -> None:
    """Loss and gradient norm to 1e-6, every gradient and update to 1e-5; and two runs to the bit."""
    figures: dict[str, Any] = {}
    for nproc in ("2", "4"):
        for name, keys in KNOBS.items():
            record = certify(tmp_path / "report.json", "--nproc", nproc, *keys)
            worst: dict[str, Any] = {}
            for row in record["rows"]:
                worst.setdefault(row["quantity"], [row["difference"], row["parameter"]])
            figures[f"{name}, {nproc} ranks"] = worst
        record = certify(tmp_path / "report.json", "--nproc", nproc, "--repeat", "train.deterministic=true")
        figures[f"repeated to the bit, {nproc} ranks"] = {"tensors": record["tensors"], "steps": record["steps"]}
    write_evidence("certify", "gramian certify configs/quickstart.yaml --nproc N, and each row's keys", figures)
    assert len(figures) == 2 * (len(KNOBS) + 1)
