"""Speed of our layer with experts against those of `transformers` and DeepSpeed: same shapes, weights and threads,
fp32.

    python benchmarks/moe.py [--shape 2048x512x1024x8x2 ...] [--rounds 7] [--json FILE]

A shape is tokens x width x hidden width of an expert x experts x experts of a token. Timed is one forward and backward
pass, from the layer's input to the gradients of input and weights. All layers run in turn, there and back, so that a
drift of the machine's speed meets all; printed are medians, and of ratios the median over rounds. That all compute the
same is asserted before.

- Mixtral's and Qwen3-MoE's blocks of `transformers`, with each of its implementations that runs on a CPU. `batched_mm`
  copies a matrix for every token: it is left out where that is more than 2 GB.
- DeepSpeed's MoE layer, dropping no tokens, if it can be imported (`pip install deepspeed`, `DS_ACCELERATOR=cpu`).
- An MLP of the same active FLOPs, which has nothing to route: what our layer takes longer is the cost of experts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import UserError
from models.config import ModelConfig
from models.layers import MLP
from models.moe import MoE
from trainer.engines.zero_start import import_deepspeed
from trainer.throughput import peak_flops

OURS, DENSE = "gramian", "dense MLP"
LARGEST_COPY = 2e9


class Shape(NamedTuple):
    """Tokens, width, an expert's hidden width, experts, experts of a token."""

    n: int
    d: int
    f: int
    e: int
    k: int

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def flops(self) -> int:
        """Of the experts' matrix products, forward and backward."""
        return 3 * 2 * self.n * self.k * 3 * self.d * self.f


DEFAULT = [Shape(2048, 512, 1024, 8, 2), Shape(2048, 512, 256, 64, 8), Shape(4096, 256, 512, 8, 2)]


def gramian(shape: Shape) -> MoE:
    """Our layer, with random weights, whose router spreads random tokens about evenly."""
    moe: Any = {"n_experts": shape.e, "top_k": shape.k}
    layer = MoE(ModelConfig(d_model=shape.d, d_ff=shape.f, moe=moe))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=shape.d**-0.5)
    return layer


def of_transformers(shape: Shape, ours: MoE) -> dict[str, nn.Module]:
    """Both blocks in all implementations, with our weights."""
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    mixtral = MixtralConfig(
        hidden_size=shape.d, intermediate_size=shape.f, num_local_experts=shape.e, num_experts_per_tok=shape.k
    )
    qwen = Qwen3MoeConfig(
        hidden_size=shape.d,
        moe_intermediate_size=shape.f,
        num_experts=shape.e,
        num_experts_per_tok=shape.k,
        norm_topk_prob=True,
    )
    experts = ours.experts
    assert experts.w_gate is not None
    weights = {
        "gate.weight": ours.router.weight,
        "experts.gate_up_proj": torch.cat([experts.w_gate, experts.w_up], dim=1),
        "experts.down_proj": experts.w_down,
    }
    layers: dict[str, nn.Module] = {}
    for kind, config, block in (("mixtral", mixtral, MixtralSparseMoeBlock), ("qwen3", qwen, Qwen3MoeSparseMoeBlock)):
        for implementation in ("eager", "grouped_mm", "batched_mm"):
            if implementation == "batched_mm" and 4 * shape.n * shape.k * 2 * shape.f * shape.d > LARGEST_COPY:
                continue
            layer = block(type(config)(**{**config.to_dict(), "experts_implementation": implementation}))
            layer.load_state_dict(weights)
            layers[f"{kind}, {implementation}"] = layer
    return layers


