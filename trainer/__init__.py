"""The training loop, its engines, meshes, checkpoints and metrics."""
