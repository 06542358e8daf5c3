"""Every preset, on the meta device: counts, roles and initial values are complete."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.config import PRESET_DIR, ModelConfig, preset_names
from models.families import read_folder_config
from models.flops import PARTS, parameter_counts, parameter_parts
from models.layers import CLAMP
from models.transformer import Transformer
from tests.models.published import PUBLISHED

COUNTS = {  # of the published models, and of ours with the vocabulary their files name
    "llama-1m": 1_115_264,
    "llama-8m": 7_868_672,
    "llama-125m": 123_551_232,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gpt2-124m": 124_439_808,
    "gpt3-175b": 174_604_259_328,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm-4.5-air": 106_852_245_504,
    "switch-base-8": 506_082_192,
    "moe-8m": 8_136_960,
}
VOCABULARIES = {"llama-1m": 4096, "llama-8m": 4096, "moe-8m": 4096, "llama-125m": 50257}
SPARSE = ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "glm-4.5-air", "switch-base-8", "moe-8m")


def _config(name: str, **keys: Any) -> ModelConfig:
    return ModelConfig(preset=name, **{"vocab_size": VOCABULARIES[name], **keys} if name in VOCABULARIES else keys)


@cache
def _meta(name: str) -> Transformer:
    with torch.device("meta"):
        return Transformer(_config(name))


@cache
def _counts(name: str) -> dict[str, int]:
    return parameter_counts(_config(name))


def test_every_preset_has_a_count() -> None:
    assert set(COUNTS) == set(preset_names())
    assert set(PUBLISHED) == set(preset_names()) - {"switch-base-8"}  # which transformers has as encoder and decoder
    assert {name for name in COUNTS if _config(name).moe is not None} == set(SPARSE)


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count_is_the_published_one(name: str) -> None:
    counts = _counts(name)
    assert counts["total"] == COUNTS[name]
    assert sum(counts[part] for part in PARTS) == COUNTS[name]
    assert sum(p.numel() for p in _meta(name).parameters()) == COUNTS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_that_of_transformers_from_the_published_config(name: str) -> None:
    keys = dict(PUBLISHED[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys))
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]


def _resolved(config: ModelConfig) -> dict[str, Any]:
    """What the config means, without what is for training alone: keys that are left out have a value too."""
    moe = {} if config.moe is None else config.moe.model_dump() | {"d_ff": config.d_ff_expert}
    return config.model_dump(exclude={"preset", "init_std", "mup_base_width"}) | {
        "n_kv_heads": config.kv_heads,
        "head_dim": config.d_head,
        "attention_scale": config.attention_scale or config.d_head**-0.5,
        "activation_limit": config.activation_limit or (CLAMP if config.activation == "swiglu_clamped" else None),
        "moe": {key: value for key, value in moe.items() if not key.endswith("_coef")},
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_the_published_config_says(name: str) -> None:
    """As an import reads it."""
    _, published = read_folder_config(PUBLISHED[name], name)
    assert _resolved(_config(name)) == _resolved(published)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_in_the_comment_of_a_preset_are_its_own(name: str) -> None:
    comment = " ".join(
        line.lstrip("# ")
        for line in (PRESET_DIR / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    )
    named = {int(number.replace(",", "")) for number in re.findall(r"\d{1,3}(?:,\d{3}){2,}", comment)}
    assert {_counts(name)["total"], _counts(name)["active"]} <= named


def test_totals_of_the_survey_follow_from_its_conventions() -> None:
    """arXiv 2610.04631 counts GPT-3 and Llama 3 405B with these conventions; see the survey's section 3."""
    gpt3 = _config("gpt3-175b", tie_embeddings=False, position="none", attention_bias=False, final_norm=False)
    assert parameter_counts(gpt3)["total"] == 175_191_908_352
    llama3 = _config("llama3-405b", mlp_bias=True, norm_bias=True, final_norm=False)
    assert parameter_counts(llama3)["total"] == 405_872_984_064


