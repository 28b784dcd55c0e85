"""``make export``: exports a finished experiment's model or a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from callbacks.training.checkpoint_files import FOLDER, find_checkpoint
from common.files import obey_umask, write_atomically
from experiments.commands.command import command, make_graph, named, option
from experiments.commands.models import TRUST, find_model, is_model_folder
from experiments.launch import runner
from experiments.registry.errors import ExperimentError
from experiments.registry.files import Config, data_arguments, short
from experiments.stages.context import RunContext
from experiments.stages.graph import Stage
from experiments.stages.store import StageFolder

HUB = "hub:"
PROVENANCE = "provenance.yaml"
EXPORTED = ("*.safetensors", "*.safetensors.index.json", "*.jinja", "digests.sha256")  # what an export may leave out
OWN = ("last", "best")  # checkpoints of the experiment's stage
WHICH = "last or best (of the experiment, finished or not), a .ckpt (file or DeepSpeed folder) or a model folder"


@command(
    "export",
    "export an experiment's model or checkpoint as a Hugging Face folder",
    option("--checkpoint", help=f"{WHICH}; default: its final model"),
    TRUST,
    option("--to", help="target folder, or hub:owner/name for the Hugging Face hub; default: exports/NAME"),
    option("--public", action="store_true", help="make the hub's repository public; default: private"),
    option("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the weights' own type"),
)
def export(args: argparse.Namespace, context: RunContext) -> None:
    """Export an experiment's model as a Hugging Face folder, with a model card and ``provenance.yaml``, or to the hub,
    without the latter, which has paths of this machine. The last printed line is a command that serves the model.

    Raises:
        ExperimentError: no model to export, a target folder that is not empty, a checkpoint that is incomplete or of
            another experiment, or a hub that refuses.
    """
    if not (args.to or "").startswith(HUB):
        if args.public:
            raise ExperimentError("--public is for the hub; name a repository: --to hub:owner/name")
        target = Path(args.to) if args.to else context.project.root / "exports" / context.target
        path, serve = export_folder(args, context, target, context.project.relative(target))
        print(f"exported {context.project.relative(path.absolute())} to {target}, which transformers and vLLM load")
    else:
        repository = hub_repository(args.to)
        find_weights(make_graph(context).target(), context, args.checkpoint, args.trust)
        make_repository(repository, private=not args.public)
        with tempfile.TemporaryDirectory(dir=context.project.root) as folder:
            target = Path(folder) / "model"
            _, serve = export_folder(args, context, target, repository)
            upload(repository, target)
        print(f"uploaded to {repository} ({'public' if args.public else 'private'})")
    print(f"  to serve it: {serve}")


def hub_repository(to: str) -> str:
    """Return owner/name of ``hub:owner/name``. Raises ExperimentError for another form, or without a token of the
    hub."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    repository = to.removeprefix(HUB)
    try:
        validate_repo_id(repository)
        named = repository.count("/") == 1
    except HFValidationError:
        named = False
    if not named:
        raise ExperimentError(f"--to {to}: expected hub:owner/name")
    if get_token() is None:
        raise ExperimentError(f"--to {to}: found no token of the hub; run `hf auth login`, or set HF_TOKEN")
    return repository


def make_repository(repository: str, private: bool) -> None:
    """Make the repository on the hub, unless it is there: a token that may not write is known before the export."""
    from huggingface_hub import HfApi

    with hub_faults(f"--to {HUB}{repository}: the hub does not take it"):
        HfApi().create_repo(repository, private=private, exist_ok=True)


def upload(repository: str, folder: Path) -> None:
    """Upload an exported folder to the hub. Files of an earlier export that would be loaded with it are deleted."""
    from huggingface_hub import HfApi

    api, message = HfApi(), f"Export by compact-agents {importlib.metadata.version('compact-agents')}"
    with hub_faults(f"--to {HUB}{repository}: the upload failed"):
        there = api.list_repo_files(repository)
        earlier = [name for name in there if "/" not in name and any(fnmatch(name, pattern) for pattern in EXPORTED)]
        earlier += [name for name in there if name.startswith("adapter/")]
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, ignore_patterns=[PROVENANCE],
            delete_patterns=earlier or None,
        )  # fmt: skip


@contextmanager
def hub_faults(what: str) -> Iterator[None]:
    """Context manager that raises a refusal of the hub, or a lost connection, as ExperimentError."""
    import httpx2  # of huggingface_hub

    try:
        yield
    except (httpx2.HTTPError, OSError, RuntimeError) as error:
        said = getattr(error, "server_message", None)
        raise ExperimentError(f"{what}: {short(error)}{f': {said}' if said else ''}") from None


