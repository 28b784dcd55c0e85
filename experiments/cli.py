"""The command line.

Exit codes: 0 well, 1 a stage failed, 2 something in the command or in a file is wrong, 75 stopped by SIGUSR1 after a
checkpoint, 130 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments import commands, download
from experiments.compose import SECTIONS
from experiments.errors import ExperimentError
from experiments.launch import overrides_of
from experiments.overrides import STAGE_PREFIX
from experiments.project import Project
from experiments.request import Request, StageFailed
from experiments.stage import explain

OVERRIDE_WORDS = {*SECTIONS, "config", STAGE_PREFIX}

Command = Callable[[argparse.Namespace, Request], None]


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and Lightning CLI overrides (``--model.x 1``, ``--trainer.max_steps=3``, ``--config f``)."""
    ours: list[str] = []
    theirs: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        head = word[2:].partition("=")[0] if word.startswith("--") else ""
        if "." not in head and head.rstrip("+") not in OVERRIDE_WORDS:
            ours.append(word)
            continue
        theirs.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            theirs.append(rest.pop(0))
    return ours, theirs


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__, allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Command, help: str, *, experiment: bool = True, overrides: bool = True):
        sub = subparsers.add_parser(name, help=help, description=help, allow_abbrev=False)
        if experiment:
            sub.add_argument("name", help="experiment, as listed by `make experiments`")
            sub.add_argument("--seed", type=int, help="seed_everything of all stages without fixed_seed")
        sub.set_defaults(run=run, takes_overrides=overrides, name_given=experiment)
        return sub

    add("list", commands.list_experiments, "list the experiments", experiment=False, overrides=False)
    train = add("train", commands.train, "make an experiment and all its stages, then show the results")
    resume_help = "continue an interrupted stage: the default, but with a word when there is none"
    train.add_argument("--resume", choices=["last"], help=resume_help)
    train.add_argument("--fresh", action="store_true", help="make the experiment's own stage anew, even if it is done")
    add_launch_options(train)
    add("dry-run", commands.dry_run, "print the resolved configuration and validate it; loads no model")
    check = add("validate", commands.validate, "validate the stages that `train` would run, quietly")
    check.add_argument("--fresh", action="store_true")
    check.add_argument("--elsewhere", action="store_true", help="for another machine: this one's devices do not matter")
    add("status", commands.status, "which stages of an experiment are done, and where they lie")
    add_size_options(add("size", commands.size, "GPU memory by component and the roofline's speeds; loads nothing"))
    evaluate = add("evaluate", commands.evaluate, "test a checkpoint or model folder as the experiment does")
    evaluate.add_argument("--checkpoint", help="a .ckpt of this experiment or a model folder; default: its result")
    ask = add("ask", commands.ask, "put a question to a trained model and watch it search")
    ask.add_argument("--question", help="without it, questions are read from the terminal")
    ask.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    export = add("export", commands.export, "an experiment's model, or any checkpoint of it, as a Hugging Face folder")
    export.add_argument("--to", help="target folder; default: exports/NAME")
    which = "last or best (the experiment's own, done or not), a .ckpt (file or DeepSpeed folder) or a model folder"
    export.add_argument("--checkpoint", help=f"{which}; default: its result")
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as the weights are")
    add("download", download.download, "fetch the weights and data an experiment needs from the Hugging Face hub")
    reproduce = add("reproduce", commands.reproduce, "several seeds of an experiment and its ablations, then a report")
    reproduce.add_argument("--seeds", default="0,1,2", help="comma-separated")
    reproduce.add_argument("--ablation-seeds", help="seeds of the ablations, some of --seeds; default: all of them")
    about = "a table of runs and a page with curves"
    compare = add("compare", commands.compare, about, experiment=False, overrides=False)
    compare.add_argument("names", nargs="*", help="only these experiments")
    ui = add("ui", commands.ui, "open the runs in MLflow", experiment=False, overrides=False)
    ui.add_argument("--port", type=int, default=5000)
    serve = add("retriever", commands.retriever, "serve the search index that an experiment stands on")
    serve.add_argument("--index", help="index folder; default: the one the experiment has built")
    serve.add_argument("--port", type=int, default=8000)
    for option in commands.SERVER_OPTIONS:
        serve.add_argument(f"--{option}", help="as `python -m retrieval.server` takes it")
    serve.add_argument("--gpu", action="store_true", help="exact vectors on all GPUs, as 16-bit floats")
    engine = add("engine-server", commands.engine_server, "serve the engine that an experiment configures, over HTTP")
    engine.add_argument("--checkpoint", help="folder of a model of the same shapes; default: the one the YAML names")
    engine.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to serve other machines (there is no password)")
    engine.add_argument("--port", type=int, default=8100)
    engine.add_argument("--staging", help="folder for weights on their way, with room for the model; default: /tmp")
    clean = add("clean", commands.clean, "remove unfinished stages", experiment=False, overrides=False)
    clean.add_argument("--all", action="store_true", help="remove everything under outputs/")
    stage = add("stage", commands.run_stage, "run one prepared stage folder", experiment=False, overrides=False)
    stage.add_argument("folder", type=Path)
    stage.add_argument("--resume", action="store_true")
    return parser


def add_launch_options(train: argparse.ArgumentParser) -> None:
    how = "torchrun: start the ranks with it, on every node that runs this command; slurm: write a job and submit it"
    train.add_argument("--launch", choices=["torchrun", "slurm"], help=how)
    train.add_argument("--nodes", type=int, metavar="N", help="as --trainer.num_nodes N")
    train.add_argument("--processes", type=int, metavar="N", help="ranks per node; as --trainer.devices N")
    train.add_argument("--node-rank", type=int, metavar="R", help="this node's number; default: NODE_RANK, or 0")
    train.add_argument("--master-addr", metavar="HOST", help="node 0; default: MASTER_ADDR")
    train.add_argument("--master-port", type=int, metavar="P", help="of node 0; default: MASTER_PORT, or 29400")
    train.add_argument("--sbatch", help="further options of the job, as '--partition=gpu --time=24:00:00'")


def add_size_options(size: argparse.ArgumentParser) -> None:
    size.add_argument("--gpus", default="1,8,16", help="comma-separated")
    size.add_argument("--gpu", default="h100", help="a100, h100, h200, l40s or 4090")
    size.add_argument("--markdown", action="store_true", help="a table for a page")


def main(argv: Sequence[str]) -> int:
    ours, overrides = split_overrides(argv)
    parser = build_parser()
    args = parser.parse_args(ours)
    if overrides and not args.takes_overrides:
        parser.error(f"'{args.command}' takes no overrides, found {overrides[0]}")
    if args.command == "stage":
        return commands.run_stage(args)
    request = Request(
        project=Project.from_environment(),
        target=args.name if args.name_given else "",
        arguments=(*(overrides_of(args) if args.command == "train" else ()), *overrides),
        seed=getattr(args, "seed", None),
        fresh=getattr(args, "fresh", False),
        resume=getattr(args, "resume", None) is not None,
    )
    try:
        args.run(args, request)
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StageFailed as error:
        if str(error):
            print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at exit
        return 0
    except OSError as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 1
    return 0
