#!/usr/bin/env bash
# A training run on GPU nodes under Slurm, with one process per GPU. When it is told to stop or runs out of time, it
# saves a checkpoint and queues itself again. First the nodes are examined, unless DOCTOR=0, and if something is wrong,
# the job ends.
#
#   sbatch --nodes=2 launch/slurm.sh --config=configs/large.py --workdir=/shared/runs/large
#
#SBATCH --job-name=diffeqformer
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

set -uo pipefail
[[ $# -gt 0 ]] || {
  echo "launch/slurm.sh: give the options of diffeqformer.main, for example --config=configs/large.py" >&2
  exit 1
}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu} # without GPUs, a run fails, and doesn't go on for days on the host
on_all() { # srun does not inherit --cpus-per-task from the job
  srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 .venv/bin/python -m "$@"
}
{ [[ ${DOCTOR-1} == 0 ]] || on_all diffeqformer.doctor --undefok=verify "$@"; } && on_all diffeqformer.main "$@"
status=$?
if [[ $status =~ ^(138|140|143)$ ]]; then # by USR1, USR2 or TERM; no effect if Slurm has requeued a preempted job
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
