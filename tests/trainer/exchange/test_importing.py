"""Hugging Face folders as checkpoints, and back unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.errors import UserError
from data.tokenizers.training import train_sentencepiece
from tests.data.tokenizers_of_every_kind import byte_level_bpe
from tests.models.families.references import CASES
from tests.trainer.exchange.checkpoints import tensors_of, tree
from tests.trainer.exchange.test_export import our_model
from trainer.exchange.export import export, plan_export
from trainer.exchange.importing import import_folder
from trainer.manifest import damage, read_trainer_state
from trainer.rundir import find_checkpoint

# One of each family, the first.
FAMILY_CASES = {model_type: case for case, (model_type, _) in reversed(CASES.items())}


@pytest.mark.parametrize("case", FAMILY_CASES.values())
@torch.no_grad()
def test_in_and_out_again(saved: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    """Our model of the checkpoint has their logits; the exported folder is theirs, tensor by tensor."""
    folder, checkpoint, out = saved(case), tmp_path / "checkpoint", tmp_path / "out"
    report = import_folder(folder, checkpoint)
    assert find_checkpoint(checkpoint) == checkpoint
    assert damage(checkpoint) == {}
    assert report["model_type"] == CASES[case][0]
    assert report["notes"] == ["the folder has no tokenizer.json or tokenizer.model, and so the checkpoint has none"]
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    tokens_BT = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(our_model(checkpoint)(tokens_BT), theirs(tokens_BT).logits, rtol=1e-4, atol=1e-4)

    export(plan_export(checkpoint, "fp32", 10_000), out)
    before, after = tensors_of(folder), tensors_of(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    again = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", experts_implementation="eager")
    assert torch.equal(again(tokens_BT).logits, theirs(tokens_BT).logits)


@pytest.fixture
def folder(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a Llama's folder to change."""
    return Path(shutil.copytree(saved("llama"), tmp_path / "llama"))


def test_half_precision_and_several_files(saved: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved("llama"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "llama", max_shard_size="10KB")
    assert (tmp_path / "llama" / "model.safetensors.index.json").exists()
    import_folder(tmp_path / "llama", tmp_path / "checkpoint")
    exact = tensors_of(saved("llama"))["lm_head.weight"]
    head = our_model(tmp_path / "checkpoint").head
    assert head is not None
    assert torch.equal(head.weight, exact.bfloat16().float())


def test_names_of_a_model_without_head(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """As GPT-2's published files have them, with tables that carry nothing, also a scalar one."""
    folder = Path(shutil.copytree(saved("gpt2"), tmp_path / "gpt2"))
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(tensors, folder / "model.safetensors")
    import_folder(folder, tmp_path / "checkpoint")
    import_folder(saved("gpt2"), tmp_path / "expected")
    ours, expected = our_model(tmp_path / "checkpoint"), our_model(tmp_path / "expected")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), expected.parameters(), strict=True))


