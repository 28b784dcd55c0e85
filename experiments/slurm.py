"""``LAUNCH=slurm``: a job file in the outputs of the experiment, submitted with sbatch.

One task per node runs ``train --launch torchrun``: on the first node it makes all stages, on the others it helps
(``nodes.py``). Some minutes before the time limit Slurm signals the batch shell, which passes the signal on: the
training saves after its iteration and ends, and the job is queued again and goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from experiments import runner
from experiments.errors import ExperimentError
from experiments.graph import Graph, Stage, closure
from experiments.launch import Ranks
from experiments.request import Request, StageFailed
from rollout.files import write_atomically

WARNING_S = 600  # before the time limit; an iteration should end within it
AGAIN_VARIABLE = "COMPACT_AGENTS_AGAIN"  # in a job: the command that submits another which goes on
GPU_ACCELERATORS = ("cuda", "gpu")

SCRIPT = """\
#!/bin/bash
{directives}

cd {root} || exit 1
export COMPACT_AGENTS_OUTPUTS={outputs}
export {again_variable}={again}
{exports}MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# One task per node, which starts the ranks of its node by torchrun.
srun --kill-on-bad-exit=1 bash -c {task} &
step=$!

warned=0
warn() {{
    echo "signal before the time limit: saving, then queueing again"
    warned=1
    kill -USR1 "$step" 2>/dev/null
}}
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
"""


def submit(graph: Graph, request: Request, args: argparse.Namespace, ranks: Ranks) -> None:
    """Write the job file and hand it to sbatch; print the job's id, and how to watch and to cancel it.

    Raises:
        ExperimentError: something the user has to mend first, or there is no sbatch (the file is written all the same).
        StageFailed: sbatch has refused the job.
    """
    target = graph.target()
    plan = closure([target, *graph.compared(target)])
    todo = runner.to_make(plan, fresh=target if request.fresh else None)
    runner.print_plan(plan, todo, request)
    if not todo:
        print("  nothing to make, no job submitted (FRESH=1 makes the experiment's own stage anew)")
        return
    runner.require_needs(todo)
    runner.require_valid(request, elsewhere=True)
    folder = target.folder.with_name(f"{target.key}.slurm")
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "job.sh", folder / "%j.log"
    write_atomically(path, job_file(target, request, ranks, log, args.sbatch))
    print(f"  written {request.project.relative(path)}")
    by_hand = f"sbatch {shlex.quote(str(path))}"
    if shutil.which("sbatch") is None:
        raise ExperimentError(f"there is no sbatch on the PATH: submit it on a machine of the cluster, with: {by_hand}")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StageFailed(f"sbatch has refused the job: {done.stderr.strip() or done.stdout.strip()}", 1)
    job = done.stdout.strip().partition(";")[0]  # ";cluster" where there are several
    print(f"  submitted as job {job}: {ranks.nodes} x {ranks.processes} ranks")
    print(f"  watch:   squeue -j {job}; tail -F {shlex.quote(str(folder / f'{job}.log'))}")
    print(f"  cancel:  scancel {job}")


def job_file(target: Stage, request: Request, ranks: Ranks, log: Path, further: str | None) -> str:
    """The text of the job. Options in ``further`` come last, so that they win over those written here."""
    options = [
        f"--job-name={target.name}",
        f"--nodes={ranks.nodes}",
        "--ntasks-per-node=1",
        f"--output={log}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{WARNING_S}",
    ]
    if (target.config.get("trainer") or {}).get("accelerator") in GPU_ACCELERATORS:
        options.append(f"--gpus-per-node={ranks.processes}")
    try:
        options += shlex.split(further or "")
    except ValueError as error:
        raise ExperimentError(f"SBATCH: {error} in {further}") from None
    if wrong := [option for option in options if not option.startswith("-")]:
        raise ExperimentError(f"SBATCH: '{wrong[0]}' is no option; write them as --partition=gpu --time=24:00:00")
    words = [sys.executable, "-m", "experiments", "train", *request.flags(), "--launch", "torchrun"]
    # Afresh once: a job that was queued again goes on from its checkpoint.
    fresh = '$([ "${SLURM_RESTART_COUNT:-0}" = 0 ] && echo --fresh) ' if request.fresh else ""
    task = f'exec {shlex.join(words)} {fresh}--node-rank "$SLURM_NODEID"'
    sbatch = (f"SBATCH={shlex.quote(further)}",) if further else ()
    again = dataclasses.replace(request, variables=(*request.variables, *sbatch)).again()
    extra = ":".join(str(folder) for folder in request.project.experiment_dirs[:-1])
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH {option}" for option in options),
        root=shlex.quote(str(request.project.root)),
        outputs=shlex.quote(str(request.project.outputs)),
        again_variable=AGAIN_VARIABLE,
        again=shlex.quote(again),
        exports=f"export COMPACT_AGENTS_EXPERIMENTS={shlex.quote(extra)}\n" if extra else "",
        task=shlex.quote(task),
    )
