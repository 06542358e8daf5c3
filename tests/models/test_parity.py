"""Logits and gradients equal those of transformers' Llama and GPT-2 with the same weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from models.transformer import Transformer

LLAMA = {  # our name: theirs, in each block
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
}
GPT2 = {  # Conv1D: weights transposed, and q, k, v side by side
    "attention_norm": "ln_1",
    "attention.wq": ("attn.c_attn", 0),
    "attention.wk": ("attn.c_attn", 1),
    "attention.wv": ("attn.c_attn", 2),
    "attention.wo": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.w_up": "mlp.c_fc",
    "mlp.w_down": "mlp.c_proj",
}


def _llama_values(of: Callable[[str], Tensor], n_layers: int, tied: bool) -> dict[str, Tensor]:
    """Our names to what `of` (a parameter or a gradient by their name) gives, in our layout."""
    values = {"embedding.weight": of("model.embed_tokens.weight"), "norm.weight": of("model.norm.weight")}
    if not tied:
        values["head.weight"] = of("lm_head.weight")
    for i in range(n_layers):
        for ours, theirs in LLAMA.items():
            values[f"blocks.{i}.{ours}.weight"] = of(f"model.layers.{i}.{theirs}.weight")
    return values


def _gpt2_values(of: Callable[[str], Tensor], n_layers: int) -> dict[str, Tensor]:
    values = {
        "embedding.weight": of("transformer.wte.weight"),
        "position_embedding.weight": of("transformer.wpe.weight"),
        "norm.weight": of("transformer.ln_f.weight"),
        "norm.bias": of("transformer.ln_f.bias"),
    }
    for i in range(n_layers):
        for ours, theirs in GPT2.items():
            name, part = theirs if isinstance(theirs, tuple) else (theirs, None)
            for leaf in ("weight", "bias"):
                value = of(f"transformer.h.{i}.{name}.{leaf}")
                value = value if part is None else value.chunk(3, dim=-1)[part]
                values[f"blocks.{i}.{ours}.{leaf}"] = value.T if value.ndim == 2 else value
    return values


def _randomise(reference: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator) + (1.0 if p.ndim == 1 else 0.0))


def _compare(
    model: Transformer,
    reference: nn.Module,
    to_ours: Callable[[Callable[[str], Tensor]], dict[str, Tensor]],
    tokens_BT: Tensor,
) -> None:
    with torch.no_grad():
        values = to_ours(lambda name: reference.get_parameter(name))
        assert set(values) == {n for n, _ in model.named_parameters()}
        for name, value in values.items():
            model.get_parameter(name).copy_(value)
    logits = reference(tokens_BT).logits
    torch.testing.assert_close(model(tokens_BT), logits, rtol=1e-4, atol=1e-4)

    targets = tokens_BT.roll(-1, dims=1)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected.backward()
    loss = model(tokens_BT, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    grads = to_ours(lambda name: reference.get_parameter(name).grad)
    # The gradient of a key's bias is exactly zero without rotation, so tiny ones are held against the whole.
    floor = 1e-6 * torch.stack([g.norm() for g in grads.values()]).norm()
    for name, grad in grads.items():
        ours = model.get_parameter(name).grad
        assert ours is not None
        assert (ours - grad).norm() <= (1e-4 * grad.norm()).clamp(min=floor), name


@pytest.mark.parametrize("tied", [False, True])
def test_llama_with_grouped_queries(build: Callable[..., Transformer], tokens_BT: Tensor, tied: bool) -> None:
    model = build(n_kv_heads=2, tie_embeddings=tied, rope_theta=500.0, norm_eps=1e-6)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tied,
    )
    reference = LlamaForCausalLM(config)
    _randomise(reference)
    _compare(model, reference, lambda of: _llama_values(of, 2, tied), tokens_BT)


def test_gpt2(build: Callable[..., Transformer], tokens_BT: Tensor) -> None:
    keys = {"norm": "layernorm", "norm_bias": True, "activation": "gelu_tanh", "position": "learned"}
    model = build(**keys, tie_embeddings=True, attention_bias=True, mlp_bias=True)
    config = GPT2Config(
        vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=4, n_inner=48, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    reference = GPT2LMHeadModel(config)
    _randomise(reference)
    _compare(model, reference, lambda of: _gpt2_values(of, 2), tokens_BT)