def change_config(folder: Path, **keys: Any) -> None:
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | keys))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def indexed(folder: Path, *files: Any) -> None:
    weight_map = {f"tensor {i}": file for i, file in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def second_copy(folder: Path, dtype: torch.dtype) -> None:
    indexed(folder, "model.safetensors", "z.safetensors")
    save_file({NORM: torch.zeros(32, dtype=dtype)}, folder / "z.safetensors")


def added_tokens(folder: Path, added: Any) -> None:
    change_config(folder, eos_token_id=3)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


NORM = "model.norm.weight"
WRONG: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "family": (lambda f: change_config(f, model_type="bloom"), ["config.json", 'model_type "bloom" is not supported']),
    "code": (
        lambda f: change_config(f, model_type="mine", auto_map={"AutoModelForCausalLM": "modeling.Mine"}),
        ['model_type "mine" is not supported'],
    ),
    "setting": (lambda f: change_config(f, hidden_act="relu"), ['hidden_act: "relu" is not supported']),
    "no config": (lambda f: (f / "config.json").unlink(), ["no Hugging Face folder (no config.json)"]),
    "no json": (lambda f: (f / "config.json").write_text("{"), ["config.json: cannot be read"]),
    "a list": (lambda f: (f / "config.json").write_text("[]"), ["config.json: must be a JSON object"]),
    "missing": (
        lambda f: change_tensors(f, lambda t: t.pop(NORM)),
        ["lacks 'model.norm.weight', which llama of this config.json has;"],
    ),
    "missing two": (
        lambda f: change_tensors(f, lambda t: (t.pop(NORM), t.pop("lm_head.weight"))),
        ["lacks 'lm_head.weight' and 1 more, which"],
    ),
    "unexpected": (
        lambda f: change_tensors(f, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})),
        ["holds 'model.layers.0.self_attn.q_proj.bias', for which llama of this config.json has no place"],
    ),
    "shape": (
        lambda f: change_tensors(f, lambda t: t.update({NORM: torch.zeros(33)})),
        ["'model.norm.weight' has the shape (33,), but config.json means (32,)"],
    ),
    "type": (
        lambda f: change_tensors(f, lambda t: t.update({NORM: torch.zeros(32, dtype=torch.uint8)})),
        ["'model.norm.weight' is of type U8"],
    ),
    "other head": (
        lambda f: change_config(f, tie_word_embeddings=True),
        ["'lm_head.weight' differs from 'model.embed_tokens.weight', and config.json ties the two; set tie_word"],
    ),
    "twice": (
        lambda f: second_copy(f, torch.float32),
        ["model.safetensors: has 'model.norm.weight', as z.safetensors has once more"],
    ),
    "twice, of another type": (lambda f: second_copy(f, torch.uint8), ["as z.safetensors has once more"]),
    "pickle": (pickled, ["only in pytorch_model.bin, a pickle, which is not read because it can run code"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["has no weights"]),
    "elsewhere": (lambda f: indexed(f, "../model.safetensors"), ["index.json: no index of weights"]),
    "absent file": (lambda f: indexed(f, "model-2.safetensors"), ["model-2.safetensors: cannot be read: No such file"]),
    "list of files": (lambda f: indexed(f, ["x"]), ["index.json: no index of weights"]),
    "files and others": (lambda f: indexed(f, "model.safetensors", 5), ["index.json: no index of weights"]),
    "added: texts": (lambda f: added_tokens(f, ["x"]), ["tokenizer.json: not a tokenizer.json"]),
    "added: a number": (lambda f: added_tokens(f, 5), ["tokenizer.json: not a tokenizer.json"]),
    "added: no text": (lambda f: added_tokens(f, [{"id": 3}]), ["tokenizer.json: not a tokenizer.json"]),
    "no tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), ["tokenizer.json: not a tokenizer.json"]),
    "tokens": (
        lambda f: byte_level_bpe(["some text"]).save(str(f / "tokenizer.json")),
        ["tokenizer.json: has 265 tokens, but the model of config.json has a vocab_size of 61"],
    ),
    "pieces": (
        lambda f: (f / "tokenizer.model").write_bytes(train_sentencepiece(["the cat, the hat"], 270)),
        ["tokenizer.model: has 270 tokens, but the model of config.json has a vocab_size of 61"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folders_are_named_and_leave_nothing(folder: Path, tmp_path: Path, name: str) -> None:
    change, parts = WRONG[name]
    change(folder)
    before = tree(tmp_path)
    with pytest.raises(UserError) as error:
        import_folder(folder, tmp_path / "checkpoint")
    for part in (str(folder), *parts):
        assert part in str(error.value)
    assert tree(tmp_path) == before


def test_a_tied_head_of_the_same_numbers_is_none_of_its_own(folder: Path, tmp_path: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    import_folder(folder, tmp_path / "checkpoint")
    model = our_model(tmp_path / "checkpoint")
    assert model.head is None
    assert torch.equal(model.embedding.weight, load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


def test_code_beside_a_known_family_is_ignored(folder: Path, tmp_path: Path) -> None:
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    import_folder(folder, tmp_path / "checkpoint")
    assert read_trainer_state(tmp_path / "checkpoint")["weights_only"] is True


def test_an_interrupted_import_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)

    def interrupt(n_parameters: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_folder(folder, tmp_path / "checkpoint", progress=interrupt)
    assert tree(tmp_path) == before
