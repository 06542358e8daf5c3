"""Learning rates from one width to another: the maximal update parametrization. Imports no torch."""

from __future__ import annotations

from typing import Any

from common.errors import UserError
from trainer.config import TrainingConfig

# Steps of these have elements of a size that no width changes, so that a step's spectral norm grows with the width
# (Yang et al. 2022, table 3). Muon's have a spectral norm that does not; under scale: rms it grows with the root of the
# width (Yang et al. 2023).
_ELEMENTWISE = ("adamw", "adam", "adagrad", "rmsprop", "soap")


def transferred(config: TrainingConfig, base_width: int, heads_grow: bool = False) -> dict[str, Any]:
    """Keys that make a config of any width follow that of `base_width`.

    Initial values are the model's (`model.mup_base_width`): hidden matrices by 1 / sqrt(width), head and routers by
    1 / width, embeddings not at all. Learning rates, where AdamW makes the steps: hidden matrices, head and routers by
    1 / width; embeddings and vectors not at all.

    Args:
        heads_grow: that the family has a number of heads and not their width. Scores, whose queries and keys come to
            agree, then are divided by the width of a head and not by its root (definition 4.1).

    Raises:
        UserError: an optimizer without such a rule, a head that shares the embedding's matrix.
    """
    if config.model.tie_embeddings:
        raise UserError(
            "'lr.transfer: mup' needs a head that scales with the width and an embedding that does not; "
            "set model.tie_embeddings to false in 'overrides'"
        )
    ratio, optim = base_width / config.model.d_model, config.optim
    if optim.name in _ELEMENTWISE:
        hidden = ratio
    elif optim.name == "muon":
        hidden = ratio**0.5 if optim.resolved()["scale"] == "rms" else 1.0
    else:
        raise UserError(
            f"'lr.transfer: mup' has no rule for optim.name {optim.name}; choose {', '.join(_ELEMENTWISE)} or muon, "
            f"or lr.transfer: none"
        )
    scales = {"hidden_matrix": hidden, "expert_matrix": hidden, "head": ratio, "router": ratio}
    given = {role: optim.lr_scale_of(role) for role in scales}
    roles = {f"optim.roles.{role}.lr_scale": given[role] * scale for role, scale in scales.items()}
    # The root of a head's width at the base over that width here.
    scores = {"model.attention_scale": (ratio / config.model.d_head) ** 0.5} if heads_grow else {}
    return {"model.mup_base_width": base_width, **scores, **roles}
