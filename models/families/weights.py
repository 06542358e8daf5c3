"""How the tensors of a family's files become ours and ours theirs: slices, transposes and stacks, no arithmetic.

Imports torch only where it is needed, so that reading a config does not.

Shapes: E expert; the last two dimensions of a matrix are its outputs and its inputs, or the other way where transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
LEAVES = ("", ".weight", ".bias")


class Joined(NamedTuple):
    """Tensors of ours that are one of theirs, side by side along its last dimension."""

    parts: tuple[str, ...]
    transposed: bool = True
    """Whether their matrices have inputs before outputs. Vectors stay."""
    interleaved: bool = False
    """Whether columns alternate between the parts: first of the first part, first of the second, and so on."""


Rule = str | Joined


@dataclass(frozen=True)
class Piece:
    """One of our tensors by name (a parameter or a buffer), or what it holds of one expert."""

    name: str
    index: int | None = None


class Export(NamedTuple):
    """One tensor of theirs, from ours."""

    name: str
    shape: Shape
    reads: tuple[Piece, ...]
    build: Callable[[list[Tensor]], Tensor]
    """Given what it reads, in that order; the type stays, and the result may share memory with it."""


class Import(NamedTuple):
    """One tensor of ours, from theirs."""

    name: str
    shape: Shape
    reads: tuple[str, ...]
    build: Callable[[list[Tensor]], Tensor]


def our_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter and buffer of the model and its shape; nothing is allocated."""
    import torch

    from models.transformer import Transformer

    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()}


def exports(rules: Mapping[str, Rule], config: ModelConfig) -> list[Export]:
    """All tensors of theirs. `rules`: their names to ours, both without `.weight` and `.bias`, `{e}` for an expert."""
    shapes, found = our_shapes(config), []
    for theirs, ours, how in _matches(rules, shapes):
        shape = shapes[ours[0]]
        if "{e}" in theirs:
            found += [Export(theirs.format(e=e), shape[1:], (Piece(ours[0], e),), _only) for e in range(shape[0])]
            continue
        if _swaps(how, shape):
            shape = (*shape[:-2], shape[-1], shape[-2])
        shape = (*shape[:-1], shape[-1] * len(ours))
        found.append(Export(theirs, shape, tuple(map(Piece, ours)), _only if how is None else partial(_join, how)))
    return found


def imports(rules: Mapping[str, Rule], config: ModelConfig) -> list[Import]:
    """All tensors of ours."""
    shapes, found = our_shapes(config), []
    for theirs, ours, how in _matches(rules, shapes):
        for k, name in enumerate(ours):
            if "{e}" in theirs:
                reads = tuple(theirs.format(e=e) for e in range(shapes[name][0]))
                found.append(Import(name, shapes[name], reads, _stack))
            else:
                build = _only if how is None else partial(_take, how, k)
                found.append(Import(name, shapes[name], (theirs,), build))
    return found


def _matches(rules: Mapping[str, Rule], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, list[str], Joined | None]]:
    """Each of their tensors with ours, for the rules whose tensors the model has."""
    left = set(shapes)
    for theirs, rule in rules.items():
        how = rule if isinstance(rule, Joined) else None
        for leaf in LEAVES:
            ours = [part + leaf for part in ([rule] if isinstance(rule, str) else rule.parts)]
            if left.issuperset(ours):
                left.difference_update(ours)
                yield theirs + leaf, ours, how
    if left:
        raise ValueError(f"a family without a name for {sorted(left)}: not the one of this config")


def within(prefix: str, rule: Rule) -> Rule:
    """The rule for what stands behind a prefix on our side."""
    if isinstance(rule, str):
        return prefix + rule
    return rule._replace(parts=tuple(prefix + part for part in rule.parts))


def _swaps(how: Joined | None, shape: Shape) -> bool:
    return how is not None and how.transposed and len(shape) > 1


def _only(tensors: list[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor


def _stack(tensors: list[Tensor]) -> Tensor:
    import torch

    return torch.stack(tensors)


def _join(how: Joined, tensors: list[Tensor]) -> Tensor:
    import torch

    parts = [tensor.mT if _swaps(how, tuple(tensor.shape)) else tensor for tensor in tensors]
    return torch.stack(parts, dim=-1).flatten(-2) if how.interleaved else torch.cat(parts, dim=-1)


def _take(how: Joined, k: int, tensors: list[Tensor]) -> Tensor:
    (tensor,), n = tensors, len(how.parts)
    part = tensor[..., k::n] if how.interleaved else tensor.chunk(n, dim=-1)[k]
    return (part.mT if _swaps(how, tuple(tensor.shape)) else part).contiguous()
