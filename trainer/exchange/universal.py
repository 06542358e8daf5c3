"""DeepSpeed's universal checkpoints: a folder for every parameter, with a file for it and one for each of its moments.

    zero/<name>/fp32.pt, exp_avg.pt, ...     {"param": tensor}, whole and fp32
    zero/<name>/step.pt                      how many updates it has had
    zero/optimizer_state.pt                  the optimizer's groups
    mp_rank_00_model_states.pt               the module's state and how far the run is
    trainer.json, tokenizer.model            ours, with which the folder is a whole checkpoint again

Read with `weights_only`, so that nothing but tensors and plain data is made from a file.
"""

from __future__ import annotations

import json
import math
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.files import atomic_write
from models.config import ModelConfig
from models.transformer import Transformer
from optim.build import parameter_groups
from optim.config import OptimConfig
from trainer.exchange.export import Progress
from trainer.exchange.folders import check_new, new_folder
from trainer.exchange.importing import write_checkpoint
from trainer.exchange.tensors import StoredTensors
from trainer.manifest import FORMAT_VERSION, STATE, TOKENIZER, damage, read_trainer_state, refuse_damaged

_MODEL = "mp_rank_00_model_states.pt"
_AGAIN = "make it again with DeepSpeed's ds_to_universal, or bring it again from where a good copy is"


def export_universal(checkpoint: Path, out: Path, progress: Progress = lambda n: None) -> dict[str, Any]:
    """Write the universal checkpoint `out`; returns what was done as plain data.

    The state of an elementwise optimizer goes with it. What a rule keeps for matrices DeepSpeed knows nothing of.

    Raises:
        UserError: the checkpoint is damaged, or `out` is taken or cannot be written.
    """
    check_new(out)
    refuse_damaged(checkpoint, damage(checkpoint))
    state, stored = (
        read_trainer_state(checkpoint),
        StoredTensors(sorted(checkpoint.glob("*.safetensors")), lambda name: name),
    )
    model = ModelConfig.model_validate(state["model"])
    with torch.device("meta"):
        plain = Transformer(model)
    names, roles = dict(plain.named_parameters()), plain.parameter_roles()
    moments: dict[str, list[str]] = {name: [] for name in names}
    left_out = 0
    for key, shape in stored.shapes.items():
        name, _, what = key.removeprefix("optim.").rpartition(".")
        if key.startswith("optim.") and what != "step":
            fits = name in names and shape == tuple(names[name].shape)
            left_out += not fits
            if fits:
                moments[name].append(what)
    groups: list[dict[str, Any]] = []
    if "config" in state:
        optim = OptimConfig.model_validate(state["config"]["optim"])
        groups = parameter_groups(names, roles, optim)
    ordered = [group["names"] for group in groups] or [list(names)]
    needed = sum(2 * 4 * math.prod(shape) for shape in stored.shapes.values())
    with new_folder(out, needed) as partial:
        module: OrderedDict[str, Tensor] = OrderedDict()
        for key in stored.shapes:
            if key.startswith("model."):
                module[key.removeprefix("model.")] = tensor = stored.read(key)
                _save(partial / "zero" / key.removeprefix("model.") / "fp32.pt", {"param": tensor, "cat_dim": 0})
                progress(tensor.numel())
        for name, those in moments.items():
            folder = partial / "zero" / name
            for what in those:
                _save(folder / f"{what}.pt", {"param": stored.read(f"optim.{name}.{what}"), "cat_dim": 0})
            if those and f"optim.{name}.step" in stored.shapes:
                _save(folder / "step.pt", stored.read(f"optim.{name}.step")[0].clone())
        kept = [{k: v for k, v in group.items() if k not in ("params", "names")} for group in groups]
        # As many groups as DeepSpeed's optimizer has, which it lays these over.
        flags = {"loss_scaler": None, "dynamic_loss_scale": False, "overflow": False, "clip_grad": 0.0}
        common = {"param_groups": [{**group, "params": [i]} for i, group in enumerate(kept)], **flags}
        _save(partial / "zero" / "optimizer_state.pt", {**common, "ds_version": "0.19.0", "zero_stage": 2})
        buffers = [name for name in module if name not in names]
        shapes = [OrderedDict((name, torch.Size(names[name].shape)) for name in those) for those in ordered]
        _save(partial / _MODEL, _model_states(state, module, buffers, shapes))
        for file in (STATE, TOKENIZER):
            if (checkpoint / file).is_file():
                atomic_write(partial / file, (checkpoint / file).read_bytes())
    notes = []
    if left_out:
        notes = [f"what {state['config']['optim']['name']} keeps for matrices is left out: DeepSpeed has no such rule"]
    return {
        "out": str(out),
        "parameters": sum(p.numel() for p in names.values()),
        "step": state["step"],
        "notes": notes,
    }


