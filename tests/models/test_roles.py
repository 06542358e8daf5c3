"""Roles and initial values of one model, spelled out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest

from models.config import ModelConfig
from models.init import Init
from models.transformer import Transformer


def test_roles_of_a_model_with_everything(build: Callable[..., Transformer]) -> None:
    roles = build(
        n_kv_heads=2, position="learned", qk_norm=True, attention_bias=True, mlp_bias=True, norm_bias=True
    ).parameter_roles()
    assert json.loads(json.dumps(roles)) == roles
    matrix = {"role": "hidden_matrix", "parts": 1, "heads": 1}
    block = "blocks.1."
    assert roles["embedding.weight"] == {"role": "embedding", "parts": 1, "heads": 1}
    assert roles["position_embedding.weight"] == {"role": "embedding", "parts": 1, "heads": 1}
    assert roles["head.weight"] == {"role": "head", "parts": 1, "heads": 1}
    assert roles[block + "attention.wq.weight"] == {**matrix, "heads": 4}
    assert roles[block + "attention.wk.weight"] == {**matrix, "heads": 2}
    assert roles[block + "attention.wv.weight"] == {**matrix, "heads": 2}
    for name in ("attention.wo", "mlp.w_gate", "mlp.w_up", "mlp.w_down"):
        assert roles[f"{block}{name}.weight"] == matrix
    vectors = {n for n, r in roles.items() if r["role"] == "vector"}
    assert vectors == {n for n in roles if n.endswith(".bias") or "norm" in n}


def test_initial_values(build: Callable[..., Transformer]) -> None:
    model = build(attention_bias=True, norm_bias=True, init_std=0.04, n_layers=2)
    values = model.initial_values()
    assert values["embedding.weight"] == values["head.weight"] == Init("normal", 0.04)
    assert values["blocks.0.attention.wq.weight"] == Init("normal", 0.04)
    assert values["blocks.0.mlp.w_up.weight"] == Init("normal", 0.04)
    assert values["blocks.0.attention.wo.weight"] == values["blocks.1.mlp.w_down.weight"] == Init("normal", 0.02)
    assert values["blocks.0.attention.wo.bias"] == values["norm.bias"] == Init("zeros")
    assert values["norm.weight"] == values["blocks.1.mlp_norm.weight"] == Init("ones")
    with pytest.raises(FrozenInstanceError):
        values["norm.weight"].std = 1.0  # type: ignore[misc]


def test_biases_tying_and_norms_change_the_parameter_set(build: Callable[..., Transformer]) -> None:
    plain = set(build().parameter_roles())
    added = {
        "attention_bias": {f"attention.{w}.bias" for w in ("wq", "wk", "wv", "wo")},
        "mlp_bias": {f"mlp.{w}.bias" for w in ("w_gate", "w_up", "w_down")},
        "qk_norm": {"attention.q_norm.weight", "attention.k_norm.weight"},
    }
    for key, names in added.items():
        in_blocks = {f"blocks.{i}.{name}" for i in range(2) for name in names}
        assert set(build(**{key: True}).parameter_roles()) == plain | in_blocks
    norms = {n for n in plain if "norm" in n}
    assert set(build(norm_bias=True).parameter_roles()) == plain | {n.replace("weight", "bias") for n in norms}
    assert set(build(tie_embeddings=True).parameter_roles()) == plain - {"head.weight"}
    assert set(build(final_norm=False).parameter_roles()) == plain - {"norm.weight"}
    assert set(build(activation="gelu").parameter_roles()) == plain - {f"blocks.{i}.mlp.w_gate.weight" for i in (0, 1)}


def test_a_head_of_its_own_is_absent_when_tied() -> None:
    assert Transformer(ModelConfig(vocab_size=16, tie_embeddings=True)).head is None