def test_active_parameters_are_those_that_are_published() -> None:
    """As far as their authors round; OpenAI leaves the embedding out, Zhipu both tables."""
    assert round(_counts("mixtral-8x7b")["active"] / 1e9, 1) == 12.9
    assert round(_counts("qwen3-30b-a3b")["active"] / 1e9, 2) == 3.35
    for name, billions in (("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)):
        assert round((_counts(name)["active"] - _counts(name)["embedding"]) / 1e9, 2) == billions
    glm = _counts("glm-4.5-air")
    assert round((glm["active"] - glm["embedding"] - glm["head"]) / 1e9) == 12


@pytest.mark.parametrize("name", COUNTS)
def test_active_parameters(name: str) -> None:
    """All of a dense model; of a sparse one all but the experts that a token does not go to."""
    counts, config = _counts(name), _config(name)
    idle = 0
    if config.moe is not None:
        layers = config.n_layers - config.moe.n_dense_layers
        ones = (3 if config.gated else 2) * config.d_model * config.d_ff_expert
        if config.mlp_bias:
            ones += 2 * config.d_ff_expert + config.d_model
        idle = layers * (config.moe.n_experts - config.moe.top_k) * ones
    assert counts["active"] == counts["total"] - idle
    assert (counts["experts"] > 0) == (counts["router"] > 0) == (name in SPARSE)


def test_parts_in_blocks() -> None:
    """GLM-4.5-Air has one dense block, 45 with experts, and is written out here by hand."""
    parts = {part.name: part[1:] for part in parameter_parts(_config("glm-4.5-air"))}
    attention = 4096 * 128 * (96 + 8 + 8) + 128 * (96 + 8 + 8) + 96 * 128 * 4096
    experts = 128 * 3 * 4096 * 1408
    assert parts == {
        "embedding": (0, 0, 151552 * 4096, 151552 * 4096),
        "attention": (attention, 46, 46 * attention, 46 * attention),
        "mlp": (3 * 4096 * 10944, 1, 3 * 4096 * 10944, 3 * 4096 * 10944),
        "router": (128 * 4096, 45, 45 * 128 * 4096, 45 * 128 * 4096),  # its selection bias is no parameter
        "experts": (experts, 45, 45 * experts, 45 * experts // 16),
        "shared": (3 * 4096 * 1408, 45, 45 * 3 * 4096 * 1408, 45 * 3 * 4096 * 1408),
        "norms": (2 * 4096, 46, 46 * 2 * 4096, 46 * 2 * 4096),
        "final norm": (0, 0, 4096, 4096),
        "head": (0, 0, 151552 * 4096, 151552 * 4096),
    }


@pytest.mark.parametrize("name", COUNTS)
def test_every_parameter_has_exactly_one_role_and_one_initial_value(name: str) -> None:
    model = _meta(name)
    names = [n for n, _ in model.named_parameters()]
    roles, inits = model.parameter_roles(), model.initial_values()
    assert list(roles) == names
    assert list(inits) == names
    for n, p in model.named_parameters():
        # Biases of experts are vectors, one for each; numbers of relative positions are looked up, as an embedding is.
        a_vector = p.ndim == 1 or n.endswith(("gate_bias", "up_bias", "down_bias"))
        assert (roles[n]["role"] == "vector") == a_vector
        assert (roles[n]["role"] == "expert_matrix") == (p.ndim == 3) == (".experts.w_" in n)
        assert (roles[n]["role"] == "router") == n.endswith("router.weight")
        assert (roles[n]["role"] == "embedding") == n.endswith(("embedding.weight", "relative_bias"))
        assert p.shape[0] % (roles[n]["parts"] * roles[n]["heads"]) == 0
        assert (inits[n].kind == "normal") == (not a_vector and not n.endswith("relative_bias"))


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_runs_forward_on_the_meta_device(name: str) -> None:
    tokens = torch.zeros(1, 8, dtype=torch.long, device="meta")
    losses = _meta(name)(tokens, tokens)
    assert losses.cross_entropy.shape == ()
    assert (losses.routing is None) == (name not in SPARSE)
