"""Configs and layouts that are refused before anything is started: one line that names the key and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.commands import assert_refused, command, tiny
from tests.runs import TINY
from trainer.config import load_config
from trainer.layout import plan_layout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        # Kinds of parallelism, engines and optimizers that are not built.
        ("parallel.cp=2", ["unknown key 'parallel.cp'", "known here: deepspeed_config, dp_replicate"]),
        ("parallel.pp=2", ["unknown key 'parallel.pp'"]),
        ("model.ssm.n_states=8", ["override 'model.ssm.n_states=8'", "unknown key 'model.ssm'"]),
        ("parallel.engine=megatron", ["'parallel.engine'", "'fsdp', 'ddp' or 'deepspeed'"]),
        # Optimizers.
        ("optim.name=muom", ["'optim'", "no optimizer 'muom'", "did you mean 'muon'?", "package.module:Class"]),
        ("optim.name=muon optim.scale=rsm", ["'optim.scale'", "'original', 'rms' or 'spectral'"]),
        ("optim.name=muon optim.coefficients=kellr", ["'optim.coefficients'", "'keller', 'polar_express'"]),
        ("optim.name=shampoo optim.exponent=1.5", ["'optim.exponent'", "less than or equal to 1"]),
        ("optim.name=soap optim.precondition_every=0", ["'optim.precondition_every'", "greater than or equal to 1"]),
        ("optim.name=soap optim.factor_beta=1", ["'factor_beta' must be below 1 for soap"]),
        ("optim.name=muon optim.ridge=0.1", ["'ridge' does nothing under name: muon", "shampoo", "remove it"]),
        ("optim.name=adamw optim.adamw.lr=0.1", ["'adamw' does nothing under name: adamw", "muon"]),
        ("optim.name=muon optim.options.a=1", ["'options' are those of a rule of your own", "optim.<option>"]),
        ("optim.name=no_such_package.rules:Rule", ["'optim.name'", "No module named 'no_such_package'", "PYTHONPATH"]),
        ("optim.name=optim.rule:Rules", ["'optim.name'", "has no attribute 'Rules'"]),
        ("optim.name=optim.config:OptimConfig", ["no class derived from optim.rule.Rule"]),
        ("optim.name=optim.muon:Muon optim.options.mu=1", ["'optim.options' do not fit", "'mu'"]),
        # A key in the wrong place.
        ("lr=0.1", ["unknown key 'lr'", "did you mean 'optim.lr'?"]),
        ("data.vocab_size=512", ["unknown key 'data.vocab_size'", "did you mean"]),
        ("optim.roles.head.lr_scal=2", ["did you mean 'optim.roles.head.lr_scale'?"]),
        ("optim.roles.heads.lr_scale=2", ["'optim.roles.heads'", "'head'"]),
        ("model.preset=llama-1", ["'model'", "no preset 'llama-1'", "did you mean 'llama-1m'?"]),
        # Values that do not fit one another.
        ("model.n_heads=5", ["n_heads=5 does not divide d_model=64", "set model.n_heads"]),
        ("model.n_kv_heads=3", ["n_kv_heads=3 does not divide n_heads=4", "set model.n_kv_heads"]),
        ("data.seq_len=65", ["'data.seq_len' (65)", "'model.max_seq_len' (64)", "set data.seq_len=64"]),
        ("model.vocab_size=511", ["'model.vocab_size' (511)", "'data.tokenizer.vocab_size' (512)", "set model"]),
        ("data.dtype=uint16 data.tokenizer.vocab_size=65537", ["data.dtype", "uint16", "set data.dtype to int32"]),
        ("parallel.engine=ddp parallel.dp_shard=2", ["'parallel'", "remove dp_replicate and dp_shard"]),
        ("parallel.tp=2", ["'parallel.tp' (2)", "does not divide the 1 processes"]),
        ("parallel.dp_shard=0", ["'dp_shard' must be positive, or -1"]),
        ("optim.momentum=0.9", ["'optim'", "'momentum' does nothing under name: adamw", "remove it"]),
        ("run.name=a/b", ["'run.name'", "plain folder name", "run.dir"]),
        ("run.name=..", ["'run.name'", "plain folder name"]),
        ("run.seed=9223372036854775808", ["'run.seed'", "must be less than"]),  # what generators take
    ],
)
def test_refused_configs(corpus: Path, tmp_path: Path, words: str, parts: list[str]) -> None:
    assert_refused(command(*tiny(corpus, tmp_path / "runs", *words.split())), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("processes", "words", "parts"),
    [
        (4, "parallel.dp_replicate=3", ["'parallel.dp_replicate' (3)", "4 processes", "[1, 2, 4]"]),
        (4, "parallel.dp_replicate=2 parallel.dp_shard=3", ["is 6, but there are 4", "dp_shard=-1", "--nproc 6"]),
        (3, "", ["'train.global_batch_size' (32)", "3 processes", "set train.global_batch_size=48"]),
        (2, "train.micro_batch_size=3", ["'train.micro_batch_size' (3)", "16 sequences", "micro_batch_size=2"]),
    ],
)
def test_impossible_layouts(corpus: Path, tmp_path: Path, processes: int, words: str, parts: list[str]) -> None:
    keys = ["train.global_batch_size=32", "train.micro_batch_size=8", *words.split()]
    refused = command(*tiny(corpus, tmp_path / "runs", *keys, "--nproc", str(processes)))
    assert_refused(refused, *parts)
    assert list(tmp_path.iterdir()) == []
    # The fix that the line offers works.
    if "set train." in refused.stderr:
        fix = refused.stderr.split("set ")[1].split(",")[0].strip()
        assert plan_layout(load_config(TINY, [*keys, fix]), processes).world_size == processes


def test_overrides_reach_over_a_preset() -> None:
    config = load_config(TINY, ["model={preset: llama-1m, n_layers: 3}", "model.d_ff=96"])
    preset = load_config(TINY, ["model={preset: llama-1m}"]).model
    assert (config.model.n_layers, config.model.d_ff, config.model.d_model) == (3, 96, preset.d_model)
    assert preset.n_layers != 3


def test_the_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    import yaml

    config = load_config(TINY, ["optim.lr=1e-5", "checkpoint.async=false", "optim.roles.head.lr_scale=0.5"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.tree()))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train.setps=5"], ["gramian: override 'train.setps=5'", "did you mean 'train.steps'?"]),
        (["train.steps=many", "--nproc", "2"], ["'train.steps'", "must be a number"]),
        (["train.steps"], ["override 'train.steps'", "key.path=value"]),
        (["--nproc", "3", "train.global_batch_size=32"], ["'train.global_batch_size'", "set train.global_batch_size"]),
        (["--nproc", "3", "train.global_batch_size=32", "--dry-run"], ["'train.global_batch_size'"]),
        (["--nprocs", "3"], ["No such option: --nprocs", "--nproc", "gramian train --help"]),
        (["--nproc", "0"], ["'--nproc'", "gramian train --help"]),
    ],
)
def test_refused_by_the_command(corpus: Path, tmp_path: Path, words: list[str], parts: list[str]) -> None:
    assert_refused(command(*tiny(corpus, tmp_path / "runs", *words)), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train"], ["CONFIG", "gramian train --help"]),
        (["trian", "x"], ["'trian'", "gramian --help"]),
        (["train", "nowhere.yaml", "--nproc", "1"], ["nowhere.yaml: no such config file"]),
    ],
)
def test_refused_words(words: list[str], parts: list[str]) -> None:
    assert_refused(command(*words), *parts)
