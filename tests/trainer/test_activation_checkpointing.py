"""Activation checkpointing: the operations it adds, the memory it saves, and numbers that stay the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.errors import UserError
from models.config import ModelConfig
from models.flops import forward_flops_per_token
from models.transformer import Transformer
from tests.counters import Alive, Operations
from tests.gang import Gang
from tests.runs import TINY, started
from trainer.activation import checkpoint_blocks
from trainer.config import load_config

# All widths differ, also from the number of tokens of a micro-batch, so that a product is known by its shape.
D, F, HEADS, KV_HEADS, K, VOCAB = 64, 172, 4, 2, 16, 61
B, T = 2, 48
SHAPES: dict[str, Any] = {"d_model": D, "d_ff": F, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "max_seq_len": 64}
OTHER: dict[str, Any] = {"activation": "gelu", "mlp_bias": True, "attention_bias": True, "qk_norm": True}
MODES = [("none", 1), ("full", 1), ("selective", 1), ("full", 2), ("selective", 2)]
by_mode = pytest.mark.parametrize(("kind", "every"), MODES)


def model_of(kind: str, every: int, n_layers: int = 4, **keys: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=VOCAB, n_layers=n_layers, **SHAPES, **keys))
    if kind != "none":
        checkpoint_blocks(model, kind, every)  # type: ignore[arg-type]
    return model


@pytest.fixture
def tokens_BT() -> Tensor:
    return torch.randint(0, VOCAB, (B, T), generator=torch.Generator().manual_seed(1))


def operations_per_token(config: ModelConfig, seq_len: int, kind: str, every: int) -> float:
    """What a training step computes in its blocks, by formula.

    Three times the forward pass, and what is computed again: under `full` all but the down projection, because torch
    stops when it has what it needs, and needs only that product's input; under `selective` the products into `d_ff`.
    """
    forward = forward_flops_per_token(config, seq_len, causal=False) - 2 * config.d_model * config.vocab
    product = 2 * config.d_model * config.d_ff
    into = product * (2 if config.activation == "swiglu" else 1)
    again = {"none": 0, "full": forward - config.n_layers * product, "selective": config.n_layers * into}[kind]
    return 3 * forward + again * -(-config.n_layers // every) / config.n_layers


@by_mode
@pytest.mark.parametrize("keys", [{}, OTHER], ids=["swiglu", "gelu-biases"])
def test_operations_are_those_of_the_formula(tokens_BT: Tensor, kind: str, every: int, keys: dict[str, Any]) -> None:
    model = model_of(kind, every, **keys)
    with Operations(VOCAB) as operations:
        model(tokens_BT, tokens_BT).cross_entropy.backward()
    assert operations.total == B * T * operations_per_token(model.config, T, kind, every)


def test_what_the_modes_cost(tokens_BT: Tensor) -> None:
    """Measured, in forward passes of the blocks: 3 without checkpointing, 3.8 for `full`, `selective` in between."""

    def measure(kind: str, every: int, backward: bool = True) -> int:
        model = model_of(kind, every)
        with Operations(VOCAB) as operations, torch.set_grad_enabled(backward):
            loss = model(tokens_BT, tokens_BT).cross_entropy
            if backward:
                loss.backward()
        return operations.total

    forward = measure("none", 1, backward=False)
    total = {mode: measure(*mode) for mode in MODES}
    assert total["none", 1] == 3 * forward
    assert 3.75 * forward < total["full", 1] < 3.82 * forward
    assert 3.40 * forward < total["selective", 1] < 3.45 * forward
    for kind in ("full", "selective"):
        assert 2 * total[kind, 2] == total["none", 1] + total[kind, 1]


def test_selective_with_the_math_fallback(tokens_BT: Tensor) -> None:
    """Attention without a fused kernel: the values' product is kept, the square of scores is made again."""
    model = model_of("selective", 1)
    with sdpa_kernel(SDPBackend.MATH), Operations(VOCAB) as operations:
        model(tokens_BT, tokens_BT).cross_entropy.backward()
    scores = model.config.n_layers * 2 * HEADS * K * T
    assert operations.total == B * T * (operations_per_token(model.config, T, "selective", 1) + scores)


