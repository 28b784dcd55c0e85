"""Writes README.md of an exported model: algorithm, data, scores with intervals, command and commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.registry.columns import columns_of
from experiments.reports.markdown import fenced, inline, markdown_table
from experiments.reports.results import read_evaluation, read_training
from experiments.reports.results_page import metric_text

FACTS = {"algorithm": "algorithm", "models": "starts from", "data": "data", "reproduces": "reproduces"}


def model_card(
    config: Mapping[str, Any], result: Mapping[str, Any], tested: Path | None, serve: str, note: str = ""
) -> str:
    """Return the text of a model card in Hugging Face's format: Markdown after YAML.

    Args:
        config: resolved configuration of the experiment.
        result: content of its result.json; empty for an unfinished run.
        tested: stage folder with a test of these weights, or None for a card without scores.
        serve: command that serves the model.
        note: line below or instead of the scores.
    """
    from huggingface_hub import ModelCardData

    about = config["experiment"]
    algorithm = [about["algorithm"]] if about.get("algorithm") else []
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=["agent", *algorithm])
    facts = [(title, str(about[key])) for key, title in FACTS.items() if about.get(key)]
    facts += [("seed", str(config.get("seed_everything", 0)))]
    facts += [(name, inline(str(result[name]))) for name in ("key", "commit") if result.get(name)]
    lines = [
        f"---\n{data.to_yaml()}\n---\n\n# {about['name']}\n",
        f"{about['summary']}\n" if about.get("summary") else "",
        markdown_table(["", ""], facts),
        _scores(tested, about.get("columns")) if tested is not None else "",
        f"{note}\n" if note else "",
        f"## Serve\n\n{fenced(serve)}",
        f"## Made by\n\n{fenced(result['command'])}" if result.get("command") else "",
    ]
    return "\n".join(line for line in lines if line)


def _scores(folder: Path, columns: list[str] | None) -> str:
    """Return the model card's section of test metrics; "" for a stage without a test."""
    try:
        test = read_evaluation(folder)["test"]
    except (FileNotFoundError, ValueError):
        return ""
    training = read_training(folder)
    shown = [(c.title, metric_text(c.value(test, training), c.interval)) for c in columns_of(columns).values()]
    table = markdown_table(["metric", "value"], [row for row in shown if row[1] != "-"])
    return f"## Test\n\n{test['em']['n']} questions; scores with their 95 % bootstrap intervals.\n\n{table}"
