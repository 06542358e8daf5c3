"""Scaling laws: designs of sweeps, records of runs, fits with intervals, predictions. Starts no run."""
