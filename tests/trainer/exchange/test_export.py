"""A checkpoint as a folder that transformers reads."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import UserError
from models.config import ModelConfig
from models.transformer import Transformer
from tests.runs import read_state
from tests.trainer.exchange.checkpoints import random_checkpoint, tensors_of, tree
from trainer.exchange.export import Plan, export, plan_export
from trainer.exchange.importing import import_folder
from trainer.load import load_weights
from trainer.manifest import read_trainer_state
from trainer.rundir import RunDirectory

KEYS: dict[str, Any] = {"vocab_size": 60, "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24, "max_seq_len": 32}


def our_model(checkpoint: Path) -> Transformer:
    model = Transformer(ModelConfig.model_validate(read_trainer_state(checkpoint)["model"]))
    load_weights(checkpoint, model)
    return model


@torch.no_grad()
def test_a_sharded_run_goes_out_whole(run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logits, tokens and text are those of our own model."""
    from launch.cli import app

    checkpoint, out = run.checkpoint(4), tmp_path / "out"
    assert len(list(checkpoint.glob("*.safetensors"))) == 2
    plan = plan_export(checkpoint, "fp32", 10**9)
    export(plan, out)
    assert {name: (out / name).stat().st_size for name in tree(out)} == plan.files
    theirs, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    tokens_BT = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(tokens_BT).logits, our_model(checkpoint)(tokens_BT), rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer("def ", return_tensors="pt")
    (ids,) = theirs.generate(**prompt, max_new_tokens=20, do_sample=False).tolist()
    words = ["--prompt", "def ", "--max-tokens", "20", "--temperature", "0", "--json", "-"]
    app(["generate", str(checkpoint), *words], standalone_mode=False)
    (ours,) = json.loads(capsys.readouterr().out)["continuations"]
    assert [*prompt["input_ids"][0].tolist(), *ours["tokens"]] == ids
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == tokenizer.eos_token_id == 1
    assert theirs.config.bos_token_id is None
    assert theirs.config.pad_token_id is None


def test_weights_are_bit_for_bit_those_of_the_checkpoint(run: RunDirectory, tmp_path: Path) -> None:
    export(plan_export(run.checkpoint(4), "fp32", 10**9), tmp_path / "out")
    ours, theirs = read_state(run.checkpoint(4)), tensors_of(tmp_path / "out")
    assert torch.equal(theirs["model.embed_tokens.weight"], ours["model.embedding.weight"])
    assert torch.equal(theirs["model.layers.1.self_attn.k_proj.weight"], ours["model.blocks.1.attention.wk.weight"])
    assert sum(t.numel() for t in theirs.values()) == sum(t.numel() for n, t in ours.items() if n.startswith("model."))


def test_half_precision_in_several_files(run: RunDirectory, tmp_path: Path) -> None:
    plan = plan_export(run.checkpoint(4), "bf16", 40_000)
    done: list[int] = []
    export(plan, tmp_path / "out", done.append)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, 1 + len(files))
    ]
    assert len(files) > 3
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(2 * t.numel() for t in tensors.values()) <= 40_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(done) == 2 * plan.report()["parameters"]
    assert {name for name, file in index["weight_map"].items() if file == files[0].name} == load_file(files[0]).keys()
    export(plan_export(run.checkpoint(4), "fp32", 10**9), tmp_path / "exact")
    exact, rounded = tensors_of(tmp_path / "exact"), tensors_of(tmp_path / "out")
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact.keys() | rounded.keys())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == torch.bfloat16


def test_a_bias_of_selection_stays_exact(saved: Callable[[str], Path], tmp_path: Path) -> None:
    import_folder(saved("glm4-moe"), tmp_path / "checkpoint")
    export(plan_export(tmp_path / "checkpoint", "bf16", 10**9), tmp_path / "out")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    there = tensors_of(tmp_path / "out")
    assert torch.equal(there[name], tensors_of(saved("glm4-moe"))[name])
    assert {tensor.dtype for other, tensor in there.items() if other != name} == {torch.bfloat16}


