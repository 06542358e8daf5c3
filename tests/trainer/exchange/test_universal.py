"""DeepSpeed's universal checkpoints: what we write it loads, what it writes we read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from tests.gang import Gang
from tests.runs import TINY, read_state, started, train_worker
from trainer.exchange.universal import export_universal, import_universal
from trainer.rundir import RunDirectory

ADAMW = "optim={name: adamw, lr: 0.001, weight_decay: 0.1}"


@pytest.fixture(scope="module")
def run(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Five steps with AdamW under ZeRO-2."""
    folder = tmp_path_factory.mktemp("universal")
    words = [TINY, f"data.corpus={corpus}", f"run.dir={folder}", "train.steps=5", "train.sample_prompt=null", ADAMW]
    assert gang.run(train_worker, [*words, "parallel.engine=deepspeed"], world=2) == [0, 0]
    return RunDirectory(folder / "tiny")


def test_there_and_back(run: RunDirectory, tmp_path: Path) -> None:
    report = export_universal(run.checkpoint(5), tmp_path / "theirs")
    assert (report["step"], report["notes"]) == (5, [])
    import_universal(tmp_path / "theirs", tmp_path / "ours")
    before, after = read_state(run.checkpoint(5)), read_state(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_goes_on_from_it(run: RunDirectory, gang: Gang, corpus: Path, tmp_path: Path) -> None:
    export_universal(run.checkpoint(5), tmp_path / "theirs")
    import_universal(tmp_path / "theirs", tmp_path / "ours")
    words = [TINY, f"data.corpus={corpus}", f"run.dir={tmp_path}", "train.steps=8", "train.sample_prompt=null", ADAMW]
    finals = []
    for name, source in (("a", run.checkpoint(5)), ("b", tmp_path / "ours")):
        assert gang.run(train_worker, [*words, f"run.name={name}", f"checkpoint.resume={source}"], world=1) == [0]
        finals.append(read_state(RunDirectory(tmp_path / name).checkpoint(8)))
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


def loaded_by_deepspeed(overrides: list[str], folder: str, save: str) -> tuple[dict[str, Tensor], int]:
    """In a rank: what DeepSpeed's own engine has after loading, and how far it is; then it saves one of its own."""
    with started([*overrides, "parallel.engine=deepspeed"]) as here:
        import deepspeed

        model = here.engine.model
        groups: list[dict[str, Any]] = here.engine.optimizer.param_groups
        names = dict(model.named_parameters())
        plain = [{"params": [names[n] for n in g["names"]], "weight_decay": g["weight_decay"]} for g in groups]
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter)
        settings = {
            "train_batch_size": here.runtime.world_size,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "checkpoint": {"load_universal": True},
        }
        optimizer = torch.optim.AdamW(plain, lr=0.001, betas=(0.9, 0.95))
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        path = Path(folder)
        # What it makes of pickled classes is its own affair; ours has none.
        assert engine.load_checkpoint(str(path.parent), tag=path.name)[0] is not None
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found = {f"model.{name}": safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"optim.{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
        info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
        engine.save_checkpoint(save, tag="own", client_state=info)
        return found, engine.global_steps


def test_deepspeed_loads_it_and_we_load_its(run: RunDirectory, gang: Gang, corpus: Path, tmp_path: Path) -> None:
    """Weights and both moments, at another number of ranks than it was written at."""
    export_universal(run.checkpoint(5), tmp_path / "theirs")
    words = [f"data.corpus={corpus}", ADAMW]
    expected = read_state(run.checkpoint(5))
    answers = gang.run(loaded_by_deepspeed, words, str(tmp_path / "theirs"), str(tmp_path / "saved"), world=4)
    for found, steps in answers:
        assert steps == 5
        assert len(found) == 3 * sum(name.startswith("model.") for name in expected)
        for name, tensor in found.items():
            assert torch.equal(tensor.view_as(expected[name]), expected[name]), name
    gang.run(made_universal, str(tmp_path / "saved" / "own"), str(tmp_path / "universal"), world=1)
    state = json.loads((tmp_path / "theirs" / "trainer.json").read_text())
    from models.config import ModelConfig

    report = import_universal(tmp_path / "universal", tmp_path / "ours", ModelConfig.model_validate(state["model"]))
    assert "model.init_from" in report["notes"][0]
    weights = read_state(tmp_path / "ours")
    assert weights.keys() == {name for name in expected if name.startswith("model.")}
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def made_universal(folder: str, out: str) -> None:
    """In a rank: DeepSpeed's own conversion."""
    from deepspeed.checkpoint import ds_to_universal

    words = ["ds_to_universal", "--input_folder", folder, "--output_folder", out, "--num_extract_workers", "1"]
    with mock.patch("sys.argv", [*words, "--num_merge_workers", "1"]):
        ds_to_universal.main(ds_to_universal.parse_arguments())


def test_wrong_folders(run: RunDirectory, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    export_universal(run.checkpoint(5), theirs)
    with pytest.raises(UserError, match="is there already"):
        export_universal(run.checkpoint(5), theirs)
    with pytest.raises(UserError, match="no folder 'zero'"):
        import_universal(run.path, tmp_path / "ours")
    weight = theirs / "zero" / "norm.weight" / "fp32.pt"
    whole = weight.read_bytes()
    for content, part in ((whole[:100], "cannot be read"), (b"", "cannot be read"), (None, "is not there")):
        weight.write_bytes(content) if content is not None else weight.unlink()
        with pytest.raises(UserError, match=part):
            import_universal(theirs, tmp_path / "ours")
        assert not (tmp_path / "ours").exists()
    torch.save({"param": torch.zeros(3)}, weight)
    with pytest.raises(UserError, match="has 3 numbers"):
        import_universal(theirs, tmp_path / "ours")
    torch.save({"param": torch.nn.Linear(2, 2)}, weight)  # an object
    with pytest.raises(UserError, match="cannot be read"):
        import_universal(theirs, tmp_path / "ours")
    shutil.copyfile(theirs / "zero" / "norm.weight" / "exp_avg.pt", weight)
    (theirs / "trainer.json").unlink()
    with pytest.raises(UserError, match="give --config"):
        import_universal(theirs, tmp_path / "ours")
