"""Device meshes (rule 2): ranks are `dp_replicate x dp_shard x tp`, and for experts `dp_replicate x efsdp x ep`."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.layout import Layout


def expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The same ranks for experts: `dp_replicate x efsdp x ep`, where the `ep` ranks of a group follow one another."""
    return init_device_mesh(
        device_type, (layout.dp_replicate, layout.efsdp, layout.ep), mesh_dim_names=("dp_replicate", "efsdp", "ep")
    )


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of all ranks: replicas outermost, and the `tp` ranks of a group one after another."""
    return init_device_mesh(
        device_type,
        (layout.dp_replicate, layout.dp_shard, layout.tp),
        mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
    )
