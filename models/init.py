"""Initial values as plain data. Nothing is drawn here: the trainer draws, by seed and parameter name (rule 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Init:
    """How one parameter starts: independent normal numbers of mean 0 and deviation `std`, or all zeros or ones."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0
