"""Flattens a resolved configuration into the parameters and tags of an MLflow run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHOWN = ("seed_everything", "model", "data", "trainer")
TAGS = {"name": "experiment", "algorithm": "algorithm", "models": "model", "data": "world", "label": "label"}
NOTE, SOURCE = "mlflow.note.content", "mlflow.source.name"  # MLflow's description, and its column "Source"


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Flatten a resolved configuration to MLflow parameters, named as overrides on the command line, without the
    logger.

    ``{"model": "GRPO", "model.lr": "1e-06", "data.rollouts.engine": "VLLMEngine", ...}``. A callback has the name of
    its class.
    """
    trainer = {key: value for key, value in (config.get("trainer") or {}).items() if key != "logger"}
    shown: dict[str, Any] = {key: config[key] for key in SHOWN if key in config}
    return _flat(shown | {"trainer": trainer})


def _flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and "class_path" in value:
        return {name: _class(value), **_flat(value.get("init_args") or {}, name)}
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        names = [_class(item) if isinstance(item, Mapping) else "" for item in value]
        unique = [own if own and names.count(own) == 1 else str(i) for i, own in enumerate(names)]
        value = dict(zip(unique, value, strict=True))
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        return {key: text for part, item in value.items() for key, text in _flat(item, f"{prefix}{part}").items()}
    return {name: str(value)}


def _class(value: Mapping[str, Any]) -> str:
    return str(value.get("class_path", "")).rpartition(".")[2]


def tags(config: Mapping[str, Any], origin: Mapping[str, str]) -> dict[str, str]:
    """Return the MLflow tags by which runs can be searched. The experiment's summary becomes MLflow's description, and
    the command its source.

    Args:
        origin: commit and command, as ``run_info`` returns them.
    """
    about = config.get("experiment") or {}
    found = {tag: str(about[key]) for key, tag in TAGS.items() if about.get(key)}
    if about.get("folder"):
        found["stage_key"] = Path(about["folder"]).name
    if about.get("summary"):
        found[NOTE] = str(about["summary"])
    return found | {
        "seed": str(config.get("seed_everything", 0)),
        "commit": origin["commit"],
        SOURCE: origin["command"],
    }
