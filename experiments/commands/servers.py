"""``make retriever`` and ``make engine``: serve an experiment's search index or its engine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from common.secret import SECRET_VARIABLE, is_local, read_secret
from experiments.commands.command import answers, builds_index, command, make_graph, option, require_free_port, serve
from experiments.commands.models import rollouts_of
from experiments.launch import runner
from experiments.launch.shared_secret import FILE, share_secret
from experiments.registry.errors import ExperimentError
from experiments.registry.machine import ISA_VARIABLE, device_of, onednn_isa
from experiments.registry.project import ROOT
from experiments.stages.context import RunContext
from experiments.stages.graph import closure
from rollout.engines.vllm_servers.flags import LORA_RANKS, serve_command

VLLM_ENGINE = "rollout.engines.vllm_engine.VLLMEngine"
# Passed on to the search server
SERVER_OPTIONS = (
    "topk", "host", "threads", "device", "encoder", "corpus", "k1", "b", "java-heap", "announce", "ef-search", "probes",
    "backend", "secret-file",
)  # fmt: skip


@command(
    "retriever",
    "serve the search index that an experiment depends on",
    option("--index", help="index folder; default: the experiment's"),
    option("--port", type=int, default=8000),
    *(option(f"--{name}", help="see `python -m retrieval.server --help`") for name in SERVER_OPTIONS),
    option("--gpu", action="store_true", help="exact vectors on all GPUs, as 16-bit floats"),
)
def retriever(args: argparse.Namespace, context: RunContext) -> None:
    """Serve the search index that an experiment depends on, in the foreground."""
    require_free_port(args.port, context.command("retriever", PORT=args.port + 1))
    searched = args.backend or args.index
    if searched is None:
        graph = make_graph(context)
        stages = [stage for stage in closure([graph.target()]) if builds_index(stage)]
        if not stages:
            name_one = context.command("retriever", INDEX="FOLDER")
            raise ExperimentError(f"'{context.target}' builds no index; give one: {name_one}")
        searched = str(runner.folder_of(context, stages[0]) / "index")
        if args.threads is None:  # as it was built
            args.threads = str(stages[0].config["task"]["init_args"].get("threads", 1))
    index = [] if args.backend else ["--index", searched]
    share_with_machines(args, context)
    command = [sys.executable, "-m", "retrieval.server", *index, "--port", str(args.port)]
    where = f"http://{args.host or '127.0.0.1'}:{args.port}"
    print(f"search over {searched}: POST {where}/retrieve (Ctrl-C ends it)", flush=True)
    serve([*command, *server_options(args)], "search server", context)


def server_options(args: argparse.Namespace) -> list[str]:
    """Return the search server's command-line arguments: the options that the user gave. ``retrieval.server`` checks
    them."""
    given = {name: getattr(args, name.replace("-", "_")) for name in SERVER_OPTIONS}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    return [*words, "--gpu"] if args.gpu else words


def share_with_machines(args: argparse.Namespace, context: RunContext) -> None:
    """Give a server the secret of the output folder if other machines can reach it and no secret file is given."""
    if args.secret_file is None and not is_local(args.host or "127.0.0.1"):
        given = os.environ.get(SECRET_VARIABLE)
        share_secret(context.project.outputs)
        kept = context.project.relative(context.project.outputs / FILE)
        what = (
            f"the same {SECRET_VARIABLE}"
            if given
            else f"{SECRET_VARIABLE} from {kept}, as runs with these outputs have"
        )
        print(f"clients must have {what}", flush=True)


@command(
    "engine-server",
    "serve the engine that an experiment configures, by `vllm serve`",
    option("--checkpoint", help="folder of a model of the same shape; default: the model in the YAML"),
    option("--host", default="127.0.0.1", help="0.0.0.0 to serve other machines; needs a secret"),
    option("--port", type=int, default=8100),
    option("--secret-file", help="file with the secret that clients must send"),
    option("--transport", choices=("files", "nccl"), default="files", help="how trainers send weights"),
    option("--lora-rank", type=int, default=0, choices=(0, *LORA_RANKS), help="largest rank of adapters, if pushed"),
    option("--flags", default="", help="further flags of `vllm serve`, in one word: --flags='--data-parallel-size 4'"),
    option("--dry", action="store_true", help="print the command only"),
)
def engine_server(args: argparse.Namespace, context: RunContext) -> None:
    """Serve an experiment's model by ``vllm serve`` in the foreground, and print the command."""
    target = make_graph(context).target()
    engine = rollouts_of(target.config)["init_args"]["engine"]
    if engine["class_path"] != VLLM_ENGINE:
        raise ExperimentError(
            f"'{context.target}' has the engine {engine['class_path']}; `vllm serve` can stand for {VLLM_ENGINE} alone"
        )
    options = dict(engine["init_args"])
    if args.checkpoint is not None:
        options["model"] = args.checkpoint
    on_cpu = device_of(target.config.get("trainer", {}).get("accelerator")) == "cpu"
    try:
        command, environment = serve_command(
            options, args.port, args.host, on_cpu, args.transport, args.lora_rank, shlex.split(args.flags)
        )
    except ValueError as error:
        raise ExperimentError(str(error)) from None
    if on_cpu:
        environment[ISA_VARIABLE] = os.environ.get(ISA_VARIABLE) or onednn_isa()  # as in stages
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    said = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    if not is_local(args.host):
        said.insert(0, f'{SECRET_VARIABLE}="${{{SECRET_VARIABLE}:?}}"')
    line = " ".join([*said, shlex.join(["vllm", *command[command.index("serve") :]])])
    if args.dry:
        return print(line)
    require_free_port(args.port, context.command("engine", PORT=args.port + 1))
    for upstream in target.upstream if args.checkpoint is None else ():
        runner.folder_of(context, upstream)  # the model's stage, made by train
    runner.require_unaltered(context.project.root / str(options.get("model", "")))
    print(line, flush=True)
    share_with_machines(args, context)
    if args.secret_file is not None:
        environment[SECRET_VARIABLE] = _secret_of(Path(args.secret_file))
    words = f"vLLM serves {options['model']} at http://{args.host}:{args.port} (Ctrl-C ends it)\n"
    serve(command, "vLLM server", context, os.environ | environment, lambda: answers(args.port, args.host), words)


def _secret_of(file: Path) -> str:
    try:
        return read_secret(file)
    except (ValueError, OSError) as error:
        raise ExperimentError(f"--secret-file: {error}") from None
