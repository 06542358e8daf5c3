"""Saves of what lies on a GPU, copied on a stream of its own: needs a machine with a CUDA GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gang import Gang
from tests.runs import read_state
from tests.trainer.test_saving import local, save, saving
from trainer.rundir import RunDirectory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def update_at_once(corpus: str, folder: str) -> list[dict[str, float]]:
    """In a rank: two saves, each with an update right after it; sums of the weights before the update."""
    was = []
    with saving(corpus, folder) as (checkpointer, here, _):
        parameters = here.engine.parameters
        busy = torch.randn(2048, 2048, device=here.runtime.device)
        for step in (1, 2):
            was.append({f"model.{name}": float(local(p).double().sum()) for name, p in parameters.items()})
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            for _ in range(20):
                busy = busy @ busy / 2048  # the copy waits for work that was there before it
            save(checkpointer, here, step)
            here.engine.optimizer.step()
            checkpointer.wait()
        assert checkpointer._shard is not None
        assert checkpointer._shard._buffer is not None
        assert checkpointer._shard._buffer.is_pinned() == (here.runtime.device.type == "cuda")
    return was


def test_an_update_right_after_a_save_is_not_in_it(gpu_gang: Gang, corpus: Path, tmp_path: Path) -> None:
    (was,) = gpu_gang.run(update_at_once, str(corpus), str(tmp_path), world=1)
    for step, sums in enumerate(was, start=1):
        state = read_state(RunDirectory(tmp_path).checkpoint(step))
        for name, total in sums.items():
            assert float(state[name].double().sum()) == pytest.approx(total, rel=1e-9, abs=1e-9), name
    assert was[0] != was[1]
