"""`model.init_from`: a new run with the architecture and the weights of a folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from common.errors import UserError
from models.config import ModelConfig
from tests.gang import Gang
from tests.models.families.references import make_reference
from tests.runs import TINY, read_state, train_worker
from tests.trainer.exchange.checkpoints import random_checkpoint
from trainer.config import load_config
from trainer.exchange.importing import import_folder
from trainer.rundir import RunDirectory, run_directory

ROOT = Path(TINY).parent.parent
# Of the tiny config, what an architecture is not of. Its tokenizer has 512 tokens.
REST = """
run: {{name: tuned, dir: {folder}}}
model: {{init_from: {source}}}
data: {{corpus: {corpus}, tokenizer: {{vocab_size: 512}}, seq_len: 24}}
train: {{steps: 2, global_batch_size: 4, micro_batch_size: 1}}
checkpoint: {{every: 1}}
eval: {{batches: 0}}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """As `saved`, of models with 512 tokens."""
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tests.models.families.references.VOCAB", 512)
                make_reference(case).save_pretrained(made[case])
        return made[case]

    return make


@pytest.fixture
def config_of(corpus: Path, tmp_path: Path) -> Callable[[Path], Path]:
    """File of a config that starts from a folder."""

    def write(source: Path) -> Path:
        file = tmp_path / "config.yaml"
        file.write_text(REST.format(folder=tmp_path, source=source, corpus=corpus))
        return file

    return write


class FirstStep(NamedTuple):
    """What a rank sees of a run's first step."""

    weights: dict[str, torch.Tensor]
    rows: tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, targets, mask
    loss: float
    warnings: list[str]


def first_step(config_file: str, overrides: list[str]) -> FirstStep:
    """In a rank: start a run, look at its weights, and make a step."""
    from common.logs import get_logger
    from trainer.build import build_engine
    from trainer.certify.looking import weights, whole
    from trainer.layout import plan_layout
    from trainer.loop import train_step
    from trainer.resume import resume
    from trainer.rundata import batches_of, open_run_data
    from trainer.runtime import start_runtime

    config = load_config(config_file, overrides)
    data = open_run_data(config)
    warnings: list[str] = []
    with start_runtime() as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_logger(), "warning", lambda message, *values: warnings.append(message % values))
        layout = plan_layout(config, runtime.world_size)
        engine = build_engine(config, config.model.with_vocab_size(data.vocab_size), layout, runtime)
        assert resume(config, run_directory(config), data, engine, runtime).step == 0
        there = {name: whole(tensor).detach().clone() for name, tensor in weights(engine).items()}
        batch = batches_of(config, data).train(0, runtime.rank, runtime.world_size)
        result = train_step(engine, batch, layout, runtime, config.train.grad_clip, config.model.moe)
    return FirstStep(there, (batch.tokens, batch.targets, batch.mask), result.loss, warnings)


# A dense model with a tied head; one whose files have matrices the other way and fused; experts, biases of selection.
@pytest.mark.parametrize("case", ["llama-3.1", "gpt2", "glm4-moe"])
def test_a_run_starts_from_these_weights(
    gang: Gang, folders: Callable[[str], Path], config_of: Callable[[Path], Path], case: str, tmp_path: Path
) -> None:
    """On two ranks, sharded; its first loss is that of transformers on the same rows."""
    folder = folders(case)
    ranks = gang.run(first_step, str(config_of(folder)), ["data.document_mask=false"], world=2)
    import_folder(folder, tmp_path / "checkpoint")
    expected = {n.removeprefix("model."): t for n, t in read_state(tmp_path / "checkpoint").items()}
    if case == "glm4-moe":
        assert any(name.endswith("selection_bias") and tensor.any() for name, tensor in expected.items())
    for rank in ranks:
        assert rank.weights.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in rank.weights.items())
    assert ranks[0].warnings == []

    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    total, count = 0.0, 0
    for rank in ranks:
        tokens, targets, mask = (torch.from_numpy(array) for array in rank.rows)
        with torch.no_grad():
            logits = theirs(tokens).logits
        total += float(F.cross_entropy(logits[mask], targets[mask], reduction="sum"))
        count += int(mask.sum())
    assert count > 50
    assert ranks[0].loss == ranks[1].loss == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("layout", [["parallel.engine=ddp"], ["parallel.dp_replicate=2"]])
