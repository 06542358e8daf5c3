"""Each family computes what transformers computes with the same weights, and its folders go both ways.

Weights and gradients pass through the files' names and layout, which transformers itself makes here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from models.config import ModelConfig
from models.families import Family, family_for, read_folder_config
from models.families.codecs import meanings
from models.transformer import Transformer
from tests.models.families.references import (
    CASES,
    VOCAB,
    T,
    greedy,
    make_ours,
    make_reference,
    published,
    to_ours,
    to_theirs,
)


class Pair(NamedTuple):
    """A model of theirs, saved by them, and ours, which has read that folder."""

    reference: nn.Module
    saved: dict[str, Tensor]
    family: Family
    config: ModelConfig
    model: Transformer


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    reference, folder = make_reference(request.param), tmp_path_factory.mktemp("saved")
    reference.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    family, config = read_folder_config(json.loads((folder / "config.json").read_text()), str(folder))
    return Pair(reference, saved, family, config, make_ours(family, config, saved))


@pytest.fixture
def tokens_BT() -> Tensor:
    return torch.randint(0, VOCAB, (3, T), generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients(pair: Pair, tokens_BT: Tensor) -> None:
    reference, model = pair.reference, pair.model
    logits_BTV = reference(tokens_BT).logits
    torch.testing.assert_close(model(tokens_BT), logits_BTV, rtol=1e-4, atol=1e-4)

    targets_BT = tokens_BT.roll(-1, dims=1)
    expected = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
    loss = model(tokens_BT, targets_BT).cross_entropy
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    gradients = dict(zip(("theirs", "ours"), _gradients(pair, expected, loss), strict=True))
    assert set(gradients["theirs"]) == {name for name, _ in model.named_parameters()}
    # The gradient of a key's bias is exactly zero without rotation, so tiny ones are held against the whole.
    floor = 1e-6 * torch.stack([g.norm() for g in gradients["theirs"].values()]).norm()
    for name, theirs in gradients["theirs"].items():
        assert (gradients["ours"][name] - theirs).norm() <= (1e-4 * theirs.norm()).clamp(min=floor), name


def _gradients(pair: Pair, expected: Tensor, loss: Tensor) -> Iterator[dict[str, Tensor]]:
    """By our names: theirs, ours."""
    names, parameters = zip(*pair.reference.named_parameters(), strict=True)
    theirs = dict(zip(names, torch.autograd.grad(expected, parameters), strict=True))
    yield to_ours(pair.family, pair.config, published(pair.reference, theirs))
    names, parameters = zip(*pair.model.named_parameters(), strict=True)
    yield dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@torch.no_grad()
def test_greedy_generation(pair: Pair, tokens_BT: Tensor) -> None:
    prompt_BT, n = tokens_BT[:, :7], 32
    expected = pair.reference.generate(
        prompt_BT, attention_mask=torch.ones_like(prompt_BT), max_new_tokens=n, do_sample=False, use_cache=True
    )
    assert greedy(pair.model, prompt_BT, n).tolist() == expected[:, 7:].tolist()


def test_export_brings_back_the_files_and_transformers_reads_them(
    pair: Pair, tokens_BT: Tensor, tmp_path: Path
) -> None:
    family, config = pair.family, pair.config
    assert family_for(config) is family
    tensors = to_theirs(family, config, pair.model)
    assert tensors.keys() == pair.saved.keys()
    assert all(torch.equal(tensors[name], saved) for name, saved in pair.saved.items())
    shapes = {item.name: item.shape for item in family.exports(config)}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in pair.saved.items()}
    ours = {item.name: item.shape for item in family.imports(config)}
    assert ours == {name: tuple(tensor.shape) for name, tensor in pair.model.state_dict().items()}

    (tmp_path / "config.json").write_text(json.dumps(family.write_config(config)))
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        assert torch.equal(again(tokens_BT).logits, pair.reference(tokens_BT).logits)
    assert meanings(read_folder_config(again.config.to_dict(), "")[1]) == meanings(config)
