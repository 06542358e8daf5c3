#!/bin/bash
@@sbatch@@
# Rendered by `gramian slurm submit` from slurm/job.sh. `sbatch` of this file submits the same job again.
# What stands between two @ signs in the template is filled in; copy it and name the copy as `template` in a cluster
# file to change anything else.
# Values stand in single quotes, so that they stay what they are, and files that are sourced are the site's own.
# shellcheck disable=SC2016,SC1091
set -u

# Paths in the config are relative to where the job was submitted.
cd -- @@directory@@ || exit 2

# From the cluster file: modules, environments, variables.
@@setup@@

# The code as it was when the job was submitted. -P keeps modules of the working directory out of the way.
submission=@@submission@@
python=@@python@@
export PYTHONPATH="$submission/code${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1

run=@@run@@
words=(train @@words@@)
@@elements@@

# One task a node starts that node's processes, or each task is one. srun does not take --cpus-per-task from sbatch in
# every version.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-}"
[ -n "$SRUN_CPUS_PER_TASK" ] || unset SRUN_CPUS_PER_TASK
srun=(srun @@srun@@)

# The first node's part: it starts the step, and asks SLURM to begin anew where that goes on with the run.
exec @@host_python@@ -P -m launch.slurm.job --run "$run" --submission "$submission" --max-requeues @@max_requeues@@ -- \
    "${srun[@]}" @@inside@@ "$python" -P -m gramian "${words[@]}"