def export_folder(args: argparse.Namespace, context: RunContext, target: Path, called: str) -> tuple[Path, str]:
    """Export the model to an empty or new folder. Returns the path of its weights, and the command that serves it.

    Args:
        called: the folder's path, or the hub's repository, in that command and in the model card.
    """
    from callbacks.model_export.serving import TEMPLATE, serve_command

    stage = make_graph(context).target()
    context = named(context, "export", CKPT=args.checkpoint, TRUST=1 if args.trust else None, DTYPE=args.dtype)
    path = find_weights(stage, context, args.checkpoint, args.trust)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        other = context.command(TO=f"{target}-2")
        raise ExperimentError(f"{target} exists and is not empty; remove it, or choose another folder: {other}")
    if is_model_folder(path) and args.dtype is None:
        runner.require_unaltered(path)
        shutil.copytree(path, target, dirs_exist_ok=True)
        obey_umask(target)
    else:
        merge(path, target, str(path) if is_model_folder(path) else source_of(path, stage, context), args.dtype)
    folder = stage_folder_of(path)
    result = (StageFolder(folder).result() or {}) if folder else {}
    origin = {"experiment": context.target, "weights": str(path.resolve()), "folder": str(folder or "")}
    origin |= {"dtype": args.dtype} | result
    write_atomically(target / PROVENANCE, yaml.safe_dump(origin, sort_keys=False))
    config = yaml.safe_load((folder / "config.yaml").read_text()) if folder else stage.config
    on_hub = (args.to or "").startswith(HUB)
    flags = flags_of(config, target, "." if on_hub else called)
    # vLLM reads a template from a local path alone, also for a model on the hub.
    fetch = f"hf download {called} {TEMPLATE} --local-dir . && " if on_hub and "--chat-template" in flags else ""
    card = card_of(path, folder, config, result, args.dtype, fetch + serve_command(called, flags))
    write_atomically(target / "README.md", card)
    program = context.project.relative(Path(sys.executable).with_name("vllm"))
    if "cpu" in importlib.metadata.version("vllm"):  # its defaults compile, and need 92 % of the host's memory
        flags += ["--enforce-eager", "--gpu-memory-utilization", "0.5"]
    return path, fetch + serve_command(called, flags, program)


def find_weights(stage: Stage, context: RunContext, checkpoint: str | None, trust: bool) -> Path:
    """Return the path of the model folder or checkpoint to export. Raises ExperimentError if it does not exist."""
    store = StageFolder(stage.folder)
    if checkpoint in OWN:
        if (path := find_checkpoint(stage.folder, checkpoint)) is None:
            folder = context.project.relative(stage.folder / FOLDER)
            raise ExperimentError(f"'{stage.name}' has no {checkpoint} checkpoint in {folder}")
        return path
    if checkpoint is not None:
        return find_model(context, checkpoint, trust)
    if store.result() is None and store.checkpoint is not None:
        raise ExperimentError(
            f"'{stage.name}' is not finished; export its last checkpoint instead: {context.command(CKPT='last')}"
        )
    path = runner.folder_of(context, stage) / "model"
    if not path.is_dir():
        raise ExperimentError(f"'{context.target}' makes no model: {context.project.relative(path)} does not exist")
    return path


def merge(path: Path, target: Path, source: str, dtype: str | None) -> None:
    import torch

    from callbacks.model_export.checkpoints import export_checkpoint

    try:
        export_checkpoint(path, target, source, dtype=getattr(torch, dtype) if dtype else None)
    except ValueError as error:
        raise ExperimentError(str(error)) from None


def flags_of(config: Config, target: Path, called: str) -> list[str]:
    """Return the flags that make ``vllm serve`` use the prompt and tool-call format of training. Returns [] without
    rollouts."""
    from callbacks.model_export.serving import serve_flags, template_flags
    from experiments.stages.parser import instantiate

    given = ((data_arguments(config).get("rollouts") or {}).get("init_args") or {}).get("protocol")
    if not given:
        return []
    arguments = dict(given.get("init_args") or {})
    if not Path(str(arguments.get("tokenizer"))).is_dir():  # made on another machine
        arguments["tokenizer"] = str(target)
    try:
        protocol = instantiate({**given, "init_args": arguments}, "protocol")
        return serve_flags(protocol) + template_flags(protocol, target, called)
    except (ExperimentError, ValueError, TypeError, OSError, argparse.ArgumentError) as error:
        print(f"  note: no flags for tool calls, because the protocol cannot be loaded: {short(error)}")
        return []


def card_of(
    path: Path, folder: Path | None, config: Config, result: dict[str, Any], dtype: str | None, serve: str
) -> str:
    """Return the text of the exported model's card. It has scores only for the stage's final model, because no other
    checkpoint was tested."""
    from experiments.reports.model_card import model_card

    if folder is None or not is_model_folder(path) or not result:
        return model_card(config, result, None, serve, f"These weights ({path.resolve().name}) were not tested.")
    note = f"Tested before the weights were rounded to {dtype}." if dtype else ""
    return model_card(config, result, folder, serve, note)


def stage_folder_of(path: Path) -> Path | None:
    """Return the stage folder that contains a model (``STAGE/model``) or checkpoint (``STAGE/checkpoints/x.ckpt``), or
    None for other paths."""
    for parent in list(path.absolute().parents)[:2]:
        if (parent / "config.yaml").is_file() and (parent / "stage.json").is_file():
            return parent
    return None


def source_of(checkpoint: Path, stage: Stage, context: RunContext) -> str:
    """Return the model from which a checkpoint's training started, as a folder or owner/name. A checkpoint outside the
    outputs is assumed to belong to the experiment."""
    folder = stage_folder_of(checkpoint)
    config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text()) if folder else stage.config
    policy = ((config.get("model") or {}).get("init_args") or {}).get("policy")
    if not policy:
        raise ExperimentError(f"'{config['experiment']['name']}' has no model.policy, so its model is unknown; set it")
    local = context.project.root / policy
    return str(local) if local.exists() else policy
