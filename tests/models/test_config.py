"""The model section: presets, defaults, errors, and that every key does something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import validate
from common.errors import UserError
from models.config import ModelConfig, load_preset, preset_names
from models.transformer import Transformer

ROOT = Path(__file__).parents[2]


def test_importing_config_and_flops_imports_no_torch() -> None:
    code = "import sys, models.config, models.flops, models.init; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_given_keys_lie_over_the_preset() -> None:
    config = ModelConfig(preset="gpt2-124m", n_layers=3)
    assert (config.n_layers, config.d_model, config.position) == (3, 768, "learned")
    assert ModelConfig(**config.model_dump()) == config


def test_a_preset_does_not_pin_what_follows_from_other_keys() -> None:
    config = ModelConfig(preset="llama-8m", d_model=64, n_heads=2)
    assert (config.d_head, config.kv_heads) == (32, 2)


def test_preset_files_hold_only_known_keys() -> None:
    for name in preset_names():
        assert set(load_preset(name)) <= set(ModelConfig.model_fields) - {"preset"}


def test_every_field_is_described_in_one_sentence() -> None:
    for name, field in ModelConfig.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_vocabulary_comes_from_the_tokenizer_unless_given() -> None:
    assert ModelConfig().with_vocab_size(4096).vocab == 4096
    assert ModelConfig(vocab_size=4100).with_vocab_size(4096).vocab == 4100
    with pytest.raises(UserError, match=r"model\.vocab_size is 100.*4096"):
        ModelConfig(vocab_size=100).with_vocab_size(4096)
    with pytest.raises(UserError, match=r"model\.vocab_size"):
        Transformer(ModelConfig())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"preset": "llama-2m"}, "did you mean 'llama-"),
        ({"preset": "zzz"}, "set model.preset to one of: "),
        ({"n_heads": 3}, "n_heads=3 does not divide d_model=128; set model.n_heads"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 does not divide n_heads=4; set model.n_kv_heads"),
        ({"head_dim": 7}, "set model.head_dim to an even number"),
        ({"d_model": 0}, "'d_model': must be greater than 0"),
        ({"preset": "gpt2-124m", "n_layers": -1}, "'n_layers': must be greater than 0"),
        ({"activation": "swiglue"}, "'activation': must be 'swiglu'"),
        ({"position": False}, "'position': must be a word"),
        ({"n_layer": 2}, "did you mean 'n_layers'?"),
        ({"tie_embeddings": "yes please"}, "must be true or false"),
        ({"moe": {"n_experts": 4, "top_k": 5}}, "'moe': top_k=5 is above n_experts=4"),
        ({"moe": {"top_k": 1}}, "set model.moe.normalize=false"),
        ({"n_layers": 2, "moe": {"n_dense_layers": 2}}, "leaves no block of 2 with experts"),
        ({"moe": {"n_expert": 4}}, "did you mean 'moe.n_experts'?"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2}}, "'original_max_seq_len' is needed under kind: yarn"),
        ({"rope_scaling": {"kind": "linear", "factor": 2, "beta_fast": 3}}, "does nothing under kind: linear"),
        ({"rope_scaling": {"factor": 2}}, "'rope_scaling.kind' is required"),
        (
            {"position": "none", "rope_fraction": 0.5},
            "'rope_fraction' does nothing here (it belongs to position: rope)",
        ),
        ({"attention_global_every": 2}, "(it belongs to attention_window); remove it"),
        ({"activation_limit": 2}, "(it belongs to activation: swiglu_clamped); remove it"),
        ({"rope_theta_local": 10}, "(it belongs to rope and a window); remove it"),
        ({"norm": "layernorm", "norm_unit_offset": True}, "(it belongs to norm: rmsnorm); remove it"),
        ({"rope_fraction": 0.1}, "3 numbers of each head cannot be rotated in pairs"),
    ],
)
def test_wrong_input_is_one_line_that_names_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(ModelConfig, keys, "model")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


BASE: dict[str, Any] = {"vocab_size": 31, "n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 24, "max_seq_len": 8}
CHANGED: dict[str, tuple[dict[str, Any], Any]] = {  # field: (keys it needs to matter, another value)
    "preset": ({}, "gpt2-124m"),
    "vocab_size": ({}, 32),
    "n_layers": ({}, 3),
    "d_model": ({}, 32),
    "n_heads": ({"head_dim": 4}, 8),
    "n_kv_heads": ({}, 2),
    "head_dim": ({}, 8),
    "d_ff": ({}, 32),
    "max_seq_len": ({"position": "learned"}, 9),
    "norm": ({}, "layernorm"),
    "norm_eps": ({}, 0.1),
    "norm_bias": ({}, True),
    "norm_unit_offset": ({}, True),
    "norm_placement": ({}, "post"),
    "final_norm": ({}, False),
    "activation": ({"activation": "gelu"}, "relu"),
    "activation_limit": ({"activation": "swiglu_clamped"}, 0.01),
    "position": ({}, "none"),
    "rope_theta": ({}, 100.0),
    "rope_theta_local": ({"attention_window": 4}, 10.0),
    "rope_scaling": ({}, {"kind": "linear", "factor": 4}),
    "rope_fraction": ({}, 0.5),
    "relative_clip": ({"position": "relative"}, 3),
    "scale_embedding": ({}, True),
    "tie_embeddings": ({}, True),
    "attention_bias": ({}, True),
    "attention_out_bias": ({"attention_bias": True}, False),
    "attention_scale": ({}, 2.0),
    "attention_softcap": ({}, 0.5),
    "attention_sinks": ({}, True),
    "attention_window": ({}, 2),
    "attention_global_every": ({"attention_window": 2}, 2),
    "mlp_bias": ({}, True),
    "qk_norm": ({}, True),
    "logit_softcap": ({}, 0.5),
    "moe": ({}, {"n_experts": 4}),
    "init_std": ({}, 0.5),
    "mup_base_width": ({}, 4),
}


def _observe(keys: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor]:
    """Parameter shapes, initial values, and the logits of a model filled by them."""
    model = Transformer(ModelConfig(**keys))
    generator = torch.Generator().manual_seed(0)
    inits = model.initial_values()
    with torch.no_grad():
        for name, init in inits.items():
            p = model.get_parameter(name)
            p.copy_(0.3 * torch.randn(p.shape, generator=generator) if init.kind == "normal" else torch.ones_like(p))
        logits = model(torch.arange(8)[None] % 31)
    return {n: p.shape for n, p in model.named_parameters()}, inits, logits


@pytest.mark.parametrize("field", sorted(ModelConfig.model_fields.keys() - {"init_from"}))  # the trainer reads that one
def test_every_field_changes_the_parameters_the_initial_values_or_the_output(field: str) -> None:
    needs, value = CHANGED[field]
    before, after = _observe({**BASE, **needs}), _observe({**BASE, **needs, field: value})
    assert before[:2] != after[:2] or not torch.allclose(before[2], after[2], rtol=1e-3, atol=1e-3)


def test_a_sequence_longer_than_the_model_accepts_is_refused() -> None:
    with pytest.raises(UserError, match=r"9 tokens is longer than model\.max_seq_len=8"):
        Transformer(ModelConfig(**BASE))(torch.zeros(1, 9, dtype=torch.long))