def _model_states(state: dict[str, Any], module: Any, buffers: list[str], shapes: list[Any]) -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(("optimizer", "lr_scheduler", "data_sampler", "random_ltd"))
    nothing |= {"frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {}, "skipped_steps": 0}
    return {
        **nothing,
        "module": module,
        "buffer_names": buffers,
        "param_shapes": shapes,
        "global_steps": state["step"],
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.0",
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def import_universal(
    path: Path, out: Path, model: ModelConfig | None = None, progress: Progress = lambda n: None
) -> dict[str, Any]:
    """Write the checkpoint `out` from a universal one; returns what was done as plain data.

    With our trainer.json in it, it is a checkpoint that a run goes on from, in any layout; else one of weights, of
    `model`, for `model.init_from`.

    Raises:
        UserError: what there is, is no universal checkpoint, or not of this model; nothing is left of `out` then.
    """
    check_new(out)
    if not (path / "zero").is_dir():
        raise UserError(
            f"{path}: has no folder 'zero', so that it is no universal checkpoint; make one of DeepSpeed's own with "
            f"python -m deepspeed.checkpoint.ds_to_universal --input_folder ... --output_folder ..."
        )
    ours = (path / STATE).is_file() and model is None
    if model is None and not ours:
        raise UserError(f"{path}: has no {STATE}, which a checkpoint of ours leaves there; give --config, of its model")
    state = json.loads((path / STATE).read_text(encoding="utf-8")) if ours else {}
    if ours:
        model = ModelConfig.model_validate(state["model"])
    assert model is not None
    with torch.device("meta"):
        plain = Transformer(model)
    expected = {name: tuple(t.shape) for name, t in (*plain.named_parameters(), *plain.named_buffers())}
    items = {f"model.{name}": (shape, path / "zero" / name / "fp32.pt") for name, shape in expected.items()}
    if ours and not state.get("weights_only"):
        for name, _ in plain.named_parameters():
            for file in sorted((path / "zero" / name).glob("*.pt")):
                if file.stem != "fp32":
                    items[f"optim.{name}.{file.stem}"] = ((1,) if file.stem == "step" else expected[name], file)

    def make(name: str) -> Tensor:
        shape, file = items[name]
        tensor = _load(file).reshape(-1)
        if tensor.numel() != math.prod(shape):
            raise UserError(f"{file}: has {tensor.numel():,} numbers, and the model's is of the shape {shape}")
        progress(tensor.numel())
        return tensor.float().view(shape)

    for name, (_, file) in items.items():
        if not file.is_file():
            raise UserError(f"{file}: is not there, but the model has '{name.removeprefix('model.')}'; {_AGAIN}")
    if not ours:
        state = {"format": FORMAT_VERSION, "step": 0, "tokens": 0, "weights_only": True, "tokenizer_hash": None}
        state |= {"model": model.model_dump(mode="json"), "torch": str(torch.__version__)}

    def save_tokenizer(folder: Path) -> None:
        if (path / TOKENIZER).is_file():
            atomic_write(folder / TOKENIZER, (path / TOKENIZER).read_bytes())

    shapes = {name: shape for name, (shape, _) in items.items()}
    write_checkpoint(out, shapes, make, {**state, "imported_from": str(path.absolute())}, save_tokenizer)
    notes = [] if ours else ["it has weights alone: a run begins from it with model.init_from"]
    parameters = sum(p.numel() for p in plain.parameters())
    return {"checkpoint": str(out), "parameters": parameters, "step": state["step"], "notes": notes}


def _save(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file)


def _load(file: Path) -> Tensor:
    try:
        content = torch.load(file, weights_only=True, map_location="cpu")
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "it is damaged"
        raise UserError(f"{file}: cannot be read: {reason}; {_AGAIN}") from None
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, Tensor):
        raise UserError(f"{file}: has no tensor; {_AGAIN}")
    return tensor
