"""Optimizers and schedules. They know tensors and DTensors, and no trainer."""
