"""What no other library has, or has in many kernels, against a float64 loop over heads and queries: `plain.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.transformer import Transformer
from tests.models import plain
from tests.models.packed import assert_close, loss_and_grads

Build = Callable[..., Transformer]
KINDS: dict[str, dict[str, Any]] = {
    "post-norm": {"norm_placement": "post", "norm": "layernorm", "position": "learned"},
    "both norms": {"norm_placement": "both", "norm_unit_offset": True, "position": "none", "n_kv_heads": 2},
    "relative": {"position": "relative", "relative_clip": 6},
    "relative, all its offsets": {"position": "relative", "relative_clip": 40, "n_kv_heads": 1},
    "relative, post-norm, window": {
        "position": "relative",
        "relative_clip": 3,
        "norm_placement": "post",
        "attention_window": 5,
    },
    "softcaps": {"attention_softcap": 0.7, "logit_softcap": 1.5, "position": "none"},
    "sinks and windows": {
        "attention_sinks": True,
        "attention_window": 4,
        "attention_global_every": 2,
        "position": "none",
    },
    "window of a fused kernel": {"attention_window": 4, "attention_scale": 0.9, "position": "learned"},
}
every_kind = pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)


@every_kind
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_logits_and_gradients_are_those_of_the_loop(
    build: Build, tokens_BT: Tensor, keys: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    """In fp32 to a hundred roundings."""
    model = build(**keys)
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    model.to(dtype)
    total = torch.zeros((), dtype=torch.float64)
    for row in tokens_BT:
        expected = plain.logits(weights, model.config, row.tolist())
        got = model(row[None])[0].detach().double()
        assert (got - expected).norm() <= tolerance * expected.norm()
        total = total + F.cross_entropy(expected, row.roll(-1), reduction="sum")
    total.backward()
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    assert_close(loss_and_grads(model, tokens_BT), (total.detach(), gradients), tolerance)


@every_kind
@torch.no_grad()
def test_the_kind_acts(build: Build, tokens_BT: Tensor, keys: dict[str, Any]) -> None:
    """Each key alone changes the logits: none is idle in the comparison above."""
    whole = build(**keys)(tokens_BT)
    for key in keys.keys() - {"position", "norm", "n_kv_heads", "relative_clip"}:
        less = {k: v for k, v in keys.items() if k != key and not (key == "attention_window" and "global" in k)}
        other = build(**less)
        model = build(**keys)
        for name, p in other.named_parameters():
            if name in dict(model.named_parameters()):
                p.copy_(model.get_parameter(name))
        assert (other(tokens_BT) - whole).abs().max() > 1e-3, key
