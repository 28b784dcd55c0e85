"""``make download``: fetches the weights and data that an experiment needs."""

from __future__ import annotations

import argparse
import gzip
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from experiments.commands.command import COMPARE, command, make_graph, unique_needs
from experiments.registry.errors import ExperimentError
from experiments.stages.context import RunContext
from experiments.stages.graph import Need, unfinished


@command(
    "download",
    "fetch the weights and data an experiment needs from the Hugging Face hub",
    COMPARE,
)
def download(args: argparse.Namespace, context: RunContext) -> None:
    """Download the experiment's weights and data from the Hugging Face hub, and print how to get files that are not
    there."""
    needs = unique_needs(make_graph(context).plan(compare=context.compare))
    if not needs:
        print(f"'{context.target}' needs no download")
        return
    failed = []
    for need in needs:
        size = f"about {need.size_gb:g} GB" if need.size_gb else "size unknown"
        if need.present:
            print(f"  there   {need.path}")
        elif need.hub is None:
            print(f"  by hand {need.path}: {need.how}")
        else:
            print(f"  fetch   {need.path} from huggingface.co/{need.hub} ({size})", flush=True)
            problem = _fetch(need, need.hub, context.project.root)
            if problem:
                failed.append(f"{need.hub} -> {need.path}: {problem}")
    if failed:
        raise ExperimentError(
            "\n  ".join(["these could not be fetched:", *failed])
            + "\nCheck the network (proxy: HTTPS_PROXY; mirror: HF_ENDPOINT; gated models: HF_TOKEN) and run the "
            "command again; it continues where it stopped. Or put the files at the paths above by hand, and remove "
            ".NAME.fetching beside them."
        )


def _fetch(need: Need, hub: str, root: Path) -> str | None:
    """Download one file or folder that the experiment needs. Return an error message, or None on success."""
    import httpx2  # of huggingface_hub
    from huggingface_hub import HfApi, snapshot_download

    target = root / need.path
    one = need.assemble or any(fnmatch(target.name, pattern) for pattern in need.files)
    folder, mark = target.parent if one else target, unfinished(target)
    try:
        # Without the hub's answer snapshot_download would return a folder that has any file.
        commit = HfApi().repo_info(hub, repo_type=need.repo_type, revision="main").sha
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        wanted = list(need.files) or None
        snapshot_download(hub, repo_type=need.repo_type, revision=commit, local_dir=folder, allow_patterns=wanted)
    except (httpx2.HTTPError, OSError, RuntimeError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    if need.assemble:
        parts = sorted(p for pattern in need.files for p in folder.glob(pattern))
        if not parts:
            return f"{hub} has no file {' or '.join(need.files)}"
        print(f"          joining {len(parts)} files into {need.path}", flush=True)
        try:
            assemble(parts, target)
        except (OSError, EOFError, tarfile.TarError) as error:
            return f"joining {', '.join(part.name for part in parts)}: {error}"
        for part in parts:  # wiki-18's vectors would take 65 GB twice
            part.unlink()
    mark.unlink(missing_ok=True)
    return None if target.exists() else f"fetched, but {need.path} is not there: {need.how}"


def assemble(parts: Sequence[Path], target: Path) -> None:
    """Concatenate the downloaded parts of a file into ``target``, unpacking ``.gz`` parts. The target appears only when
    it is complete. Some ``.gz`` files, such as wiki-18.jsonl.gz, are tar archives of one file."""
    temporary = target.with_name(f".{target.name}.part")
    with temporary.open("wb") as out:
        for part in parts:
            with _unpacked(part) as source:
                shutil.copyfileobj(source, out, 16 << 20)
    temporary.replace(target)


@contextmanager
def _unpacked(part: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    if part.suffix != ".gz":
        with part.open("rb") as source:
            yield source
    elif not tarfile.is_tarfile(part):
        with gzip.open(part) as source:
            yield source
    else:
        with tarfile.open(part) as archive:
            member = next(member for member in archive if member.isfile())
            source = archive.extractfile(member)
            assert source is not None, "it is a file"
            yield source
