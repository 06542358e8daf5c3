"""Step time of our rules for matrices against other implementations, on the same parameters and recorded gradients.

    python benchmarks/optim.py [--shape quickstart 4x256x1024] [--rounds 7] [--batch 16x256] [--json FILE]

A shape is `quickstart`, the matrices of that model, or layers x width x hidden width of one without gates. Gradients
are those of random tokens. Each is measured in one process and on two gloo ranks, with one thread a rank. All take a
step in turn, there and back, so that a drift of the machine's speed meets all; on two ranks a step takes as long as the
slower rank's. A round is as many steps as there are between new roots and bases, or three steps of Muon. Printed are
medians, and the median over rounds of the fastest peer's time over ours. Peers are measured where they can be imported:

- Muon, with five steps of the table `keller` and fp32 products everywhere: `torch.optim.Muon` and that of
  `pytorch_optimizer`, each with its cast to bfloat16 taken out, the latter also with its own Gram iteration; `dion`'s,
  which rounds to bfloat16 what it sends and iterates on, with its iteration in fp32. That all make the same update is
  asserted.
- Shampoo as in its paper, sums and neither momentum nor grafting, with new roots every 10 steps: `pytorch_optimizer`'s,
  by an SVD in fp32 (ours: by eigenvalues in fp64). With averages, momentum and grafting: its ScalableShampoo, by an
  iteration in fp32.
- SOAP of `pytorch_optimizer`, with a new basis every 10 steps, in fp32 as ours; it turns the first moment every step.

On two ranks we and, of Muon, the peers have parameters and gradients as FSDP2 leaves them: DTensors by rows. Peers that
do not know DTensors have whole copies, as DDP would leave them, on which both ranks do the same work;
`pytorch_optimizer`'s DistributedMuon has whole copies and shares the work.

Last comes the optimizer's share of a training step, in time, for the recipes in configs/optim/ on one process.

    python -m pip install pytorch_optimizer "dion @ git+https://github.com/microsoft/dion"
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # in place of this folder, where this file would be taken for the package `optim`

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402
from torch.multiprocessing.spawn import spawn  # noqa: E402

from benchmarks.optim_peers import DECAY, EVERY, LR, PACKAGES, Peer, peers_of  # noqa: E402
from data.packing import Batch  # noqa: E402
from models.config import ModelConfig  # noqa: E402
from models.transformer import Transformer  # noqa: E402
from optim.build import build_optimizer  # noqa: E402
from optim.config import OptimConfig  # noqa: E402
from trainer.build import build_engine  # noqa: E402
from trainer.config import load_config  # noqa: E402
from trainer.layout import plan_layout  # noqa: E402
from trainer.loop import train_step  # noqa: E402
from trainer.runtime import start_runtime  # noqa: E402

OURS = "gramian"
RECORDED = 5
RULES = {
    "muon": OptimConfig(name="muon", lr=LR, weight_decay=DECAY, coefficients="keller"),
    "shampoo": OptimConfig(
        name="shampoo", lr=LR, weight_decay=DECAY, precondition_every=EVERY, betas=(0.9, 0.95), grafting="rmsprop"
    ),
    "shampoo of the paper": OptimConfig(
        name="shampoo",
        lr=LR,
        weight_decay=DECAY,
        precondition_every=EVERY,
        betas=(0.0, 0.95),
        factor_beta=1.0,
        grafting="none",
    ),
    "soap": OptimConfig(name="soap", lr=LR, weight_decay=DECAY, precondition_every=EVERY),
}
RECIPES = ("adamw", "muon", "shampoo", "soap")

Weights = dict[str, Tensor]


class Contestant:
    """An optimizer over parameters of its own."""

    def __init__(self, weights: Weights, place: Callable[[Tensor], Tensor], peer: Peer):
        self.place, self.patch = place, peer.patch
        self.parameters = {name: nn.Parameter(place(weight.clone())) for name, weight in weights.items()}
        with self.patch():
            self.optimizer = peer.make(list(self.parameters.values()))

    def step(self, gradients: Weights) -> float:
        """Seconds of an update, without what it takes to give the gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.place(gradients[name].clone())  # which some change
        with self.patch():
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            self.optimizer.step()
            return time.perf_counter() - begin