def of_deepspeed(shape: Shape, ours: MoE) -> nn.Module | None:
    """DeepSpeed's layer over our MLP, with our weights; None where it is not installed."""
    try:
        deepspeed = import_deepspeed()
    except UserError:
        return None
    from deepspeed.moe.layer import MoE as Theirs

    with redirect_stdout(sys.stderr):
        if not torch.distributed.is_initialized():
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29561", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
            deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        layer = Theirs(
            shape.d,
            MLP(ours.experts.config),
            num_experts=shape.e,
            k=shape.k,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        layer.set_deepspeed_parallelism()
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(ours.router.weight)
        for e, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            for name in ("w_gate", "w_up", "w_down"):
                getattr(expert, name).weight.copy_(getattr(ours.experts, name)[e])
    return layer


def output(layer: nn.Module, x: Tensor) -> Tensor:
    """Of a layer's answer what the next one reads: ours and DeepSpeed's tell of their routers too."""
    answer = layer(x)
    return answer if isinstance(answer, Tensor) else answer[0]


def seconds(layer: nn.Module, x: Tensor, dy: Tensor) -> float:
    """Wall time of one forward and backward pass, into gradients that are not there before."""
    layer.zero_grad()
    x.grad = None
    begin = time.perf_counter()
    output(layer, x).backward(dy)
    return time.perf_counter() - begin


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Times of all layers at one shape, in seconds, round by round, and the matmul rate, the better of two tries."""
    torch.manual_seed(0)
    ours = gramian(shape)
    layers: dict[str, nn.Module] = {OURS: ours, **of_transformers(shape, ours)}
    if (theirs := of_deepspeed(shape, ours)) is not None:
        layers["deepspeed"] = theirs
    x_BTD = torch.randn(8, shape.n // 8, shape.d, requires_grad=True)
    dy_BTD = torch.randn_like(x_BTD)

    want_BTD, routing = ours(x_BTD)
    for layer in layers.values():
        torch.testing.assert_close(output(layer, x_BTD), want_BTD, rtol=1e-4, atol=1e-5)
    load = float(routing.counts.max() / routing.counts.double().mean())
    del want_BTD, routing

    layers[DENSE] = MLP(ours.experts.config, shape.k * shape.f)
    times: dict[str, list[float]] = {name: [] for name in layers}
    peaks = [peak_flops(torch.device("cpu"), "fp32")[0]]
    for layer in layers.values():
        seconds(layer, x_BTD, dy_BTD)
    for number in range(rounds):
        for name in list(layers)[:: -1 if number % 2 else 1]:  # so that none always follows the same one
            times[name].append(seconds(layers[name], x_BTD, dy_BTD))
    peaks.append(peak_flops(torch.device("cpu"), "fp32")[0])
    return {"shape": str(shape), "times": times, "peak_flops": max(peaks), "load_max": load}


def summed_up(shape: Shape, measured: dict[str, Any]) -> dict[str, Any]:
    """Medians and ratios of what `measure` gave."""
    times: dict[str, list[float]] = measured["times"]
    medians = {name: statistics.median(values) for name, values in times.items()}
    peers = [name for name in times if name not in (OURS, DENSE)]
    best = min(peers, key=medians.__getitem__)
    ratios = sorted(b / a for a, b in zip(times[OURS], times[best], strict=True))
    return {
        "shape": measured["shape"],
        "load_max": measured["load_max"],
        "matmul_gflops": measured["peak_flops"] / 1e9,
        "tokens_per_second": {name: shape.n / median for name, median in medians.items()},
        "share_of_matmul_rate": {name: shape.flops / m / measured["peak_flops"] for name, m in medians.items()},
        "best_peer": best,
        "ratio": statistics.median(ratios),
        "ratio_range": [ratios[0], ratios[-1]],
        "share_of_routing": statistics.median(
            1 - dense / sparse for sparse, dense in zip(times[OURS], times[DENSE], strict=True)
        ),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=DEFAULT, type=lambda word: Shape(*map(int, word.split("x"))))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()

    print(f"{torch.get_num_threads()} threads, fp32, medians of {arguments.rounds} rounds in turn")
    results = []
    for shape in arguments.shape:
        result = summed_up(shape, measure(shape, arguments.rounds))
        results.append(result)
        print(f"\n{shape.n} tokens, width {shape.d}, {shape.e} experts of {shape.f}, {shape.k} of a token;", end=" ")
        print(f"largest load {result['load_max']:.2f} of the mean; matmul rate {result['matmul_gflops']:.0f} GFLOP/s")
        for name, rate in result["tokens_per_second"].items():
            share = result["share_of_matmul_rate"][name]
            print(f"{name:<22}{rate:>10,.0f} tokens/s  {share:>6.1%} of the matmul rate")
        low, high = result["ratio_range"]
        print(f"{'ratio':<22}{result['ratio']:>10.3f} to {result['best_peer']} ({low:.3f} to {high:.3f})")
        print(f"{'routing and dispatch':<22}{result['share_of_routing']:>10.1%} of a step", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"threads": torch.get_num_threads(), "rounds": arguments.rounds, "shapes": results}, file)


if __name__ == "__main__":
    main()
