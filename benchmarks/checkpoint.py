"""What a save costs the training loop: ours against `torch.save`, torch's distributed checkpoint and DeepSpeed.

    python benchmarks/checkpoint.py [--megabytes 600] [--rounds 5] [--folder DIR] [--json FILE]

One process on the CPU saves the same weights and AdamW state with each, in turn, there and back, so that a drift of the
machine's speed meets all. The loop multiplies matrices meanwhile. Printed are medians over rounds after a first one,
which is not counted (there memory is made that later saves find):

- stall: how long the loop stands in the call that saves;
- lost: how much later the loop is in all, also because what writes in the background takes time of the processors;
- MB/s: bytes of tensors by the time until the save is done. Ours also hashes them and makes them durable; `torch.save`
  and DeepSpeed do neither, DCP does the second.

DeepSpeed takes part where it can be imported (`pip install deepspeed`, `DS_ACCELERATOR=cpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# In place of this folder, whose data.py would be taken for the package `data`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from common.errors import UserError  # noqa: E402
from trainer.checkpoint import Checkpointer  # noqa: E402
from trainer.config import CheckpointConfig  # noqa: E402
from trainer.engines.zero_start import import_deepspeed  # noqa: E402
from trainer.rundir import RunDirectory  # noqa: E402
from trainer.runtime import Runtime  # noqa: E402

OURS, SYNCHRONOUS = "gramian", "gramian, async: false"
# Begins a save of a step into a folder, and gives what says whether it is done.
Saver = Callable[[Path, int], Callable[[], bool]]


class Stack(nn.Module):
    """Square matrices, one after another."""

    def __init__(self, n_bytes: int, width: int) -> None:
        super().__init__()
        count = max(1, round(n_bytes / (3 * 4 * width * width)))  # AdamW has two numbers for each weight
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def trained(n_bytes: int) -> tuple[Stack, torch.optim.AdamW]:
    """A model and its optimizer after a step, so that state is there."""
    model = Stack(n_bytes, width=1024 if n_bytes > 1 << 26 else 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state by name, as our engines give it."""
    state = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"optim.{name}.{key}"] = value.view(-1) if value.ndim == 0 else value
    return state


def gramian(state: dict[str, Tensor], asynchronous: bool, folder: Path, tokenizer: Path) -> Saver:
    """Ours."""
    engine: Any = SimpleNamespace(state_dict=lambda: state, optimizer=None)
    config = CheckpointConfig.model_validate({"keep": 1, "async": asynchronous})
    checkpointer = Checkpointer(RunDirectory(folder), Runtime(0, 1, torch.device("cpu")), config)

    def save(_: Path, step: int) -> Callable[[], bool]:
        checkpointer.save(engine, {"step": step}, tokenizer)
        thread = checkpointer._thread
        return lambda: thread is None or not thread.is_alive()

    return save


def peers(state: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Saver]:
    """Savers of torch, and DeepSpeed's."""

    def torch_save(folder: Path, step: int) -> Callable[[], bool]:
        torch.save(state, folder / "state.pt")
        return lambda: True

    def synchronous(folder: Path, step: int) -> Callable[[], bool]:
        dcp.save(dict(state), checkpoint_id=folder)
        return lambda: True

    def asynchronous(folder: Path, step: int) -> Callable[[], bool]:
        future: Any = dcp.async_save(dict(state), checkpoint_id=folder)
        return lambda: bool(future.done())

    found: dict[str, Saver] = {"torch.save": torch_save, "DCP": synchronous, "DCP async_save": asynchronous}
    if (engine := of_deepspeed(model, optimizer)) is not None:

        def deepspeed_save(folder: Path, step: int) -> Callable[[], bool]:
            with redirect_stdout(sys.stderr):
                engine.save_checkpoint(str(folder), tag=f"step{step}")
            return lambda: True

        found["DeepSpeed"] = deepspeed_save
    return found


def of_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """DeepSpeed's engine over the model and its optimizer; None where it is not installed."""
    try:
        deepspeed = import_deepspeed()
    except UserError:
        return None
    with redirect_stdout(sys.stderr):
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


class Loop:
    """Work that stands for a training step, and how long one takes when nothing else goes on."""

    def __init__(self, width: int) -> None:
        self._matrix = torch.randn(width, width)
        for _ in range(5):
            self.step()
        begin = time.perf_counter()
        for _ in range(20):
            self.step()
        self.seconds = (time.perf_counter() - begin) / 20

    def step(self) -> None:
        """A step."""
        torch.mm(self._matrix, self._matrix)


def measure(saver: Saver, folder: Path, step: int, loop: Loop) -> dict[str, float]:
    """One save from the loop's side, in seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()  # no save pays for the one before
    begin = time.perf_counter()
    done = saver(folder, step)
    stall, steps = time.perf_counter() - begin, 0
    while not done():
        loop.step()
        steps += 1
    whole = time.perf_counter() - begin
    return {"stall": stall, "seconds": whole, "lost": max(stall, whole - steps * loop.seconds)}


def run(n_bytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """All savers in turn; figures of each round."""
    model, optimizer = trained(n_bytes)
    state = flat(model, optimizer)
    tokenizer = folder / "tokenizer"
    tokenizer.write_bytes(b"tokens")
    savers = {
        OURS: gramian(state, True, folder / "ours", tokenizer),
        SYNCHRONOUS: gramian(state, False, folder / "ours-synchronous", tokenizer),
        **peers(state, model, optimizer),
    }
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in savers}
    loop = Loop(1024 if n_bytes > 1 << 26 else 64)
    for number in range(rounds + 1):
        for name in list(savers)[:: -1 if number % 2 else 1]:
            figures[name].append(measure(savers[name], folder / "peer", number + 1, loop))
    return {"bytes": sum(t.nbytes for t in state.values()), "step_seconds": loop.seconds, "rounds": figures}


def summed_up(result: dict[str, Any]) -> dict[str, Any]:
    """Medians after the first round, and how many times our stall the others' is."""
    medians = {
        name: {key: statistics.median(r[key] for r in rounds[1:]) for key in rounds[0]}
        for name, rounds in result["rounds"].items()
    }
    ours = medians[OURS]["stall"]
    return {
        "bytes": result["bytes"],
        "savers": {
            name: {
                "first_stall_seconds": result["rounds"][name][0]["stall"],
                "stall_seconds": of["stall"],
                "lost_seconds": of["lost"],
                "megabytes_per_second": result["bytes"] / of["seconds"] / 1e6,
                "stall_by_ours": of["stall"] / ours,
            }
            for name, of in medians.items()
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", metavar="DIR", help="Where to save; default: the system's folder of such files.")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29563", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report = summed_up(run(int(arguments.megabytes * 1e6), arguments.rounds, Path(folder)))
    print(f"{report['bytes'] / 1e6:,.1f} MB; {torch.get_num_threads()} threads; medians of {arguments.rounds} rounds")
    for name, of in report["savers"].items():
        print(
            f"{name:<22}  stall {of['stall_seconds']:8.3f} s ({of['stall_by_ours']:6.1f}x ours; first save "
            f"{of['first_stall_seconds']:.3f} s)  lost {of['lost_seconds']:7.3f} s  "
            f"{of['megabytes_per_second']:8,.0f} MB/s"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"threads": torch.get_num_threads(), "rounds": arguments.rounds, **report}, file)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of DCP and DeepSpeed outlive their groups


if __name__ == "__main__":
    main()
