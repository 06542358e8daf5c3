"""Jobs on a SLURM cluster. Nothing here imports torch; `job`, which is a job's script, needs only what Python has."""