def test_checkpoints_and_runs_are_sources_too(
    gang: Gang, run: RunDirectory, config_of: Callable[[Path], Path], layout: list[str]
) -> None:
    expected = {n: t for n, t in read_state(run.checkpoint(4)).items() if n.startswith("model.")}
    ranks = gang.run(first_step, str(config_of(run.path)), layout, world=2)
    for rank in ranks:
        assert all(torch.equal(rank.weights[n.removeprefix("model.")], tensor) for n, tensor in expected.items())
        assert rank.warnings == []


def test_an_imported_checkpoint_is_a_source(
    gang: Gang, folders: Callable[[str], Path], config_of: Callable[[Path], Path], tmp_path: Path
) -> None:
    import_folder(folders("glm4-moe"), tmp_path / "checkpoint")
    (rank,) = gang.run(first_step, str(config_of(tmp_path / "checkpoint")), [], world=1)
    expected = read_state(tmp_path / "checkpoint")
    assert all(torch.equal(rank.weights[n.removeprefix("model.")], tensor) for n, tensor in expected.items())


def test_another_tokenizer_is_warned_of(gang: Gang, run: RunDirectory, config_of: Callable[[Path], Path]) -> None:
    words = ["data.tokenizer={kind: bytes}"]
    (first, second) = gang.run(first_step, str(config_of(run.path)), words, world=2)
    assert len(first.warnings) == 1
    assert "has another tokenizer than this run" in first.warnings[0]
    assert second.warnings == []


def test_a_run_goes_on_from_its_own_checkpoint(
    gang: Gang, folders: Callable[[str], Path], config_of: Callable[[Path], Path], tmp_path: Path
) -> None:
    """The source's weights are not read again."""
    source = Path(shutil.copytree(folders("llama"), tmp_path / "source"))
    config = str(config_of(source))
    assert gang.run(train_worker, [config], world=1) == [0]
    (source / "model.safetensors").unlink()
    assert gang.run(train_worker, [config, "train.steps=3"], world=1) == [0]
    run = RunDirectory(tmp_path / "tuned")
    assert run.committed() == [1, 2, 3]
    assert gang.run(train_worker, [config, "run.name=anew"], world=1) == [2]
    # Without its source it has all it needs in its own folder.
    shutil.rmtree(source)
    resolved = str(shutil.copy(run.config_file, tmp_path / "resolved.yaml"))
    assert gang.run(train_worker, [resolved, "model.init_from=null", "train.steps=4"], world=1) == [0]
    assert run.committed()[-1] == 4


def test_the_architecture_comes_from_there(folders: Callable[[str], Path], config_of: Callable[[Path], Path]) -> None:
    config = load_config(config_of(folders("glm4-moe")))
    model, moe = config.model, config.model.moe
    assert (model.d_model, model.n_heads, model.vocab_size, model.preset) == (32, 4, 512, None)
    assert moe is not None
    assert (moe.n_experts, moe.selection_bias, moe.router) == (6, True, "sigmoid")
    # A resolved config says the same, and so does that of a stage.
    assert type(config).model_validate(config.tree()).tree() == config.tree()
    words = ["stages=[{tokens: 96}, {tokens: 96, data: {seq_len: 12}}]", "train={global_batch_size: 4}"]
    staged = load_config(config_of(folders("glm4-moe")), words)
    assert [stage.config.model for stage in staged.plan] == [model, model]


def test_what_is_of_training_is_free(folders: Callable[[str], Path], config_of: Callable[[Path], Path]) -> None:
    file = config_of(folders("glm4-moe"))
    words = ["model.init_std=0.01", "model.max_seq_len=128", "model.vocab_size=null", "model.d_model=32"]
    moe = ["model.moe={aux_loss_coef: 0.5, capacity_factor: 2.0}", "model.norm_eps=1e-2"]
    model = load_config(file, [*words, *moe]).model
    assert (model.init_std, model.max_seq_len, model.vocab_size) == (0.01, 128, 512)
    assert model.moe is not None
    assert (model.moe.aux_loss_coef, model.moe.capacity_factor, model.moe.n_experts) == (0.5, 2.0, 6)


