"""Writes a Slurm job (``job.sh``) into the outputs of the experiment, and submits it (``LAUNCH=slurm``).

One task per node runs ``train --launch torchrun`` (``nodes.py``). Some minutes before the time limit Slurm signals the
batch shell, which passes the signal on. The training saves a checkpoint after its iteration and ends. Then the job is
queued again and continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from common.files import write_atomically
from common.run_folder import outside_environment
from experiments.launch import runner
from experiments.launch.fork_server import ForkServer
from experiments.registry.errors import ExperimentError
from experiments.registry.hardware import GPU_NAMES, Ranks
from experiments.stages.context import RunContext, StageFailed
from experiments.stages.graph import Graph, Stage

WARNING_S = 600  # before the time limit; one iteration should fit in
TEMPLATE = Path(__file__).with_name("job.sh")


def submit(graph: Graph, context: RunContext, args: argparse.Namespace, ranks: Ranks) -> None:
    """Write a Slurm job file for an experiment and submit it. Prints the job's id, and how to watch and cancel the job.

    Raises:
        ExperimentError: the user has to fix something first, or sbatch is missing (the file is written).
        StageFailed: sbatch has refused the job.
    """
    target = graph.target()
    if args.sbatch:
        context = dataclasses.replace(context, variables=(*context.variables, f"SBATCH={args.sbatch}"))
    plan = graph.plan(compare=context.compare)
    todo = runner.to_make(plan, fresh=target if context.fresh else None)
    runner.print_plan(graph, todo, context)
    if not todo:
        print(f"  nothing to make, no job submitted; from the beginning: {context.command(FRESH=1)}")
        return
    runner.require_needs(todo)
    runner.require_valid(context, ForkServer(), elsewhere=True)
    folder = target.folder.with_name(f"{target.key}.slurm")
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "job.sh", folder / "%j.log"
    write_atomically(path, job_file(target, context, ranks, log, args.sbatch))
    print(f"  written {context.project.relative(path)}")
    by_hand = f"sbatch {shlex.quote(str(path))}"
    if shutil.which("sbatch") is None:
        raise ExperimentError(f"no sbatch on the PATH; submit the job on a machine of the cluster with: {by_hand}")
    sbatch = ["sbatch", "--parsable", str(path)]
    done = subprocess.run(sbatch, capture_output=True, text=True, check=False, env=outside_environment())
    if done.returncode != 0:
        raise StageFailed(f"sbatch has refused the job: {done.stderr.strip() or done.stdout.strip()}", 1)
    job = done.stdout.strip().partition(";")[0]  # several clusters append ";cluster"
    print(f"  submitted as job {job}: {ranks.nodes} x {ranks.processes} ranks")
    print(f"  watch:   squeue -j {job}; tail -F {shlex.quote(str(folder / f'{job}.log'))}")
    print(f"  cancel:  scancel {job}")


def job_file(target: Stage, context: RunContext, ranks: Ranks, log: Path, extra: str | None) -> str:
    """Return the text of a Slurm job file for an experiment. Options in ``extra`` come last and override ours."""
    options = [
        f"--job-name={target.name}",
        f"--nodes={ranks.nodes}",
        "--ntasks-per-node=1",
        f"--output={log}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{WARNING_S}",
    ]
    if (target.config.get("trainer") or {}).get("accelerator") in GPU_NAMES:
        options.append(f"--gpus-per-node={ranks.processes}")
    try:
        options += shlex.split(extra or "")
    except ValueError as error:
        raise ExperimentError(f"SBATCH: {error} in {extra}") from None
    if wrong := [option for option in options if not option.startswith("-")]:
        raise ExperimentError(f"SBATCH: '{wrong[0]}' is not an option; expected --partition=gpu or the like")
    words = [sys.executable, "-m", "experiments", "train", *context.flags(), "--launch", "torchrun"]
    values = {
        "ROOT": str(context.project.root),
        "OUTPUTS": str(context.project.outputs),
        "EXPERIMENTS": ":".join(str(folder) for folder in context.project.experiment_dirs[:-1]),
        "AGAIN": context.resume_command(),
        "FRESH": "--fresh" if context.fresh else "",
        "TASK": f'exec {shlex.join(words)} $FRESH --node-rank "$SLURM_NODEID"',
    }
    text = TEMPLATE.read_text().replace(
        "@DIRECTIVES@", "\n".join(f"#SBATCH {shlex.quote(option)}" for option in options)
    )
    return re.sub("@([A-Z]+)@", lambda match: shlex.quote(values[match[1]]), text)
