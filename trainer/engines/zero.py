"""The engine `deepspeed`: ZeRO stages 0 to 3, started by Accelerate, with our loss, norm, clipping and optimizers.

DeepSpeed reduces gradients, cuts and gathers parameters, and scales losses. What it has no say in: the gradient norm,
which it takes in fp32, and at stage 0 not at all; clipping by it; the optimizer (optim/flat.py), which it calls after
accumulation with a flat tensor of whatever lies in this rank's partition; initial weights, which it would round under
bf16; checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from common.errors import UserError
from models.transformer import Transformer
from optim.boxes import Box, Ranks, boxes_of_run
from optim.build import named_state, parameter_groups
from optim.flat import Flat, FlatOptimizer, Place
from optim.table import Routing
from trainer.clip import disjoint_norm, global_norm
from trainer.config import TrainingConfig
from trainer.engines.base import Engine, OptimizerFactory
from trainer.engines.zero_config import zero_config
from trainer.engines.zero_start import expert_groups, import_deepspeed, quiet, start_engine
from trainer.experts import distribute_experts
from trainer.initialize import initialize
from trainer.layout import Layout
from trainer.mesh import expert_mesh
from trainer.parallelize import wrap_blocks
from trainer.precision import param_dtype
from trainer.scaler import make_scaler


class ZeroEngine(Engine):
    """DeepSpeed's engine behind our interface. Master weights, sums of gradients and optimizer state are fp32."""

    def __init__(self, config: TrainingConfig, layout: Layout, device: torch.device) -> None:
        self._config, self._layout, self._device = config, layout, device
        self._stage = config.parallel.stage
        self._offloads = config.parallel.offload != "none"
        self._first_expert: dict[str, int] = {}
        self._skipped_steps = 0

    def prepare(self, model: Transformer, make_optimizer: OptimizerFactory) -> None:
        deepspeed = import_deepspeed()
        self._before_backward = deepspeed.runtime.utils.register_output_backward_hooks
        inits, roles = model.initial_values(), model.parameter_roles()
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        settings = zero_config(self._config, self._layout)
        zero, total = settings["zero_optimization"], sum(torch.Size(shape).numel() for shape in self._shapes.values())
        zero["reduce_bucket_size"] = min(zero["reduce_bucket_size"], total)  # which it allocates, whole
        if self._layout.ep > 1:
            self._take_own_experts(model)
        wrap_blocks(model, self._config.train, copies=1)
        if self._stage == 3:
            self._materialise_cut(model, settings, deepspeed)
        else:
            model.to_empty(device=self._device)
        self.buffers: dict[str, Tensor] = dict(model.named_buffers())
        for buffer in self.buffers.values():
            buffer.zero_()
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        for name in self._first_expert:
            own: Any = parameters[name]
            own.allreduce, own.group_name = False, f"ep_size_{self._layout.ep}"
        if self._stage == 0:
            initialize(parameters, inits, self._config.run.seed)
            self.optimizer = make_optimizer(parameters)
        else:
            groups = self._groups(parameters, parameter_groups(parameters, roles, self._config.optim))
            self.optimizer = FlatOptimizer(groups, self._config.optim)
        self.model = model
        self._engine = start_engine(model, self.optimizer, settings, self._config.train.precision)
        self._zero = self._engine.optimizer
        self._flats: list[Flat] = []
        if isinstance(self.optimizer, FlatOptimizer):
            names = {id(parameter): name for name, parameter in parameters.items()}
            make = self._cpu_adam if self._offloads and self._cpu_adam_name() else None
            for tensor, flat, group in self._cuts(names):
                self._flats.append(flat)
                self.optimizer.take(tensor, flat, roles, group, make)
            initialize(self._weights(), inits, self._config.run.seed)
            self._publish()
        if self._config.train.precision == "fp16":
            self.load_scaler_state(make_scaler(self._config.train).state())  # type: ignore[union-attr]

    def _take_own_experts(self, model: Transformer) -> None:
        """Spread experts over ranks, as plain tensors, and let DeepSpeed make the groups that share them."""
        mesh = expert_mesh(self._layout, self._device.type)["ep"]
        distribute_experts(model, mesh)
        for prefix, layer in model.named_modules():
            if layer not in model.expert_layers():
                continue
            for name, parameter in list(layer.experts.named_parameters()):
                assert isinstance(parameter, DTensor)
                own = nn.Parameter(parameter.to_local())
                setattr(layer.experts, name, own)
                self._first_expert[f"{prefix}.experts.{name}"] = mesh.get_local_rank() * own.shape[0]
        model.add_module("expert_groups", expert_groups(self._layout.ep, self._config.model.moe.n_experts))  # type: ignore[union-attr]

    def _materialise_cut(self, model: Transformer, settings: dict[str, Any], deepspeed: Any) -> None:
        """Give modules memory one by one, so that no rank ever has the whole model."""
        os.environ.setdefault("LOCAL_RANK", "0")
        sizes = {"train_micro_batch_size_per_gpu": self._layout.micro_batch_size, "gradient_accumulation_steps": 1}
        dtype = param_dtype(self._config.train.precision)
        for module in reversed(list(model.modules())):  # children before their parents
            if any(True for _ in module.parameters(recurse=False)):
                module.to_empty(device=self._device, recurse=False).to(dtype)
                with quiet():
                    deepspeed.zero.Init(module=module, config_dict_or_path=settings | sizes, dtype=dtype)
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                module.register_buffer(name, torch.empty_like(buffer, device=self._device))

    def _groups(self, parameters: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups, with those of experts that ranks have for themselves apart, as DeepSpeed wants them."""
        result = []
        for group in groups:
            for own in (False, True):
                names = [name for name in group["names"] if (name in self._first_expert) == own]
                if names:
                    mark = {"moe": True, "name": f"ep_size_{self._layout.ep}"} if own else {}
                    result.append({**group, "names": names, "params": [parameters[n] for n in names], **mark})
        return result

    def _cuts(self, names: Mapping[int, str]) -> Iterator[tuple[Tensor, Flat, dict[str, Any]]]:
        """This rank's flat tensors of fp32 weights, what is in them, and the group each belongs to."""
        zero, groups = self._zero, self._zero.optimizer.param_groups
        if self._stage == 3:
            for i, parameters in enumerate(zero.fp16_groups):
                ranks, places, start = _ranks(zero.dp_process_group), {}, 0
                for parameter in parameters:
                    size = parameter.partition_numel()
                    runs = [(rank * size, (rank + 1) * size) for rank in range(ranks.size)]
                    places[names[id(parameter)]] = self._place(names[id(parameter)], start, runs)
                    start += size
                tensor = zero.fp32_partitioned_groups_flat[i]
                yield tensor, Flat(tensor, places, ranks), groups[zero.sub_group_to_group_id[i]]
            return
        for i, parameters in enumerate(zero.round_robin_bit16_groups):
            ranks, size, places = _ranks(zero.real_dp_process_group[i]), zero.partition_size[i], {}
            for parameter, offset in zip(parameters, zero.round_robin_bit16_offsets[i], strict=True):
                runs = [(rank * size - offset, (rank + 1) * size - offset) for rank in range(ranks.size)]
                start = max(0, offset - ranks.mine * size)
                places[names[id(parameter)]] = self._place(names[id(parameter)], start, runs)
            tensor = zero.single_partition_of_fp32_groups[i]
            yield tensor, Flat(tensor, places, ranks), groups[i]

    def _place(self, name: str, start: int, runs: list[tuple[int, int]]) -> Place:
        """`runs`: by rank, of the elements of the parameter as ranks here have it; they may reach beyond it."""
        shape, held = self._shapes[name], []
        here = shape if name not in self._first_expert else (shape[0] // self._layout.ep, *shape[1:])
        first, numel = self._first_expert.get(name, 0), torch.Size(here).numel()
        for begin, end in runs:
            boxes = boxes_of_run(here, min(max(begin, 0), numel), min(max(end, 0), numel))
            held.append([_shifted(box, first) for box in boxes])
        return Place(start, shape, held)

    def _cpu_adam_name(self) -> bool:
        optim = self._config.optim
        return optim.is_rule or optim.name in ("adam", "adamw")

    def _cpu_adam(self, group: dict[str, Any]) -> Optimizer:
        """DeepSpeed's Adam for weights that live beside the CPU, with its state."""
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        options = {} if self._config.optim.is_rule else self._config.optim.resolved()
        decoupled = self._config.optim.is_rule or self._config.optim.name == "adamw"
        try:
            with quiet():
                adam = DeepSpeedCPUAdam([group], adamw_mode=decoupled, **options)
        except RuntimeError as error:
            raise UserError(
                f"'parallel.offload' needs DeepSpeed's Adam for CPUs, which cannot be built here ({error.__cause__}); "
                f"install a C++ compiler, or set parallel.offload=none"
            ) from None
        (weights,) = group["params"]
        zeros = {key: torch.zeros_like(weights, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
        adam.state[weights] = {"step": 0, **zeros}
        return adam

    def _weights(self) -> dict[str, Tensor]:
        if self._stage == 0:
            return dict(self.model.named_parameters())
        return {name: parts for flat in self._flats for name, parts in flat.parts().items()}

    @torch.no_grad()
    def _publish(self) -> None:
        """Let what the model computes with follow from the fp32 weights."""
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        elif self._stage == 3:
            self._zero._partition_all_parameters()
            for i in range(len(self._zero.fp16_groups)):
                self._zero._reassign_or_swap_out_partitioned_parameters(i)
            if persistent := self._zero.persistent_parameters:
                persistent[0].all_gather(persistent)

    @property
    def loss_scale(self) -> float:
        return float(self._zero.loss_scale) if self._config.train.precision == "fp16" else 1.0

    def micro_backward(self, loss: Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        loss = loss * self._layout.world_size  # rule 1: it takes the mean over ranks
        if self._stage > 0:
            # What its own `forward` does around the model's, which is called without it.
            self._zero.clear_backward_seen_flag()
            self._before_backward(loss, self._engine._backward_prologue)
        self._engine.backward(loss)

    def _runs(self) -> list[list[Tensor]]:
        """By flat tensor, what its gradient consists of, one after another."""
        zero = self._zero
        if self._offloads:
            flat = zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
            return [[tensor.grad] for tensor in flat]
        return [list(zero.averaged_gradients[i]) for i in range(len(self._flats))]

    def gradients(self) -> dict[str, Tensor]:
        if self._stage == 0:
            return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        found: dict[str, Tensor] = {}
        for flat, runs in zip(self._flats, self._runs(), strict=True):
            found |= flat.parts(torch.cat([run.reshape(-1) for run in runs]))
        return found

    def grad_norm(self) -> float:
        if self._stage == 0:
            return global_norm(self.gradients().values())
        return disjoint_norm(run for runs in self._runs() for run in runs) / self.loss_scale

    def step(self, scale: float) -> None:
        if isinstance(self.optimizer, FlatOptimizer):
            self.optimizer.scale = scale
        elif scale != 1.0:
            torch._foreach_mul_(list(self.gradients().values()), scale)
        self._engine.step()
        if not self._engine.was_step_applied():
            raise RuntimeError("DeepSpeed left out an update though loss and gradient norm are finite")

    def skip(self, overflow: bool) -> None:
        if overflow:
            self._skipped_steps += 1
            self._zero.loss_scaler.update_scale(True)
        zero = self._zero
        if self._stage == 0:
            self._engine.zero_grad()
        elif self._stage == 3:
            zero._pre_step()
            zero._overflow_clean_up(zero.loss_scale)
        else:
            zero.micro_step_id = -1
            zero.zero_grad(set_to_none=True)
            if self._offloads:
                zero._wait_for_offload_copies()
                zero._offload_accumulated_param_ids = set()
                zero.reset_cpu_buffers()
            for i in zero.averaged_gradients:
                zero.averaged_gradients[i] = zero.all_grad_tensors[i] = None

    def scaler_state(self) -> dict[str, Any]:
        if self._config.train.precision != "fp16":
            return {}
        scaler = self._zero.loss_scaler
        good = (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window
        return {"loss_scale": float(scaler.cur_scale), "good_steps": good, "skipped_steps": self._skipped_steps}

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        if self._config.train.precision == "fp16" and state:
            scaler = self._zero.loss_scaler
            scaler.cur_scale, self._skipped_steps = state["loss_scale"], state["skipped_steps"]
            scaler.last_overflow_iter = scaler.cur_iter - 1 - state["good_steps"]

    def routing(self) -> Routing | None:
        if not isinstance(self.optimizer, FlatOptimizer):
            routing = super().routing()
            return None if routing is None else routing._replace(unknown="every rank")
        mine = []
        for owners in self.optimizer.owners():
            group = owners.ranks.group
            ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
            mine += [(matrix, ranks[owner]) for matrix, owner in zip(owners.matrices, owners.owners, strict=True)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)  # groups of ranks know of their own experts
        owned = {matrix: owner for those in everyone for matrix, owner in those}
        if not owned:
            return None
        return Routing(self.optimizer.param_groups, self._shapes, list(owned.items()), self.optimizer.owners()[0].rule)

    def state_dict(self) -> dict[str, Tensor]:
        weights = self._weights() | self.buffers
        return {f"model.{name}": tensor.detach() for name, tensor in weights.items()} | {
            f"optim.{name}": tensor for name, tensor in named_state(self.optimizer).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if isinstance(self.optimizer, FlatOptimizer):
            self.optimizer.loaded()
        self._publish()


def _shifted(box: Box, first: int) -> Box:
    return Box((box.start[0] + first, *box.start[1:]), (box.stop[0] + first, *box.stop[1:])) if first else box


def _ranks(group: Any) -> Ranks:
    size = dist.get_world_size(group)
    return Ranks(None, 1, 0) if size == 1 else Ranks(group, size, dist.get_rank(group))
