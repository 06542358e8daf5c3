"""Training speed of our decoder against the Llama of `transformers`: same shapes, weights' sizes and threads.

    python benchmarks/model.py [--preset llama-1m] [--batch 8] [--seq 256] [--rounds 7]

Both compute the mean cross-entropy and its gradient. They run in turn, so that a drift of the machine's speed meets
both. Printed are medians of tokens per second, the median ratio of pairs, and each one's share of the machine's matmul
rate, which is measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.flops import training_flops_per_token
from models.transformer import Transformer
from trainer.throughput import peak_flops


def theirs(config: ModelConfig) -> nn.Module:
    """The same architecture in `transformers`, with its SDPA attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
        )
    )


def seconds(step: Callable[[], Tensor]) -> float:
    """Wall time of one forward and backward pass."""
    begin = time.perf_counter()
    step().backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()

    config = ModelConfig.model_validate({"preset": arguments.preset}).with_vocab_size(4096)
    tokens_BT = torch.randint(0, config.vocab, (arguments.batch, arguments.seq + 1))
    ours, reference = Transformer(config), theirs(config)
    ours.load_state_dict({name: torch.randn_like(p) * 0.02 for name, p in ours.named_parameters()})
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, reference)]
    assert sizes[0] == sizes[1], sizes
    n = arguments.batch * arguments.seq
    inputs_BT, targets_BT = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    def our_step() -> Tensor:
        return ours(inputs_BT, targets_BT).cross_entropy / n

    def their_step() -> Tensor:
        return reference(input_ids=inputs_BT, labels=inputs_BT, shift_labels=targets_BT).loss

    steps = {"gramian": our_step, "transformers": their_step}
    times: dict[str, list[float]] = {name: [] for name in steps}
    peak, _ = peak_flops(torch.device("cpu"), "fp32")
    for step in steps.values():
        seconds(step)
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            times[name].append(seconds(step))
    flops = training_flops_per_token(config, arguments.seq, causal=True)
    threads = torch.get_num_threads()
    print(f"{arguments.preset}: {sizes[0]:,} parameters, {threads} threads, matmul rate {peak / 1e9:.0f} GFLOP/s")
    for name, values in times.items():
        rate = n / statistics.median(values)
        print(f"{name:<14}{rate:>10,.0f} tokens/s  {rate * flops / peak:>6.1%} of the matmul rate")
    ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
    print(f"{'ratio':<14}{ratio:>10.2f} (median of {arguments.rounds} alternating pairs)")


if __name__ == "__main__":
    main()
