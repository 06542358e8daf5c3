"""The gradient norm and clipping (rule 5)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gang import Gang
from trainer.clip import global_norm
from trainer.loop import clip_scale

SHAPES = [(1000, 37), (3, 5), (7,), (1,), (2, 3, 4)]


def gradients() -> list[Tensor]:
    """Tensors of very different size, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator) * 10.0**-i for i, s in enumerate(SHAPES)]


def exact_norm() -> float:
    """By hand, in float64, on whole tensors."""
    return float(sum((g.double() ** 2).sum() for g in gradients())) ** 0.5


def norm_of_spread(replicate: int) -> float:
    """In a rank: the norm of gradients of which some are sharded, some copied, and one is a plain tensor."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from trainer.layout import Layout
    from trainer.mesh import build_mesh
    from trainer.runtime import start_runtime

    with start_runtime() as runtime:
        shard = runtime.world_size // replicate
        mesh = build_mesh(Layout("fsdp", replicate, shard, 1, 1, 1, 1, 1), "cpu")["dp_replicate", "dp_shard"]
        placements = [
            [Replicate(), Shard(0)],
            [Replicate(), Replicate()],
            [Replicate(), Shard(0)],
            [Shard(0), Shard(0)],
        ]
        spread = [distribute_tensor(g, mesh, p) for g, p in zip(gradients(), placements, strict=False)]
        return global_norm([*spread, gradients()[-1]])


@pytest.mark.parametrize(("world", "replicate"), [(1, 1), (4, 1), (4, 2), (4, 4), (3, 1)])
def test_each_element_counts_once_and_all_ranks_agree(gang: Gang, world: int, replicate: int) -> None:
    """Uneven shards, empty shards, copies: float64 sums in another order, so 1e-12."""
    norms = gang.run(norm_of_spread, replicate, world=world)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(exact_norm(), rel=1e-12)


def test_sums_are_in_float64() -> None:
    """Two million equal numbers: fp32 accumulation on the CPU is off by 1e-6 or more, float64 is right to 1e-10."""
    gradient = torch.full((2_000_003,), 0.1)
    exact = float(gradient[0].double()) * 2_000_003**0.5
    assert global_norm([gradient]) == pytest.approx(exact, rel=1e-10)
    assert float(torch.linalg.vector_norm(gradient)) != pytest.approx(exact, rel=1e-7)


def test_clip_scale_is_torchs_without_its_epsilon() -> None:
    """`torch.nn.utils.clip_grad_norm_` divides by the norm + 1e-6; ours brings the norm to the limit exactly."""
    norm = exact_norm()
    assert clip_scale(norm, None) == 1.0
    assert clip_scale(norm, norm) == 1.0
    assert clip_scale(norm, 2 * norm) == 1.0
    limit = norm / 3
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients()]
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_(parameters, limit)
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient * clip_scale(norm, limit), rtol=1e-6, atol=0)