def recorded(shape: str) -> tuple[Weights, list[Weights], dict[str, Any]]:
    """Weights of a model's matrices, gradients for some steps, and the matrices' roles."""
    keys: dict[str, Any] = {"preset": "llama-1m"}
    if shape != "quickstart":
        layers, width, hidden = map(int, shape.split("x"))
        keys = {"n_layers": layers, "d_model": width, "d_ff": hidden, "activation": "gelu"}
    config = ModelConfig.model_validate(keys).with_vocab_size(512)
    torch.manual_seed(0)
    model = Transformer(config)
    for parameter in model.parameters():
        nn.init.ones_(parameter) if parameter.ndim == 1 else nn.init.normal_(parameter, std=0.05)
    roles = {name: role for name, role in model.parameter_roles().items() if role["role"] == "hidden_matrix"}
    gradients = []
    for _ in range(RECORDED):
        tokens_BT = torch.randint(0, config.vocab, (4, 257))
        model.zero_grad()
        losses = model(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())
        (losses.cross_entropy / 1024).backward()
        gradients.append({name: model.get_parameter(name).grad.clone() for name in roles})  # type: ignore[union-attr]
    return {name: model.get_parameter(name).detach() for name in roles}, gradients, roles


def race(rule: str, shape: str, rounds: int, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Seconds of a step of all, round by round; and who was left out, and why."""
    weights, gradients, roles = recorded(shape)
    names = list(weights)
    config = RULES[rule]
    steps = 3 if rule == "muon" else EVERY  # of a round
    ours = Peer(lambda ps: build_optimizer(dict(zip(names, ps, strict=True)), roles, config), sharded=True)

    def by_rows(tensor: Tensor) -> Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)

    contestants: dict[str, Contestant] = {}
    left_out: dict[str, str] = {}
    wanted: Weights = {}
    for name, peer in {OURS: ours, **peers_of(rule, mesh)}.items():
        try:
            contestant = Contestant(weights, by_rows if peer.sharded else lambda tensor: tensor, peer)
            contestant.step(gradients[0])  # which makes what state there is not yet
        except Exception as error:  # of versions that we do not know; all ranks meet it alike
            if name == OURS:
                raise
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        updates = {n: _whole(p) - weights[n] for n, p in contestant.parameters.items()}
        wanted = wanted or updates
        if peer.tolerance is not None:
            _assert_close(name, updates, wanted, weights, peer.tolerance)
        contestants[name] = contestant
    times: dict[str, list[float]] = {name: [] for name in contestants}
    step = 1
    for _ in range(rounds):
        seconds = torch.zeros(steps, len(contestants), dtype=torch.float64)
        for i in range(steps):
            order = list(enumerate(contestants.values()))
            for number, contestant in order[:: -1 if step % 2 else 1]:  # so that none always follows the same one
                seconds[i, number] = contestant.step(gradients[step % RECORDED])
            step += 1
        if mesh is not None:
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        for name, value in zip(times, seconds.mean(0).tolist(), strict=True):
            times[name].append(value)
    return {"times": times, "left_out": left_out}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _assert_close(name: str, updates: Weights, wanted: Weights, weights: Weights, tolerance: float) -> None:
    for parameter, want in wanted.items():
        m, n = want.shape
        update = updates[parameter]
        if name == "dion":  # it has other factors for shapes, and is asked for none
            update = (update + LR * DECAY * weights[parameter]) * max(1.0, m / n) ** 0.5 - LR * DECAY * weights[
                parameter
            ]
        distance = ((update - want).norm() / want.norm()).item()
        assert distance < tolerance, f"{name} makes another update of {parameter}: {distance}"


def worker(rank: int, world: int, folder: str, shapes: Sequence[str], rounds: int) -> None:
    """All races of one rank; the first writes what was measured."""
    torch.set_num_threads(1)
    mesh = None
    if world > 1:
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", (world,))
    races = [
        {"shape": shape, "ranks": world, "rule": rule, **race(rule, shape, rounds, mesh)}
        for shape in shapes
        for rule in RULES
    ]
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(races), encoding="utf-8")
    if world > 1:
        dist.destroy_process_group()


def shares(_: int, folder: str, rows: int, seq_len: int, rounds: int) -> None:
    """Times of optimizer and whole step for each recipe, round by round, of the trainer's own step on random tokens."""
    torch.set_num_threads(1)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in RECIPES}
    with start_runtime() as runtime:
        engines, spent = {}, dict.fromkeys(RECIPES, 0.0)
        for name in RECIPES:
            path = ROOT / "configs" / "optim" / f"{name}.yaml"
            config = load_config(path, [f"data.seq_len={seq_len}", f"train.global_batch_size={rows}"])
            layout = plan_layout(config, 1)
            engine = build_engine(config, config.model.with_vocab_size(4096), layout, runtime)

            def timed(name: str = name, step: Callable[[], Any] = engine.optimizer.step) -> None:
                begin = time.perf_counter()
                step()
                spent[name] += time.perf_counter() - begin

            engine.optimizer.step = timed  # type: ignore[method-assign, assignment]
            engines[name] = (engine, layout, config.train.grad_clip)
        tokens = np.random.default_rng(0).integers(0, 4096, (RECORDED, rows, seq_len + 1))
        step = 0
        for number in range(rounds + 1):
            wholes = dict.fromkeys(RECIPES, 0.0)
            spent.update(dict.fromkeys(RECIPES, 0.0))
            for _ in range(EVERY if number else 1):  # the first step makes buffers and first bases
                ids = tokens[step % RECORDED]
                batch = Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), np.ones((rows, seq_len), dtype=bool))
                for name in RECIPES[:: -1 if step % 2 else 1]:
                    engine, layout, clip = engines[name]
                    begin = time.perf_counter()
                    train_step(engine, batch, layout, runtime, clip)
                    wholes[name] += time.perf_counter() - begin
                step += 1
            if number:
                for name in RECIPES:
                    times[name].append((spent[name] / EVERY, wholes[name] / EVERY))
    Path(folder, "shares.json").write_text(json.dumps(times), encoding="utf-8")


