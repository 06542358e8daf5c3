"""What keeping documents apart costs on a CPU: by a mask and by a loop over documents, beside plain causal attention.

    python benchmarks/document_mask.py [--preset llama-1m] [--tokens 2048] [--seq 256 512 1024 2048]
                                       [--documents 4 8 16] [--rounds 7]

Rows of `--tokens` tokens in all are cut into documents of random lengths. Timed are forward and backward passes of one
attention with the preset's heads, and of the whole model, where the mask is set against the way that the model takes.
All ways run in turn, so that a drift of the machine's speed meets all. Printed are medians; that mask and loop agree is
asserted before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from models import documents
from models.config import ModelConfig
from models.documents import document_mask, find_documents, loop_pays, looped, masked
from models.transformer import Transformer


def cut(rows: int, seq: int, n: int) -> Tensor:
    """Document numbers `(rows, seq)`, each row cut at n - 1 places drawn at random."""
    starts = torch.zeros(rows, seq, dtype=torch.int64)
    for row in starts:
        row[1 + torch.randperm(seq - 1)[: n - 1]] = 1
    return starts.cumsum(dim=1)


def medians(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Milliseconds of each way, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def attention(config: ModelConfig, documents_BT: Tensor, rounds: int) -> dict[str, float]:
    """Times of one attention: plain, by the mask (its making not counted) and by the loop."""
    B, T = documents_BT.shape
    H, G, K = config.n_heads, config.kv_heads, config.d_head
    q, k, v = (torch.randn(B, heads, T, K, requires_grad=True) for heads in (H, G, G))
    weights = torch.randn(B, T, H, K)
    lengths = tuple(tuple(row.unique_consecutive(return_counts=True)[1].tolist()) for row in documents_BT)
    mask = document_mask(find_documents(documents_BT, config, torch.float32).starts_BT)

    def plain() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != G).transpose(1, 2)

    functions = {
        "plain": plain,
        "mask": lambda: masked(q, k, v, mask),
        "loop": lambda: looped(q, k, v, lengths),
    }
    gradients = {name: torch.autograd.grad(f(), (q, k, v), weights) for name, f in functions.items()}
    for ours, expected in zip(gradients["loop"], gradients["mask"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    ways = {name: lambda f=f: f().backward(weights) for name, f in functions.items()}  # type: ignore[misc]
    return medians(ways, rounds) | {"pays": float(loop_pays(lengths, H * K))}


def training(model: Transformer, documents_BT: Tensor, rounds: int) -> dict[str, float]:
    """Times of the whole model's forward and backward pass: one document a row, by the mask, and as it chooses."""
    tokens_BT = torch.randint(0, model.config.vocab, documents_BT.shape)

    def step(numbers_BT: Tensor | None) -> None:
        model(tokens_BT, tokens_BT, documents_BT=numbers_BT).cross_entropy.backward()

    def by_mask() -> None:
        with mock.patch.object(documents, "loop_pays", return_value=False):
            step(documents_BT)

    return medians({"plain": lambda: step(None), "mask": by_mask, "chosen": lambda: step(documents_BT)}, rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1m")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seq", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--documents", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    shape = {"preset": arguments.preset, "max_seq_len": max(arguments.seq)}
    config = ModelConfig.model_validate(shape).with_vocab_size(4096)
    model = Transformer(config)
    model.load_state_dict({name: torch.randn_like(p) * 0.02 for name, p in model.named_parameters()})
    heads = f"{config.n_heads} query and {config.kv_heads} key heads of width {config.d_head}"
    print(f"{arguments.preset}: {heads}, {arguments.tokens} tokens, {torch.get_num_threads()} threads, fp32")
    print("                     one attention, ms               |  whole model, ms")
    print(" seq  documents   plain    mask    loop  mask/loop  |   plain    mask  chosen  mask/chosen  choice")
    for seq in arguments.seq:
        for n in arguments.documents:
            documents_BT = cut(max(1, arguments.tokens // seq), seq, n)
            one = attention(config, documents_BT, arguments.rounds)
            whole = training(model, documents_BT, arguments.rounds)
            ratio_one, ratio_whole = one["mask"] / one["loop"], whole["mask"] / whole["chosen"]
            print(
                f"{seq:>5}{n:>10}{one['plain']:>9.1f}{one['mask']:>8.1f}{one['loop']:>8.1f}{ratio_one:>11.2f}  |"
                f"{whole['plain']:>8.0f}{whole['mask']:>8.0f}{whole['chosen']:>8.0f}{ratio_whole:>13.2f}"
                f"  {'loop' if one['pays'] else 'mask'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
