#!/usr/bin/env bash
# One run on one machine or several: `sbatch --nodes=8 deploy/slurm.sh`, in the project, which lies on a common disk.
#SBATCH --job-name=ratchet
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export place="$head:$((20000 + SLURM_JOB_ID % 10000))"

# The first machine trains in the project itself; each other one in a copy of its own, which stays for the next time.
# ($ is for the shell of each machine.)
code=0
# shellcheck disable=SC2016
srun --kill-on-bad-exit=0 bash -euo pipefail -c '
  if ((SLURM_PROCID > 0)); then
    copy=.nodes/$SLURM_PROCID && mkdir -p "$copy" && echo "*" > .nodes/.gitignore
    cp -au --parents params.yaml dvc.yaml data experiments/base experiments/data experiments/champion.json "$copy"
    cd "$copy"
  fi
  if ((SLURM_NNODES > 1)); then exec ratchet train --nodes "$SLURM_NNODES" --rendezvous "$place"; fi
  exec ratchet train
' || code=$?
# Stopped on request (the time is up, or others need the machines): everything is sealed; go on when there is room.
if ((code == 75)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
