#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
# torchrun, one a node, without `gramian slurm submit`: for sites that have a way of their own. Submit it in the checkout:
#   sbatch slurm/torchrun.sh CONFIG key.path=value ...
# with --gpus-per-node=8 --cpus-per-task=64 and the like before the script. PROCESSES is the number on each node.
# The quoted words are for the shell on each node:
# shellcheck disable=SC2016
set -u

# Where the nodes meet: an address of the first one, and a port that is free there.
meeting=$(python -m launch.slurm.step) || exit 2

# torchrun itself dies of SIGUSR1 unless it is told to pass it on, and gives workers 30 seconds unless it is told more.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
srun --kill-on-bad-exit=1 bash -c '
    meeting=$1 && shift
    exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "${PROCESSES:-1}" \
        --master-addr "${meeting%:*}" --master-port "${meeting##*:}" \
        --signals-to-handle SIGTERM,SIGINT,SIGUSR1 -m launch.worker "$@"' torchrun "$meeting" "$@"
