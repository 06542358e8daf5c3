"""Every preset, on the meta device: counts, roles and initial values are complete."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from models.config import ModelConfig, preset_names
from models.flops import parameter_counts
from models.transformer import Transformer

COUNTS = {  # of the published models, and of ours with the vocabulary their files name
    "llama-1m": 1_115_264,
    "llama-8m": 7_868_672,
    "llama-125m": 123_551_232,
    "llama3-8b": 8_030_261_248,
    "llama3-405b": 405_853_388_800,
    "gpt2-124m": 124_439_808,
    "gpt3-175b": 174_604_259_328,
}
VOCABULARIES = {"llama-1m": 4096, "llama-8m": 4096, "llama-125m": 50257}


def _config(name: str, **keys: Any) -> ModelConfig:
    return ModelConfig(preset=name, **{"vocab_size": VOCABULARIES[name], **keys} if name in VOCABULARIES else keys)


@cache
def _meta(name: str) -> Transformer:
    with torch.device("meta"):
        return Transformer(_config(name))


def _reference(config: ModelConfig) -> PreTrainedModel:
    """The model of the same shape in transformers, on the meta device."""
    with torch.device("meta"):
        if config.norm == "layernorm":
            return GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=config.vocab,
                    n_positions=config.max_seq_len,
                    n_embd=config.d_model,
                    n_layer=config.n_layers,
                    n_head=config.n_heads,
                    n_inner=config.d_ff,
                )
            )
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab,
                hidden_size=config.d_model,
                intermediate_size=config.d_ff,
                num_hidden_layers=config.n_layers,
                num_attention_heads=config.n_heads,
                num_key_value_heads=config.kv_heads,
                tie_word_embeddings=config.tie_embeddings,
            )
        )


def test_every_preset_has_a_count() -> None:
    assert set(COUNTS) == set(preset_names())


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count_is_the_published_one_and_that_of_transformers(name: str) -> None:
    counts = parameter_counts(_config(name))
    assert counts["total"] == COUNTS[name]
    assert sum(v for k, v in counts.items() if k != "total") == COUNTS[name]
    assert sum(p.numel() for p in _meta(name).parameters()) == COUNTS[name]
    assert sum(p.numel() for p in _reference(_config(name)).parameters()) == COUNTS[name]


def test_totals_of_the_survey_follow_from_its_conventions() -> None:
    """arXiv 2610.04631 counts GPT-3 and Llama 3 405B with these conventions; see the survey's section 3."""
    gpt3 = _config("gpt3-175b", tie_embeddings=False, position="none", attention_bias=False, final_norm=False)
    assert parameter_counts(gpt3)["total"] == 175_191_908_352
    llama3 = _config("llama3-405b", mlp_bias=True, norm_bias=True, final_norm=False)
    assert parameter_counts(llama3)["total"] == 405_872_984_064


@pytest.mark.parametrize("name", COUNTS)
def test_every_parameter_has_exactly_one_role_and_one_initial_value(name: str) -> None:
    model = _meta(name)
    names = [n for n, _ in model.named_parameters()]
    roles, inits = model.parameter_roles(), model.initial_values()
    assert list(roles) == names
    assert list(inits) == names
    for n, p in model.named_parameters():
        assert (roles[n]["role"] == "vector") == (p.ndim == 1)
        assert p.shape[0] % (roles[n]["parts"] * roles[n]["heads"]) == 0
        assert (inits[n].kind == "normal") == (p.ndim == 2)


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_runs_forward_on_the_meta_device(name: str) -> None:
    tokens = torch.zeros(1, 8, dtype=torch.long, device="meta")
    model = _meta(name)
    assert model(tokens).shape == (1, 8, model.config.vocab)
    assert model(tokens, tokens).shape == ()