def summed_up(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians and the ratio to the fastest peer of what `race` gave."""
    times: dict[str, list[float]] = measured.pop("times")
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {**measured, "milliseconds": {name: 1e3 * median for name, median in medians.items()}}
    if len(medians) > 1:
        best = min((name for name in medians if name != OURS), key=medians.__getitem__)
        ratios = sorted(b / a for a, b in zip(times[OURS], times[best], strict=True))
        result |= {"best_peer": best, "ratio": statistics.median(ratios), "ratio_range": [ratios[0], ratios[-1]]}
    return result


def show(result: dict[str, Any]) -> None:
    """Print one race."""
    print(f"\n{result['rule']}, {result['shape']}, {result['ranks']} rank{'s' if result['ranks'] > 1 else ''}")
    for name, value in result["milliseconds"].items():
        print(f"  {name:<28}{value:>10.2f} ms a step")
    for name, reason in result["left_out"].items():
        print(f"  {name:<28}left out: {reason}")
    if "ratio" in result:
        low, high = result["ratio_range"]
        print(f"  {'ratio':<28}{result['ratio']:>10.3f} to {result['best_peer']} ({low:.3f} to {high:.3f})", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["quickstart", "4x256x1024"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", default="16x256", help="rows x tokens of a training step")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"peers: torch {torch.__version__}{', ' + installed if installed else ''}")
    print(f"1 thread a rank, fp32, medians of {arguments.rounds} rounds in turn", flush=True)
    figures: dict[str, Any] = {"rounds": arguments.rounds, "peers": {"torch": torch.__version__, **versions}}
    figures["races"] = []
    rows, seq_len = map(int, arguments.batch.split("x"))
    with tempfile.TemporaryDirectory(prefix="gramian-benchmark-") as folder:
        for world in (1, 2):
            spawn(worker, (world, folder, arguments.shape, arguments.rounds), nprocs=world)
            for measured in json.loads(Path(folder, f"{world}.json").read_text()):
                figures["races"].append(summed_up(measured))
                show(figures["races"][-1])
        spawn(shares, (folder, rows, seq_len, arguments.rounds), nprocs=1)
        times = json.loads(Path(folder, "shares.json").read_text())
    print(f"\ntraining step of the quickstart's model, {rows} rows of {seq_len} tokens, 1 rank")
    figures["share_of_step"] = {}
    for name, pairs in times.items():
        optimizer, whole = (statistics.median(values) for values in zip(*pairs, strict=True))
        share = statistics.median(a / b for a, b in pairs)
        figures["share_of_step"][name] = {
            "optimizer_milliseconds": 1e3 * optimizer,
            "step_milliseconds": 1e3 * whole,
            "share": share,
        }
        print(f"  {name:<10}{1e3 * optimizer:>10.2f} of {1e3 * whole:>8.1f} ms: {share:>6.1%} of the step")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