def test_a_damaged_checkpoint_is_named_and_leaves_nothing(run: RunDirectory, tmp_path: Path) -> None:
    damaged, out = tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(run.checkpoint(4), damaged)
    shard = damaged / "shard-00002-model-00001-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    plan = plan_export(damaged, "fp32", 10**9)  # the dry run's: from headers
    with pytest.raises(UserError, match=f"damaged: {shard.name}"):
        export(plan, out)
    assert not out.exists()
    shard.unlink()
    with pytest.raises(UserError, match=r"'.*' has the shape \(\d+.*but its trainer.json means"):
        plan_export(damaged, "fp32", 10**9)


def test_a_checkpoint_with_a_tensor_too_many(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", **KEYS)
    save_file({"model.form.weight": torch.zeros(16)}, checkpoint / "shard-00002.safetensors")
    with pytest.raises(UserError, match=r"'form.weight' has the shape \(16,\), but its trainer.json means None"):
        plan_export(checkpoint, "fp32", 10**9)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"position": "relative"}, "model.position: relative"),
        ({"norm_placement": "post", "final_norm": False}, "model.norm_placement: post"),
        ({"position": "sinusoidal"}, "model.position: sinusoidal"),
    ],
)
def test_a_model_without_a_class_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", **{**KEYS, **keys})
    with pytest.raises(UserError, match="no Hugging Face class has") as error:
        plan_export(checkpoint, "fp32", 10**9)
    assert named in str(error.value)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_export(random_checkpoint(tmp_path / "checkpoint", **KEYS), "fp32", 3000)


def test_a_checkpoint_without_tokenizer_says_so(plan: Plan, tmp_path: Path) -> None:
    export(plan, tmp_path / "out")
    assert plan.notes == ["the checkpoint has no tokenizer, and so has the folder"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == (None, None)


@pytest.mark.parametrize("taken", ["file", "folder"])
def test_a_name_that_is_taken(plan: Plan, tmp_path: Path, taken: str) -> None:
    out = tmp_path / "out"
    if taken == "file":
        out.touch()
    else:
        out.mkdir()
        (out / "something").touch()
    before = tree(tmp_path)
    with pytest.raises(UserError, match="is there already; give the name of a new folder"):
        export(plan, out)
    assert tree(tmp_path) == before


def test_an_empty_folder_and_missing_parents_are_no_matter(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(plan, tmp_path / "empty")
    export(plan, tmp_path / "not" / "yet" / "there")
    assert tree(tmp_path / "empty") == tree(tmp_path / "not" / "yet" / "there") == sorted(plan.files)


def test_an_interrupted_export_leaves_nothing(plan: Plan, tmp_path: Path) -> None:
    before = tree(tmp_path)

    def interrupt(n_parameters: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(plan, tmp_path / "out", interrupt)
    assert tree(tmp_path) == before


def test_a_killed_export_leaves_no_model(plan: Plan, tmp_path: Path) -> None:
    """And the next one says what is in its way."""
    written: list[int] = []

    def die(n_parameters: int) -> None:
        written.append(n_parameters)
        if len(written) == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        export(plan, tmp_path / "out", die)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not (tmp_path / "out").exists()
    partial = tmp_path / "out.partial"
    assert any(partial.glob("model-*.safetensors"))
    assert not (partial / "config.json").exists()
    with pytest.raises(UserError, match=r"out\.partial is there, the remains of a killed command"):
        export(plan, tmp_path / "out")
    shutil.rmtree(partial)
    export(plan, tmp_path / "out")


def test_a_full_disk_is_told_before_the_work(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"bytes are needed and 1,000 are free"):
        export(plan, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_refusal_of_the_file_system_is_one_line(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from trainer.exchange import export as module

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_file", refuse)
    with pytest.raises(UserError, match=r"--out .*: cannot be written: No space left on device; make room"):
        export(plan, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
