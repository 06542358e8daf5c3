"""Device meshes (rule 2): data ranks are `dp_replicate x dp_shard`, and for experts `dp_replicate x efsdp x ep`."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.layout import Layout


def expert_mesh(mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """The same ranks for experts: `dp_shard` as `efsdp x ep`, where the `ep` ranks of a group follow one another."""
    return mesh._unflatten("dp_shard", (mesh["dp_shard"].size() // ep, ep), ("efsdp", "ep"))


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of all ranks with dimensions `dp_replicate` and `dp_shard`, replicas outermost."""
    return init_device_mesh(
        device_type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
