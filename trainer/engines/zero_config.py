"""What DeepSpeed is told: our config in its words, with a user's own JSON and Accelerate's settings beside it.

Every key of theirs that one of ours decides is checked against ours; of the others those are let through that change no
number. Imports neither torch nor DeepSpeed, so that all of it is refused before processes are started.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from trainer.config import TrainingConfig

if TYPE_CHECKING:
    from trainer.layout import Layout

# Gradients that are reduced together, in numbers; DeepSpeed's own default takes 2 GB for a model of any size.
_BUCKET = 50_000_000
# What changes how DeepSpeed works and not what it computes.
_FREE = {
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "disable_allgather", "aio"),
    *("flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet", "monitor_config"),
    *("zero_allow_untested_optimizer", "checkpoint", "autotuning", "python_gc"),
}
_FREE_ZERO = {
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_bucket_size", "contiguous_gradients"),
    *("round_robin_gradients", "ignore_unused_parameters", "sub_group_size", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    *("stage3_model_persistence_threshold", "stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity"),
    *("use_all_reduce_for_fetch_params", "log_trace_cache_warnings", "elastic_checkpoint"),
    *("use_multi_rank_bucket_allreduce", "allgather_sequential", "stage3_gather_fp16_weights_on_model_save"),
}
_FREE_OFFLOAD = {"pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "pipeline_read"}
_NOT_OURS = {
    "scheduler": "the learning rate's course is that of 'schedule'",
    "activation_checkpointing": "set train.activation_checkpointing",
    "prescale_gradients": "gradients are sums over ranks, whatever their number",
    "gradient_predivide_factor": "gradients are sums over ranks, whatever their number",
    "communication_data_type": "gradients are added up in fp32",
    "data_types": "gradients are added up in fp32",
    "amp": "set train.precision",
    "torch_autocast": "set train.precision",
    "sparse_gradients": "embeddings have dense gradients",
    "compile": "set train.compile",
    "data_efficiency": "the order of the data is that of 'data'",
    "curriculum_learning": "use 'stages'",
    "compression_training": "it is none of DeepSpeed's optimizers that train here",
    "zero_force_ds_cpu_optimizer": "the optimizer is that of 'optim'",
    "tensor_parallel": "set parallel.tp, under engine fsdp",
    "pipeline": "there is no pipeline parallelism",
    "elasticity": "a run goes on with any number of processes as it is",
    "seed": "set run.seed",
}


def zero_config(config: TrainingConfig, layout: Layout) -> dict[str, Any]:
    """DeepSpeed's config for a run.

    Raises:
        UserError: a key of the file `parallel.deepspeed_config` is unknown, does not work here or contradicts ours.
    """
    parallel, train = config.parallel, config.train
    zero: dict[str, Any] = {"stage": parallel.stage, "reduce_bucket_size": _BUCKET}
    if parallel.offload == "none" and (parallel.stage == 2 or (parallel.stage == 1 and train.precision == "fp32")):
        zero["compute_grad_norm"] = False  # where it can be left out: we have our own
    if parallel.stage == 3:
        # It would put another function in torch's `linear`'s place, for the whole process and for good.
        zero["memory_efficient_linear"] = False
    for key, offloaded in _offloads(config).items():
        if offloaded != "none":
            zero[key] = {"device": offloaded}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": 1,  # we say which micro-batch is the last
        "gradient_clipping": 0.0,  # by our own norm
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
    }
    if train.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    if train.precision == "fp16":
        window = train.loss_scale_interval or 2000
        settings["fp16"] = {"enabled": True, "loss_scale": 0, "loss_scale_window": window, "hysteresis": 1}
        settings["fp16"] |= {"min_loss_scale": 1, "initial_scale_power": 16}
    if parallel.deepspeed_config is not None:
        theirs = read_json(parallel.deepspeed_config)
        check_json(parallel.deepspeed_config, theirs, config, layout)
        _lay_free_keys(settings, theirs)
    return settings


def read_json(file: str) -> dict[str, Any]:
    """A DeepSpeed config file.

    Raises:
        UserError: there is none, or it is no JSON object.
    """
    try:
        tree = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"'parallel.deepspeed_config': cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"'parallel.deepspeed_config': {file} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"'parallel.deepspeed_config': {file} is no JSON object; it must have DeepSpeed's keys")
    return tree


def check_json(file: str, theirs: Mapping[str, Any], config: TrainingConfig, layout: Layout) -> None:
    """Refuse a DeepSpeed config that says anything else than ours.

    Raises:
        UserError: one line with the file, the key, its value, and ours.
    """
    owned = _owned(config, layout)
    for key, value in _flat(theirs).items():
        if key in owned:
            ours_name, ours = owned[key]
            if value not in ("auto", None) and not _same(value, ours):
                raise UserError(
                    f"{file}: '{key}' is {json.dumps(value)}, but {ours_name} is {_shown(ours)}; "
                    f"make them agree, or remove '{key}'"
                )
            continue
        top, _, below = key.partition(".")
        section, _, last = below.rpartition(".")
        free = top in _FREE or (top == "zero_optimization" and below in _FREE_ZERO)
        free |= key.startswith("zero_optimization.offload_") and last in _FREE_OFFLOAD and section.count(".") == 0
        free |= value is False or (isinstance(value, dict) and not value)
        if free:
            continue
        if top in _NOT_OURS:
            raise UserError(f"{file}: '{top}' is not taken from it: {_NOT_OURS[top]}; remove it")
        known = {*_FREE, *owned, *(f"zero_optimization.{name}" for name in _FREE_ZERO)}
        near = get_close_matches(key, known, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise UserError(f"{file}: '{key}' is unknown here, or would change numbers; {hint}remove it")


def check_accelerate(config: TrainingConfig, layout: Layout, environment: Mapping[str, str]) -> None:
    """Refuse what `accelerate launch` was told, in a file or on its command line, where it contradicts our config.

    Raises:
        UserError: one line with both.
    """
    said = {name.removeprefix("ACCELERATE_"): value for name, value in environment.items() if "ACCELERATE_" in name}
    engine = config.parallel.engine
    for name, wanted in (("USE_DEEPSPEED", "deepspeed"), ("USE_FSDP", "fsdp")):
        if said.get(name, "false").lower() == "true" and engine != wanted:
            raise UserError(
                f"accelerate was started for {wanted}, but 'parallel.engine' is {engine}; "
                f"set parallel.engine={wanted}, or start it without"
            )
    owned = _owned(config, layout)
    for name, key in (
        ("DEEPSPEED_ZERO_STAGE", "zero_optimization.stage"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "zero_optimization.offload_optimizer.device"),
        ("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "zero_optimization.offload_param.device"),
        ("GRADIENT_CLIPPING", "gradient_clipping"),
        ("GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps"),
    ):
        if said.get("USE_DEEPSPEED", "false").lower() != "true" or said.get(name, "auto") in ("auto", ""):
            continue
        ours_name, ours = owned[key]
        # Accelerate sets one step of accumulation for those who say nothing.
        if not _same(_number(said[name]), ours) and not (name == "GRADIENT_ACCUMULATION_STEPS" and said[name] == "1"):
            raise UserError(
                f"accelerate was started with {name.lower()} {said[name]}, but {ours_name} is {_shown(ours)}; "
                f"make them agree, or leave it out there"
            )
    precision = said.get("MIXED_PRECISION", "no")
    if precision != "no" and precision != config.train.precision:
        raise UserError(
            f"accelerate was started with mixed_precision {precision}, but 'train.precision' is "
            f"{config.train.precision}; make them agree"
        )
    file = said.get("DEEPSPEED_CONFIG_FILE", "none")
    if engine == "deepspeed" and file not in ("none", "", config.parallel.deepspeed_config):
        check_json(file, read_json(file), config, layout)


def _offloads(config: TrainingConfig) -> dict[str, str]:
    offload = config.parallel.offload
    return {
        "offload_optimizer": "none" if offload == "none" else "cpu",
        "offload_param": "cpu" if offload == "optimizer+params" else "none",
    }


def _owned(config: TrainingConfig, layout: Layout) -> dict[str, tuple[str, Any]]:
    """Their keys that ours decide: what ours is called, and its value in their words."""
    train, optim, parallel = config.train, config.optim, config.parallel
    owned: dict[str, tuple[str, Any]] = {
        "train_batch_size": ("'train.global_batch_size'", layout.global_batch_size),
        "train_micro_batch_size_per_gpu": ("'train.micro_batch_size'", layout.micro_batch_size),
        "gradient_accumulation_steps": (
            "what 'train.global_batch_size' leaves of accumulation",
            layout.accumulation,
        ),
        "gradient_clipping": ("'train.grad_clip'", train.grad_clip or 0.0),
        "zero_optimization.stage": ("'parallel.zero_stage'", parallel.stage),
        "bf16.enabled": ("'train.precision' being bf16", train.precision == "bf16"),
        "bfloat16.enabled": ("'train.precision' being bf16", train.precision == "bf16"),
        "fp16.enabled": ("'train.precision' being fp16", train.precision == "fp16"),
        "fp16.loss_scale": ("its being dynamic", 0),
        "fp16.initial_scale_power": ("log2 of 'train.loss_scale_init'", math.log2(train.loss_scale_init or 2**16)),
        "fp16.loss_scale_window": ("'train.loss_scale_interval'", train.loss_scale_interval or 2000),
        "fp16.hysteresis": ("the steps of overflow that lower it", 1),
        "fp16.min_loss_scale": ("the least", 1),
        "optimizer.type": ("'optim.name'", optim.name),
        "optimizer.params.lr": ("'optim.lr'", optim.lr),
        "optimizer.params.weight_decay": ("'optim.weight_decay'", optim.weight_decay),
    }
    for key, device in _offloads(config).items():
        owned[f"zero_optimization.{key}.device"] = ("that of 'parallel.offload'", device)
    if not optim.is_rule:
        options = {key: value for key, value in optim.resolved().items() if key in ("betas", "eps", "momentum")}
        owned |= {f"optimizer.params.{key}": (f"'optim.{key}'", value) for key, value in options.items()}
    return owned


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree's leaves by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _lay_free_keys(settings: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Put a user's keys that are no business of ours into the config; `auto` leaves DeepSpeed's default."""
    for key, value in theirs.items():
        if key in _FREE and value != "auto":
            settings[key] = value
    zero = theirs.get("zero_optimization", {})
    for key, value in zero.items():
        if key in _FREE_ZERO and value != "auto":
            settings["zero_optimization"][key] = value
        if key in settings["zero_optimization"] and isinstance(value, dict):
            free = {name: of for name, of in value.items() if name in _FREE_OFFLOAD and of != "auto"}
            settings["zero_optimization"][key] |= free


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, str) and isinstance(theirs, str):
        return theirs.lower() == ours.lower()
    if isinstance(ours, tuple | list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, theirs, ours))
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return theirs is ours
    numbers = isinstance(ours, int | float) and isinstance(theirs, int | float)
    return math.isclose(theirs, ours, rel_tol=1e-12) if numbers else theirs == ours


def _shown(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
