"""``make size``: what an experiment needs of GPUs, and how fast they can be at most, before anything is downloaded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.commands.command import command, make_graph, numbers, option
from experiments.registry import sizing
from experiments.registry.errors import ExperimentError, nearest
from experiments.registry.known_models import known_model
from experiments.registry.sizing import CHIPS, GB, Adapters, Chip, Dimensions, Strategy, Training
from experiments.stages.context import RunContext
from experiments.stages.graph import Stage

NAMES = {"self_teacher": "self-teacher", "average": "moving average"}  # of modules' attributes, in the table
ZERO3: dict[str, Any] = {"strategy": "zero3"}
OFFLOAD = ZERO3 | {"offload_optimizer": True}
REMEDIES = (  # the cheaper ones first
    ("--trainer.strategy zero3", ZERO3),
    ("ZeRO-3 and offload_optimizer: true", OFFLOAD),
    ("ZeRO-3, offload_optimizer: true and offload_parameters: true", OFFLOAD | {"offload_parameters": True}),
)
RANK = 16  # of the adapters that are advised where sharding does not help
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Sized:
    """A training on so many GPUs, and how many trajectories an iteration has.

    Attributes:
        low_rank: the same with adapters of rank ``RANK`` on a base in bfloat16.
    """

    training: Training
    trajectories: int
    low_rank: Training

    @property
    def context(self) -> float:
        """Tokens that a token looks back on, taken as half of the longest."""
        return self.training.max_length / 2


@command(
    "size",
    "GPU memory by component and the roofline's speeds; loads nothing",
    option("--gpus", default="1,8,16", help="comma-separated"),
    option("--gpu", default="h100", help=", ".join(CHIPS)),
    option("--markdown", action="store_true", help="a table for a page"),
)
def size(args: argparse.Namespace, context: RunContext) -> None:
    """Print memory by component and the roofline's speeds, a column per number of GPUs.

    Raises:
        ExperimentError: an experiment that trains nothing, a chip or a model that is not known.
    """
    if args.gpu not in CHIPS:
        raise ExperimentError(f"no GPU '{args.gpu}' is known{nearest(args.gpu, CHIPS)}; there are: {', '.join(CHIPS)}")
    counts = numbers("--gpus", args.gpus, "1,8,16", least=1)
    stage = make_graph(context).target()
    if stage.kind != "fit":
        raise ExperimentError(f"'{stage.name}' is of kind {stage.kind}: it trains nothing")
    chip = CHIPS[args.gpu]
    module = module_of(stage)
    columns = [sized(stage, module, n, context.project.root) for n in counts]
    first = columns[0].training
    title = f"{stage.name} on {chip.name}: policy {billions(first.policy.parameters)}"
    for name, dimensions, _ in first.frozen:
        title += f", {name} {billions(dimensions.parameters)}"
    title += f", critic {billions(first.critic.body)}" if first.critic else ""
    title += f", adapters {billions(first.trained)}" if first.adapters else ""
    print(f"{title}; {first.strategy}, {first.precision}\n")
    print_table(table(columns, chip), args.markdown)
    for line in advice(columns, chip):
        print(f"\n{line}")
    print(
        "\nGB per GPU, counted and not measured (experiments/registry/sizing.py says how near it\n"
        "comes). The roofline is what the chip could do at its peak; trainings reach a part of it.\n"
        'Other GPUs: GPU=h200; other settings: ARGS="--trainer.strategy=zero3".'
    )


def sized(stage: Stage, module: Any, gpus: int, root: Path) -> Sized:
    """The training of ``stage`` on ``gpus`` GPUs, from its configuration and the models it names."""
    model = stage.config["model"]["init_args"]
    trainer, data = stage.config.get("trainer") or {}, (stage.config.get("data") or {}).get("init_args") or {}
    engine = ((data.get("rollouts") or {}).get("init_args") or {}).get("engine", {}).get("init_args") or {}
    strategy, options = strategy_of(trainer.get("strategy"), gpus)
    policy = dimensions_of(model["policy"], stage, root)
    adapters = adapters_of(model.get("lora"))
    training = Training(
        policy=policy,
        critic=policy if getattr(module, "critic_path", None) else None,
        frozen=frozen_models(module, stage, root, adapters is not None),
        strategy=strategy,
        gpus=gpus,
        precision=precision_of(trainer.get("precision"), model.get("dtype")),
        adapters=adapters,
        offload_optimizer=bool(options.get("offload_optimizer")),
        offload_parameters=bool(options.get("offload_parameters")),
        live_parameters=float(options.get("live_parameters", sizing.LIVE_PARAMETERS)),
        checkpointing=bool(model.get("gradient_checkpointing")),
        micro_batch_tokens=int(model.get("micro_batch_tokens", 16384)),
        logits_chunk=int(model.get("logits_chunk", 1024)),
        engine_share=float(engine.get("gpu_memory_utilization") or 0.0),
        max_length=int(engine.get("max_length") or 4096),
    )
    change = {"adapters": Adapters(RANK), "frozen": frozen_models(module, stage, root, True), "precision": "bfloat16"}
    trajectories = int(data.get("prompts_per_step", 0)) * int(data.get("samples_per_prompt", 1))
    return Sized(training, trajectories, dataclasses.replace(training, **change))


def adapters_of(lora: Any) -> Adapters | None:
    """Of ``model.lora``: its rank, and which of a layer's linear modules its targets name."""
    if not lora:
        return None
    from lightning_modules.models.lora import ALL_LINEAR, LoRA

    settings = LoRA(**lora)
    names = () if settings.targets == [ALL_LINEAR] else tuple(t.rpartition(".")[2] for t in settings.targets)
    return Adapters(settings.rank, names)