def memory_of(model: Transformer, tokens_BT: Tensor) -> tuple[int, int]:
    """Bytes alive after the forward pass, and how much more there is at the backward pass's peak."""
    model(tokens_BT, tokens_BT).cross_entropy.backward()  # gradients exist from here on
    known = [tokens_BT, *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    with Alive(known) as alive:
        loss = model(tokens_BT, tokens_BT).cross_entropy
        kept = alive.bytes()
        alive.peak = 0
        loss.backward()
    return kept, alive.peak - kept


@pytest.mark.parametrize("keys", [{}, OTHER], ids=["swiglu", "gelu-biases"])
def test_kept_bytes_are_those_of_the_formula(tokens_BT: Tensor, keys: dict[str, Any]) -> None:
    """To the byte. Two more layers show what blocks keep, without what is outside of them."""
    kept = {(*mode, n): memory_of(model_of(*mode, n_layers=n, **keys), tokens_BT)[0] for mode in MODES for n in (4, 6)}
    numbers = {kind: (kept[kind, 1, 6] - kept[kind, 1, 4]) / 2 / (4 * B * T) for kind, _ in MODES}
    assert numbers["full"] == D  # the block's input
    # And queries, keys, values, attention with a logarithm for each head, attention's projection.
    assert numbers["selective"] == D + HEADS * K + 2 * KV_HEADS * K + (HEADS * K + HEADS) + D
    assert numbers["none"] > 3 * numbers["selective"]  # measured 20.8 D or 18.6 D against 5.1 D
    for kind in ("full", "selective"):
        assert kept[kind, 2, 4] == (kept["none", 1, 4] + kept[kind, 1, 4]) / 2


def test_backward_pass_holds_one_block_more(tokens_BT: Tensor) -> None:
    """However many there are: what one block holds without checkpointing, and up to a quarter of it in gradients."""
    (small, _), (large, _) = (memory_of(model_of("none", 1, n_layers=n), tokens_BT) for n in (4, 6))
    block = (large - small) / 2
    more = {n: memory_of(model_of("full", 1, n_layers=n), tokens_BT)[1] for n in (4, 6)}
    assert more[4] == more[6]
    assert block < more[4] < 1.25 * block  # measured 1.07
    assert memory_of(model_of("selective", 1), tokens_BT)[1] < more[4]  # a part of it was kept already


class Steps(NamedTuple):
    """What two training steps of a config gave, and how the second was computed."""

    losses: list[float]
    gradients: list[dict[str, bytes]]
    operations_per_token: float
    config: ModelConfig


def two_steps(arguments: list[str]) -> Steps:
    """In a rank: losses, and whole gradients as the update gets them."""
    losses, gradients = [], []
    with started(arguments) as here:
        engine = here.engine
        update = engine.step

        def look(scale: float) -> None:
            gradients.append({n: g.full_tensor().cpu().numpy().tobytes() for n, g in engine.gradients().items()})
            update(scale)

        engine.step = look
        for step in range(2):
            batch = here.batch(step)
            with Operations(engine.model.config.vocab) as operations:
                losses.append(here.step(batch).loss)
        return Steps(losses, gradients, operations.total / batch.tokens.size, engine.model.config)


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (1, []),
        (2, ["parallel.engine=ddp"]),
        (2, ["train.precision=bf16"]),
        (1, ["train.precision=fp16", "train.loss_scale_init=1024"]),
    ],
    ids=["one", "ddp2", "fsdp2-bf16", "one-fp16"],
)
def test_every_mode_gives_the_same_bits(gang: Gang, corpus: Path, world: int, keys: list[str]) -> None:
    """Losses and gradients of two accumulated steps; and each mode was on, as its operations show."""
    shapes = [f"model.{key}={value}" for key, value in {**SHAPES, "n_layers": 4}.items()]
    same = [f"data.corpus={corpus}", *shapes, "train.global_batch_size=8", "train.micro_batch_size=2", *keys]
    expected = None
    for kind, every in MODES:
        mode = [f"train.activation_checkpointing={kind}", f"train.activation_checkpointing_every={every}"]
        found: Steps = gang.run(two_steps, [*same, *mode], world=world)[0]
        expected = expected or found
        assert len(found.gradients) == 2
        assert len(found.gradients[0]) == 4 * 9 + 3
        assert found.losses == expected.losses, mode
        assert found.gradients == expected.gradients, mode
        assert found.operations_per_token == operations_per_token(found.config, 64, kind, every), mode


def test_every_beyond_the_last_block_leaves_the_first(tokens_BT: Tensor) -> None:
    model = model_of("full", 99)
    with Operations(VOCAB) as operations:
        model(tokens_BT, tokens_BT).cross_entropy.backward()
    assert operations.total == B * T * operations_per_token(model.config, T, "full", 4)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train.activation_checkpointing_every=2"], ["does nothing under activation_checkpointing: none", "remove"]),
        (["train.activation_checkpointing_every=0"], ["'train.activation_checkpointing_every'", "greater than or"]),
        (["train.activation_checkpointing=some"], ["'train.activation_checkpointing'", "'selective'"]),
    ],
)
def test_refused_configs(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        load_config(TINY, words)
    for part in parts:
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)
