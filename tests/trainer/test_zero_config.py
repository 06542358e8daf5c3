"""A user's DeepSpeed JSON and what `accelerate` was told, beside our config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from tests.runs import TINY
from trainer.config import load_config
from trainer.engines.zero_config import check_accelerate, zero_config
from trainer.layout import plan_layout

ZERO = "parallel.engine=deepspeed"


def settings_of(tree: dict[str, Any], folder: Path, *keys: str) -> dict[str, Any]:
    file = folder / "ds.json"
    file.write_text(json.dumps(tree), encoding="utf-8")
    config = load_config(TINY, [ZERO, f"parallel.deepspeed_config={file}", *keys])
    return zero_config(config, plan_layout(config, 2))


def test_a_usual_file_is_taken(tmp_path: Path) -> None:
    """With `auto` and with values that agree, as users of `transformers` and Accelerate have it."""
    tree = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 100,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.95], "eps": "auto"}},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": False,
            "reduce_bucket_size": 4096,
            "allgather_bucket_size": "auto",
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    }
    settings = settings_of(tree, tmp_path, "parallel.offload=optimizer")
    zero = settings["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["overlap_comm"]) == (2, 4096, False)
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert "allgather_bucket_size" not in zero
    assert settings["gradient_clipping"] == 0.0  # we clip
    assert "optimizer" not in settings


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"zero_optimization": {"stage": 3}}, ["'zero_optimization.stage' is 3", "'parallel.zero_stage' is 2"]),
        ({"gradient_clipping": 0.5}, ["'gradient_clipping' is 0.5", "'train.grad_clip' is 1.0", "make them agree"]),
        ({"train_batch_size": 64}, ["'train_batch_size' is 64", "'train.global_batch_size' is 32"]),
        ({"gradient_accumulation_steps": 4}, ["'gradient_accumulation_steps' is 4", "is 2"]),
        ({"bf16": {"enabled": True}}, ["'bf16.enabled' is true", "'train.precision'"]),
        ({"optimizer": {"type": "Lamb"}}, ['"Lamb"', "'optim.name' is adamw"]),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
            ["params.lr' is 0.1", "'optim.lr' is 0.001"],
        ),
        ({"scheduler": {"type": "WarmupLR"}}, ["'scheduler'", "'schedule'", "remove it"]),
        ({"zero_optimization": {"overlap_com": True}}, ["'zero_optimization.overlap_com'", "overlap_comm'?"]),
        ({"zero_optimisation": {"stage": 2}}, ["'zero_optimisation.stage'", "zero_optimization.stage'?"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["offload_optimizer.device' is", "none"]),
        ({"zero_optimization": {"zero_quantized_weights": True}}, ["zero_quantized_weights", "change numbers"]),
    ],
)
def test_what_contradicts(tree: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        settings_of(tree, tmp_path)
    assert "ds.json" in str(refused.value)
    assert all(part in str(refused.value) for part in parts), refused.value


@pytest.mark.parametrize(("content", "part"), [(None, "cannot read"), ("{", "is not JSON"), ("[]", "no JSON object")])
def test_what_is_no_file_of_theirs(content: str | None, part: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    config = load_config(TINY, [ZERO, f"parallel.deepspeed_config={file}"])
    with pytest.raises(UserError, match=part):
        plan_layout(config, 2)


DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}


@pytest.mark.parametrize(
    ("environment", "keys", "parts"),
    [
        (DEEPSPEED, [], ["accelerate was started for deepspeed", "'parallel.engine' is fsdp"]),
        ({"ACCELERATE_USE_FSDP": "true"}, [ZERO], ["for fsdp", "'parallel.engine' is deepspeed"]),
        (
            DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            [ZERO],
            ["zero_stage 3", "'parallel.zero_stage' is 2"],
        ),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, [ZERO], ["cpu", "'parallel.offload'"]),
        (DEEPSPEED | {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, [ZERO], ["gradient_clipping 0.5", "'train.grad_clip'"]),
        (DEEPSPEED | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, [ZERO], ["gradient_accumulation_steps 4"]),
        (
            DEEPSPEED | {"ACCELERATE_MIXED_PRECISION": "bf16"},
            [ZERO],
            ["mixed_precision bf16", "is fp32"],
        ),
    ],
)
def test_an_accelerate_config_that_contradicts(environment: dict[str, str], keys: list[str], parts: list[str]) -> None:
    config = load_config(TINY, keys)
    with pytest.raises(UserError) as refused:
        check_accelerate(config, plan_layout(config, 2), environment)
    assert all(part in str(refused.value) for part in parts), refused.value


def test_an_accelerate_config_that_agrees(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}), encoding="utf-8")
    said = {"ZERO_STAGE": "2", "OFFLOAD_OPTIMIZER_DEVICE": "none", "CONFIG_FILE": str(file)}
    environment = DEEPSPEED | {f"ACCELERATE_DEEPSPEED_{name}": value for name, value in said.items()}
    environment |= {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_MIXED_PRECISION": "no"}
    config = load_config(TINY, [ZERO])
    check_accelerate(config, plan_layout(config, 2), environment)
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}), encoding="utf-8")
    with pytest.raises(UserError, match=r"zero_optimization\.stage"):
        check_accelerate(config, plan_layout(config, 2), environment)
