"""Activation checkpointing and compiled blocks on a CUDA GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gang import Gang
from tests.trainer.test_activation_checkpointing import MODES, SHAPES, Steps, operations_per_token, two_steps
from tests.trainer.test_compiled import ACCUMULATE, EVERY2, STEPS, Compiled, four_steps, relative_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_modes_change_rounding_at_most(gpu_gang: Gang, corpus: Path, precision: str, tolerance: float) -> None:
    """Losses and gradients are those without checkpointing; to the bit they need not be, as some kernels add in an
    order that changes. In bf16 a fused kernel of attention takes grouped heads; there operations are the formula's."""
    shapes = [f"model.{key}={value}" for key, value in {**SHAPES, "n_layers": 4}.items()]
    same = [f"data.corpus={corpus}", *shapes, "train.global_batch_size=8", "train.micro_batch_size=2"]
    expected = None
    for kind, every in MODES:
        mode = [f"train.activation_checkpointing={kind}", f"train.activation_checkpointing_every={every}"]
        words = [*same, f"train.precision={precision}", *mode]
        found: Steps = gpu_gang.run(two_steps, words, world=1)[0]
        expected = expected or found
        assert found.losses == pytest.approx(expected.losses, rel=tolerance), mode
        for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
            assert relative_norm(ours, theirs) < tolerance, mode
        if precision == "bf16":
            assert found.operations_per_token == operations_per_token(found.config, 64, kind, every), mode


# Large beside what the kernels of attention keep for themselves. One number a token and block is 2 B T = 16 kB.
D, F, HEADS, KV_HEADS, K, B, T = 512, 1376, 8, 4, 64, 8, 1024


def memory_of(kind: str, every: int, n_layers: int) -> tuple[int, int]:
    """In a rank: bytes asked for between forward and backward pass, and how much more at the backward pass's peak."""
    from models.config import ModelConfig
    from models.transformer import Transformer
    from trainer.activation import checkpoint_blocks

    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=64, n_layers=n_layers, d_model=D, d_ff=F, n_heads=HEADS, n_kv_heads=KV_HEADS, max_seq_len=T
    )
    model = Transformer(config).to("cuda", torch.bfloat16)
    if kind != "none":
        checkpoint_blocks(model, kind, every)  # type: ignore[arg-type]
    tokens_BT = torch.randint(0, 64, (B, T), device="cuda")
    # Gradients exist from here on, and so do the libraries' work spaces.
    model(tokens_BT, tokens_BT).cross_entropy.backward()
    before = requested("current")
    loss = model(tokens_BT, tokens_BT).cross_entropy
    kept = requested("current") - before
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    return kept, requested("peak") - before - kept


def requested(when: str) -> int:
    """Bytes that tensors asked of the allocator, without its rounding: `current` or `peak`."""
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


def test_kept_bytes_are_those_of_the_formula(gpu_gang: Gang) -> None:
    """What blocks keep, in numbers a token, from the difference that two more layers make; to 2 percent, as attention's
    kernels keep a few numbers of their own. The backward pass needs about a block more, however many there are."""
    memory = {
        (kind, every, n): gpu_gang.run(memory_of, kind, every, n, world=1)[0] for kind, every in MODES for n in (4, 6)
    }
    numbers = {
        mode: (memory[(*mode, 6)][0] - memory[(*mode, 4)][0]) / 2 / (2 * B * T) for mode in MODES if mode[1] == 1
    }
    assert numbers["full", 1] == pytest.approx(D, rel=0.02)
    # The logarithm of each head is fp32: as large as two numbers.
    selective = D + HEADS * K + 2 * KV_HEADS * K + (HEADS * K + 2 * HEADS) + D
    assert numbers["selective", 1] == pytest.approx(selective, rel=0.02)
    assert numbers["none", 1] > 2 * numbers["selective", 1]
    for kind in ("full", "selective"):
        halfway = (memory["none", 1, 4][0] + memory[kind, 1, 4][0]) / 2
        assert memory[kind, 2, 4][0] == pytest.approx(halfway, rel=0.02)
    block = 2 * B * T * numbers["none", 1]
    more = {n: memory["full", 1, n][1] for n in (4, 6)}
    assert more[4] == pytest.approx(more[6], rel=0.02)
    assert 0.95 * block < more[4] < 1.5 * block


@pytest.mark.parametrize(
    ("mode", "layers", "kinds"),
    [
        ([], 2, 1),
        (["train.activation_checkpointing=full"], 2, 1),
        (["train.activation_checkpointing=selective"], 2, 1),
        (["train.activation_checkpointing=selective", "train.precision=bf16"], 2, 1),
        (EVERY2, 10, 2),
    ],
    ids=["none", "full", "selective", "selective-bf16", "every2-of-10"],
)
def test_blocks_are_compiled_once(gpu_gang: Gang, corpus: Path, mode: list[str], layers: int, kinds: int) -> None:
    """A graph for each kind of block, made in the first step, and one more for evaluation; numbers as uncompiled."""
    arguments = [f"data.corpus={corpus}", f"model.n_layers={layers}", *ACCUMULATE, *mode]
    eager: Compiled = gpu_gang.run(four_steps, arguments, world=1)[0]
    compiled: Compiled = gpu_gang.run(four_steps, [*arguments, "train.compile=true"], world=1, timeout=280)[0]
    assert compiled.graphs == [(kinds, 0)] + [(kinds, kinds)] * (STEPS - 1)
    assert compiled.all_graphs == 2 * kinds
    assert compiled.breaks == 0
    tolerance = 1e-2 if "train.precision=bf16" in mode else 1e-4
    for ours, expected in zip(compiled.numbers, eager.numbers, strict=True):
        assert ours == pytest.approx(expected, rel=tolerance)
    assert compiled.scores == pytest.approx(eager.scores, rel=tolerance)
    assert relative_norm(compiled.gradients, eager.gradients) < 10 * tolerance