def frozen_models(module: Any, stage: Stage, root: Path, low_rank: bool) -> tuple[tuple[str, Dimensions, int], ...]:
    """(name, dimensions, bytes per parameter) of what is not trained. With adapters one that starts from the policy's
    folder costs nothing, unless it moves: it is the base."""
    return tuple(
        (NAMES.get(name, name), dimensions_of(path, stage, root), BYTES[dtype])
        for name, (path, dtype) in module.frozen_models().items()
        if not low_rank or path != module.policy_path or name == "average"
    )


def module_of(stage: Stage) -> Any:
    """The module that ``stage`` trains, without models.

    Raises:
        ExperimentError: with what it says of its options.
    """
    from argparse import ArgumentError

    from experiments.stages.validate import check_module, cli, condense, instantiate

    where = f"experiment '{stage.name}'"
    if not stage.arguments:
        try:
            return instantiate(stage.config["model"], "model")
        except (ValueError, TypeError, OSError, ArgumentError) as error:
            raise ExperimentError(f"{where}: model: {condense(str(error))}") from error
    return check_module(cli(stage.config, stage.arguments, where, instantiate=False), where)


def strategy_of(value: Any, gpus: int) -> tuple[Strategy, dict[str, Any]]:
    """A trainer's strategy in the words of ``sizing``, and its options."""
    options = value.get("init_args") or {} if isinstance(value, dict) else {}
    name = str((value or {}).get("class_path") if isinstance(value, dict) else value or "auto").lower()
    if "zero" in name or "deepspeed" in name:
        return ("zero2" if "2" in name.rpartition(".")[2] else "zero3"), options
    return ("ddp" if gpus > 1 else "single"), options


def precision_of(trainer: Any, dtype: Any) -> sizing.Precision:
    if dtype == "bfloat16" or str(trainer).endswith("-true") and str(trainer).startswith("bf16"):
        return "bfloat16"
    return "autocast" if str(trainer).startswith(("bf16", "16")) else "float32"


def dimensions_of(path: str, stage: Stage, root: Path) -> Dimensions:
    """Of the model at ``path``: read, if it is there; else that of the stage which will make it; else as published.

    Raises:
        ExperimentError: nothing is known of it.
    """
    file = root / path / "config.json"
    if file.is_file():
        return Dimensions.of(json.loads(file.read_text()))
    for upstream in stage.upstream:
        made_from = ((upstream.config.get("model") or {}).get("init_args") or {}).get("policy")
        if (root / path).is_relative_to(upstream.folder) and made_from:
            return dimensions_of(made_from, upstream, root)
    if (config := known_model(Path(path).name)) is not None:
        return Dimensions.of(config)
    raise ExperimentError(
        f"'{stage.name}': nothing is known of the model '{path}': it is not there, no stage that trains makes it, and "
        "experiments/registry/known_models.py has none of that name. Put it there, or train what makes it"
    )