@pytest.mark.parametrize(
    ("case", "words", "parts"),
    [
        ("llama", ["model.d_model=64"], ["'model.d_model' is 64, but the weights of", "have 32; remove model.d_model"]),
        ("llama", ["model.tie_embeddings=true"], ["'model.tie_embeddings' is true", "have false"]),
        ("llama", ["model.vocab_size=600"], ["'model.vocab_size' is 600", "have 512"]),
        ("llama", ["model.moe={n_experts: 4}"], ["'model.moe' is", "have null"]),
        ("llama", ["model.norm_eps=1e-6"], ["'model.norm_eps' is", "have 0.01"]),
        ("glm4-moe", ["model.moe={top_k: 1}"], ["'model.moe.top_k' is 1", "have 2; remove model.moe.top_k"]),
        ("glm4-moe", ["model.moe=null"], ["'model.moe' is null", "have {"]),
        ("gpt2", ["model.max_seq_len=128"], ["'model.max_seq_len' is 128", "have 64"]),
        ("llama", ["model.preset=llama-1m"], ["'model.preset' and 'model.init_from' both", "remove model.preset"]),
        ("llama", ["model.d_modl=32"], ["unknown key 'model.d_modl'", "did you mean 'model.d_model'"]),
        ("llama", ["data.seq_len=65"], ["'data.seq_len' (65) is longer than 'model.max_seq_len' (64)"]),
    ],
)
def test_keys_that_contradict_are_named(
    folders: Callable[[str], Path], config_of: Callable[[Path], Path], case: str, words: list[str], parts: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        load_config(config_of(folders(case)), words)
    for part in parts:
        assert part in str(error.value)


def test_sources_that_are_none(config_of: Callable[[Path], Path], tmp_path: Path) -> None:
    (tmp_path / "bloom").mkdir()
    (tmp_path / "bloom" / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    for name, part in (
        ("nowhere", "no such run or checkpoint"),
        (".", "holds no committed checkpoint"),
        ("bloom", 'config.json: model_type "bloom" is not supported'),
    ):
        with pytest.raises(UserError, match=r"'model\.init_from': ") as error:
            load_config(config_of(tmp_path / name))
        assert part in str(error.value)


def test_weights_alone_cannot_be_resumed(corpus: Path, gang: Gang, tmp_path: Path) -> None:
    from trainer.rundata import open_run_data
    from trainer.start import check_start

    keys = load_config(TINY).model.model_dump() | {"vocab_size": 512}
    checkpoint = random_checkpoint(tmp_path / "checkpoint", **keys)
    config = load_config(TINY, [f"data.corpus={corpus}", f"run.dir={tmp_path}", f"checkpoint.resume={checkpoint}"])
    with pytest.raises(UserError, match=r"has weights alone.*start a new run with model\.init_from="):
        check_start(config, run_directory(config), open_run_data(config))
    # Named as the weights' source it is one.
    words = ["checkpoint.resume=auto", f"model.init_from={checkpoint}", "train.steps=1", "eval.batches=0"]
    words = [TINY, f"data.corpus={corpus}", f"run.dir={tmp_path}", *words]
    assert gang.run(train_worker, words, world=1) == [0]


def test_a_folder_of_other_weights_is_found_before_the_start(
    folders: Callable[[str], Path], config_of: Callable[[Path], Path], tmp_path: Path
) -> None:
    from trainer.rundata import open_run_data
    from trainer.start import check_start

    source = Path(shutil.copytree(folders("llama"), tmp_path / "source"))
    config = load_config(config_of(source))
    data = open_run_data(config)
    check_start(config, run_directory(config), data)
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(content | {"tie_word_embeddings": True}))
    tied = load_config(config_of(source))
    with pytest.raises(UserError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        check_start(tied, run_directory(tied), data)
    (source / "config.json").write_text(json.dumps(content))
    (source / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights"):
        check_start(config, run_directory(config), data)


def test_reading_the_config_imports_no_torch(
    folders: Callable[[str], Path], run: RunDirectory, config_of: Callable[[Path], Path]
) -> None:
    code = "import sys; sys.modules['torch'] = None; from trainer.config import load_config; load_config(sys.argv[1])"
    for source in (folders("gpt-oss"), run.path):
        words = [sys.executable, "-c", code, str(config_of(source))]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_a_model_config_alone_reads_no_folder() -> None:
    """As a checkpoint's does, whose run began with weights that are gone."""
    assert ModelConfig(init_from="/nowhere", vocab_size=5).init_from == "/nowhere"
