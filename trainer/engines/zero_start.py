"""DeepSpeed imported and its engine started, as quietly as it can be."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from common.errors import UserError
from common.logs import get_logger


def expert_groups(ep: int, n_experts: int) -> nn.Module:
    """A module without parameters that lets DeepSpeed make the groups of ranks that share the same experts."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    class ExpertGroups(MoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts, self.ep_size, self.num_local_experts = n_experts, ep, n_experts // ep
            self.expert_group_name = f"ep_size_{ep}"

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            if self.expert_group_name not in groups._get_expert_parallel_group_dict():
                groups._create_expert_and_data_parallel(ep)

    return ExpertGroups()


def import_deepspeed() -> Any:
    """DeepSpeed, for the device at hand, with nothing left of a process group that is gone.

    Raises:
        UserError: it is not installed.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Where `ninja` is, with which its operators are built.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", "")])
    try:
        with quiet():
            import deepspeed
            from deepspeed.utils import groups
    except ImportError as error:
        raise UserError(
            f"'parallel.engine' is deepspeed, which cannot be imported ({error}); pip install 'gramian[deepspeed]'"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use .*_single", category=FutureWarning)
    offload = deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload
    # Numbers of modules and parameters, which all ranks have to agree on.
    offload._register_deepspeed_module.__defaults__[0][0] = 0
    deepspeed.zero.Init.param_id = 0
    # An operator for inference alone, whose building would take minutes on a CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for name, value in vars(groups).items():
        if name.isupper() and name.startswith("_") and isinstance(value, dist.ProcessGroup | dict | None):
            setattr(groups, name, {} if isinstance(value, dict) else None)
    return deepspeed


def start_engine(model: nn.Module, optimizer: Optimizer, settings: dict[str, Any], precision: str) -> Any:
    """Let Accelerate start DeepSpeed's engine, and see that it is what was asked for.

    Raises:
        UserError: DeepSpeed does not compute in this precision here.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
    from deepspeed.accelerator import get_accelerator

    if precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise UserError(
            "'train.precision' is fp16, in which DeepSpeed does not compute on this device; set train.precision=bf16, "
            "or parallel.engine=fsdp"
        )
    get_logger().info("DeepSpeed starts; operators that it lacks are built now, which may take minutes once")
    AcceleratorState._reset_state(reset_partial_state=True)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # It leaves notes to itself in the environment, which the next to read it would take for a user's.
    with quiet(), environment_kept():
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
            mixed_precision={"fp32": "no"}.get(precision, precision),
            kwargs_handlers=[InitProcessGroupKwargs(backend=backend)],
        )
        if accelerator.num_processes != dist.get_world_size() or accelerator.state.deepspeed_plugin is None:
            raise RuntimeError(
                f"Accelerate took the run for one of {accelerator.num_processes} processes under "
                f"{accelerator.distributed_type}, not for {dist.get_world_size()} under DeepSpeed"
            )
        accelerator.prepare(model, optimizer)
    engine = accelerator.deepspeed_engine_wrapped.engine
    if engine.basic_optimizer is not optimizer:
        raise RuntimeError(f"{type(engine.basic_optimizer).__name__} was put in the optimizer's place")
    return engine


@contextmanager
def environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps what DeepSpeed prints by itself from the terminal."""
    with redirect_stdout(StringIO()):
        yield