def table(columns: Sequence[Sized], chip: Chip) -> list[list[str]]:
    """Rows of cells, the first one the head."""
    rows = [["GPUs", *(str(c.training.gpus) for c in columns)]]
    parts = [sizing.memory(c.training, chip) for c in columns]
    for name in dict.fromkeys(name for part in parts for name in part):
        if any(part.get(name) for part in parts):
            rows.append([name, *(f"{part.get(name, 0) / GB:.1f}" for part in parts)])
    rows.append([f"all of {chip.memory / GB:.0f}", *(total(sum(part.values()), chip) for part in parts)])
    speeds = [sizing.training_speed(c.training, chip, c.context) for c in columns]
    rows.append(["training tok/s, roofline", *(count(speed) for speed in speeds)])
    if columns[0].training.engine_share and columns[0].trajectories:
        rows.append(["cache, tokens per GPU", *(count(sizing.cache_tokens(c.training, chip)) for c in columns)])
        sequences = [concurrent_sequences(c, chip) for c in columns]
        rows.append(["sequences at once per GPU", *(str(n) for n in sequences)])
        speeds = [
            sizing.generation_speed(c.training, chip, n, c.context) for c, n in zip(columns, sequences, strict=True)
        ]
        rows.append(["sampled tok/s, roofline", *(count(s) if s else "-" for s in speeds)])
    return rows


def concurrent_sequences(sized: Sized, chip: Chip) -> int:
    """Trajectories that a GPU's engine holds at once: all of its share, as far as the cache reaches."""
    share = math.ceil(sized.trajectories / sized.training.gpus)
    return min(share, int(sizing.cache_tokens(sized.training, chip) // max(sized.context, 1)))


def advice(columns: Sequence[Sized], chip: Chip) -> list[str]:
    """What to do about each column that does not fit, and about engines without room."""
    lines = []
    for training, low_rank in ((column.training, column.low_rank) for column in columns):
        where = f"{training.gpus} GPU{'s' if training.gpus > 1 else ''}"
        share = training.engine_share
        if share and sizing.cache_tokens(training, chip) < training.max_length:
            wanted = 2 * training.policy.parameters + 4 * training.max_length * training.policy.kv_bytes()
            least = math.ceil(100 * wanted / chip.memory) / 100
            lines.append(
                f"{where}: the engine's {share * chip.memory / GB:.0f} GB do not hold its weights "
                f"({2 * training.policy.parameters / GB:.0f} GB) and a cache: gpu_memory_utilization {least:g} at least"
            )
            share = max(share, least)
        training, low_rank = (dataclasses.replace(t, engine_share=share) for t in (training, low_rank))
        if not fits(training, chip):
            smaller = smaller_engine(training, chip)
            lines.append(f"{where}: {smaller or remedy(training, low_rank, chip)}")
    return lines


def smaller_engine(training: Training, chip: Chip) -> str | None:
    """The share of the engine beside which a training fits, if it leaves a cache of four whole trajectories."""
    others = sum(sizing.memory(dataclasses.replace(training, engine_share=0.0), chip).values())
    share = math.floor(100 * (1 - others / chip.memory)) / 100
    lower = dataclasses.replace(training, engine_share=share)
    if share >= training.engine_share or sizing.cache_tokens(lower, chip) < 4 * training.max_length:
        return None
    return f"fits with --data.rollouts.engine.gpu_memory_utilization {share:g}"


def remedy(training: Training, low_rank: Training, chip: Chip) -> str:
    """The cheapest way to make a training fit; where sharding alone does not, adapters as well, if they do."""
    words = [words for words, change in REMEDIES if fits(dataclasses.replace(training, **change), chip)]
    if words and words[0] == REMEDIES[0][0]:
        return f"fits with {words[0]}"
    text = f"fits with {words[0]}" if words else "no sharding or offloading makes it fit"
    if training.adapters is None and fits(low_rank, chip):
        base = "" if low_rank.sharded else " --model.dtype bfloat16"
        text += f"; or, which is another training, with LoRA: --model.lora.rank {RANK}{base} --model.lr 1e-5"
    return text


def fits(training: Training, chip: Chip) -> bool:
    return sum(sizing.memory(training, chip).values()) <= chip.memory


def total(size: float, chip: Chip) -> str:
    return f"{size / GB:.1f}" + ("" if size <= chip.memory else " TOO MUCH")


def billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def count(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.0f}"


def print_table(rows: Sequence[Sequence[str]], markdown: bool) -> None:
    if markdown:
        from experiments.reports.markdown import markdown_table

        print(markdown_table(rows[0], [list(row) for row in rows[1:]]))
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells))
