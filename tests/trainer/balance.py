"""A collapsed router, and what becomes of it: for the tests here and in the long tier."""

from __future__ import annotations

from typing import Any

# Two experts of eight get nearly everything at first: their logits are 2 higher.
COLLAPSED = [
    *("model.n_layers=2", "model.d_model=128", "model.n_heads=4", "model.d_ff=128", "model.init_std=0.05"),
    *("data.seq_len=64", "train.global_batch_size=16", "train.micro_batch_size=16", "optim.lr=1e-3"),
    *("schedule.warmup_steps=0",),
]
MOE = "model.moe={{n_experts: 8, top_k: 2, router_bias: true, z_loss_coef: 0, {}}}"
WAYS = {
    "none": MOE.format("aux_loss_coef: 0"),
    "auxiliary loss 0.01": MOE.format("aux_loss_coef: 0.01"),
    "bias rate 0.01": MOE.format("aux_loss_coef: 0, bias_update_rate: 0.01"),
}


def largest_load(keys: list[str], steps: int, last: int) -> float:
    """In a rank: train from a collapsed router; the largest load over the mean load of the worst layer, as the mean of
    the last steps."""
    import torch

    from tests.runs import started
    from trainer.loop import train_step

    with started([*COLLAPSED, f"train.steps={steps}", *keys]) as here:
        for name, parameter in here.engine.parameters.items():
            if name.endswith("router.bias"):
                with torch.no_grad():
                    parameter.to_local()[:2] = 2.0
        rows: list[dict[str, Any]] = []
        for step in range(steps):
            result = train_step(
                here.engine,
                here.batch(step),
                here.layout,
                here.runtime,
                here.config.train.grad_clip,
                here.config.model.moe,
            )
            rows.append(result.routing)
    return sum(row["expert_load_max"] for row in rows[-last:]) / last
