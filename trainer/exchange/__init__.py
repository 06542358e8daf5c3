"""Checkpoints as Hugging Face folders, and back; weights for a new run from either."""
