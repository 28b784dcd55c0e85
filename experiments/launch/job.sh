#!/bin/bash
@DIRECTIVES@
# A job of Compact Agents (experiments/launch/slurm.py): every node runs `make train LAUNCH=torchrun`.

cd @ROOT@ || exit 1
export COMPACT_AGENTS_OUTPUTS=@OUTPUTS@ COMPACT_AGENTS_EXPERIMENTS=@EXPERIMENTS@
export COMPACT_AGENTS_AGAIN=@AGAIN@
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# Afresh once: a job that was queued again continues from its checkpoint.
FRESH=$([ "${SLURM_RESTART_COUNT:-0}" = 0 ] && echo @FRESH@)
export FRESH

# One task per node, which starts the ranks of its node by torchrun.
srun --kill-on-bad-exit=1 bash -c @TASK@ &
step=$!

warned=0
warn() {
    echo "signal before the time limit: saving, then queueing again"
    warned=1
    kill -USR1 "$step" 2>/dev/null
}
trap warn USR1
trap 'kill -TERM "$step" 2>/dev/null' TERM

wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # the trap has ended the wait, not the step
    wait "$step"
    code=$?
done

if [ "$warned" = 1 ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
