"""``make size``: what an experiment needs of GPUs, and how fast they can be at most, before anything is downloaded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.commands import index_size
from experiments.commands.command import builds_index, command, make_graph, numbers, option
from experiments.registry import sizing
from experiments.registry.errors import ExperimentError, nearest
from experiments.registry.known_models import known_model
from experiments.registry.sizing import CHIPS, GB, Adapters, Chip, Dimensions, Run, Strategy, Training
from experiments.stages.context import RunContext
from experiments.stages.graph import Stage

NAMES = {"self_teacher": "self-teacher", "average": "moving average"}  # of modules' attributes, in the table
STRATEGY = "--trainer.strategy.class_path lightning_modules.sharding.strategies.ZeRO3"
OFFLOAD = "--trainer.strategy.init_args.offload"
SHARDED: dict[str, Any] = {"strategy": "zero3"}
REMEDIES: tuple[tuple[str, dict[str, Any]], ...] = (  # of a trainer that is too large, the cheaper ones first
    ("", {}),
    (STRATEGY, SHARDED),
    (f"{STRATEGY} {OFFLOAD}_optimizer true", SHARDED | {"offload_optimizer": True}),
    (
        f"{STRATEGY} {OFFLOAD}_optimizer true {OFFLOAD}_parameters true",
        SHARDED | {"offload_optimizer": True, "offload_parameters": True},
    ),
)
INDEX_NOTE = (
    "Memory of the server, disk of the index with its texts. Seconds are those of one processor\n"
    "(docs/results/benchmarks.md) in proportion, without encoding the queries. IVF-PQ and HNSW\n"
    "miss some of what exact search finds: `recall` in the index's metadata.json."
)
MICRO_BATCH = 4096  # tokens; smaller ones no longer fill a GPU
MORE = 1.25  # times as many sequences at once are worth another setting
FAR = 0.2  # by so much a share of memory is too large
GPUS = "1,8,16"
RANK = 16  # of the adapters that are advised where sharding does not help
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Sized:
    """A training on so many GPUs, and what it does.

    Attributes:
        run: None where trajectories are not sampled.
        low_rank: the training with adapters of rank ``RANK`` on a base in bfloat16.
        in_flight: trajectories that rollouts and engine take at once.
    """

    training: Training
    run: Run | None
    low_rank: Training
    in_flight: int

    @property
    def context(self) -> float:
        """Tokens that a token looks back on, taken as half of the longest."""
        return self.training.max_length / 2

    @property
    def wanted(self) -> int:
        """Sequences that each GPU could sample at once."""
        if self.run is None:
            return 0
        return min(math.ceil(self.run.trajectories / self.training.gpus), self.in_flight)


@command(
    "size",
    "GPU memory by component and the roofline's speeds; loads nothing",
    option("--gpus", default=GPUS, help="comma-separated"),
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
    counts = numbers("--gpus", args.gpus, GPUS, least=1)
    stage = make_graph(context).target()
    if builds_index(stage):
        title, rows = index_size.table(stage, context.project.root)
        print(f"{title}\n")
        print_table(rows, args.markdown)
        print(f"\n{INDEX_NOTE}")
        return
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
    counted = {} if args.gpus == GPUS else {"GPUS": args.gpus}
    sharded = dataclasses.replace(context, arguments=(*context.arguments, "--trainer.strategy=zero3"))
    print(
        "\nGB per GPU, counted and not measured (experiments/registry/sizing.py says how near it\n"
        "comes). The roofline is what the chip could do at its peak. Hours are an estimate: a run\n"
        f"reaches {sizing.EFFICIENCY:g} of the roofline, trajectories are half as long as they may be; tools and\n"
        "evaluation come on top.\n"
        f"Other GPUs:      {context.command('size', **counted, GPU='h100' if args.gpu == 'h200' else 'h200')}\n"
        f"Other settings:  {sharded.command('size', **counted, GPU=args.gpu)}"
    )


def sized(stage: Stage, module: Any, gpus: int, root: Path) -> Sized:
    """The training of ``stage`` on ``gpus`` GPUs, from its configuration and the models it names."""
    model = stage.config["model"]["init_args"]
    trainer, data = stage.config.get("trainer") or {}, (stage.config.get("data") or {}).get("init_args") or {}
    rollouts = (data.get("rollouts") or {}).get("init_args") or {}
    engine = rollouts.get("engine", {}).get("init_args") or {}
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
        micro_batch_tokens=module.micro_batch_tokens,
        logits_chunk=module.logits_chunk,
        engine_share=float(engine.get("gpu_memory_utilization") or 0.0),
        sleep_mode=bool(rollouts.get("sleep_mode")),
        max_length=int(engine.get("max_length") or 4096),
    )
    change = {"adapters": Adapters(RANK), "frozen": frozen_models(module, stage, root, True), "precision": "bfloat16"}
    in_flight = min(int(rollouts.get("concurrency", 256)), int(engine.get("max_num_seqs", 256)))
    return Sized(training, run_of(data, rollouts, model, training), dataclasses.replace(training, **change), in_flight)


def run_of(data: Any, rollouts: Any, model: Any, training: Training) -> Run | None:
    """What an on-policy training does; None of another, whose data is not looked at, and without ``iterations``."""
    if not data.get("prompts_per_step") or not data.get("iterations"):
        return None
    protocol = rollouts.get("protocol", {}).get("init_args") or {}
    windowed = protocol.get("window") is not None or protocol.get("history") == "template"
    rows = max(1.0, rollouts.get("max_turns", 4) / 2) if windowed else 1.0
    turn = min(int(rollouts.get("max_turn_tokens", 500)), training.max_length)
    whole = min(int(rollouts.get("max_response_tokens", 4096)), training.max_length)
    return Run(
        iterations=int(data["iterations"]),
        trajectories=int(data["prompts_per_step"]) * int(data.get("samples_per_prompt", 1)),
        rows=rows,
        sampled=rows * turn / 2 if windowed else whole / 2,
        epochs=int(model.get("epochs", 1)),
    )


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
    trainings = [c.training for c in columns]
    rows = [["GPUs", *(str(t.gpus) for t in trainings)]]
    parts = [sizing.memory(t, chip) for t in trainings]
    for name in dict.fromkeys(name for part in parts for name in part):
        if any(part.get(name) for part in parts):
            rows.append([name, *(f"{part.get(name, 0) / GB:.1f}" for part in parts)])
    if any(sampling := [sizing.sampling_memory(t, chip) for t in trainings]):
        rows.append(["training, engine asleep", *(f"{sum(part.values()) / GB:.1f}" for part in parts)])
        rows.append(["sampling, optimizer away", *(f"{sum(part.values()) / GB:.1f}" for part in sampling)])
    rows.append([f"all of {chip.memory / GB:.0f}", *(total(sizing.peak(t, chip), chip) for t in trainings)])
    speeds = [sizing.training_speed(c.training, chip, c.context) for c in columns]
    rows.append(["training tok/s, roofline", *(count(speed) for speed in speeds)])
    if trainings[0].engine_share and columns[0].run is not None:
        rows.append(["cache, tokens per GPU", *(count(sizing.cache_tokens(t, chip)) for t in trainings)])
        sequences = [concurrent_sequences(c, chip) for c in columns]
        cells = (f"{n} of {c.wanted}" for n, c in zip(sequences, columns, strict=True))
        rows.append(["sequences at once per GPU", *cells])
        speeds = [
            sizing.generation_speed(c.training, chip, n, c.context) for c, n in zip(columns, sequences, strict=True)
        ]
        rows.append(["sampled tok/s, roofline", *(count(s) if s else "-" for s in speeds)])
        times = [sizing.hours(c.training, chip, c.run, n) for c, n in zip(columns, sequences, strict=True) if c.run]
        rows.append(
            [f"hours, at {sizing.EFFICIENCY:g} of it", *(f"{time:.2g}" if time < 10 else count(time) for time in times)]
        )
    return rows


def concurrent_sequences(sized: Sized, chip: Chip) -> int:
    """Trajectories that a GPU's engine holds at once, half as long as they may be: its part, as the cache reaches."""
    return min(sized.wanted, int(sizing.cache_tokens(sized.training, chip) // max(sized.context, 1)))


def advice(columns: Sequence[Sized], chip: Chip) -> list[str]:
    """What to add for each column that does not fit, and for engines with too little or too much memory."""
    return [
        f"{column.training.gpus} GPU{'s' if column.training.gpus > 1 else ''}: {line}"
        for column in columns
        if (line := settings(column, chip))
    ]


def settings(sized: Sized, chip: Chip) -> str | None:
    """The options to add, the cheapest ones that do; None where nothing has to be."""
    now = sized.training
    if sizing.peak(now, chip) <= chip.memory and (not now.engine_share or holds_one(now, chip)):
        if not now.engine_share or sized.run is None:
            return None
        return engine_settings(sized, chip)
    low_rank = {field.name: getattr(sized.low_rank, field.name) for field in dataclasses.fields(Training)}
    plain = next(filter(None, (fitted(sized, words, change, chip) for words, change in REMEDIES)), None)
    if plain is not None and OFFLOAD not in plain:
        return f"fits with {plain}"
    text = f"fits with {plain}" if plain else "no sharding or offloading makes it fit"
    base = "" if sized.low_rank.sharded else " --model.dtype bfloat16"
    words = f"--model.lora.rank {RANK}{base} --model.lr 1e-5"
    if now.adapters is None and (lora := fitted(sized, words, low_rank, chip)):
        text += f"; or, which is another training, with LoRA: {lora}"
    return text


def fitted(sized: Sized, words: str, change: dict[str, Any], chip: Chip) -> str | None:
    """``words``, which stand for a change of the trainer, and what else it takes to fit: smaller micro-batches, and the
    engine's options. None where it does not."""
    trainer = dataclasses.replace(sized.training, **change)
    smaller = min(trainer.micro_batch_tokens, max(MICRO_BATCH, trainer.max_length))
    for tokens in dict.fromkeys((trainer.micro_batch_tokens, smaller)):
        found = best_engine(sized, dataclasses.replace(trainer, micro_batch_tokens=tokens), chip)
        if found is not None:
            more = f"--model.micro_batch_tokens {tokens}" if tokens != trainer.micro_batch_tokens else ""
            return " ".join(filter(None, (words, more, *engine_words(sized.training, found))))
    return None


def engine_settings(sized: Sized, chip: Chip) -> str | None:
    """Options for an engine of a training that fits, where it could hold more of its trajectories, or has memory for
    more than all of them at their longest."""
    now, sequences = sized.training, concurrent_sequences(sized, chip)
    found = best_engine(sized, now, chip) or now
    more = concurrent_sequences(dataclasses.replace(sized, training=found), chip)
    words = " ".join(engine_words(now, found))
    if more > MORE * sequences:
        return f"{sequences} sequences at once where {sized.wanted} are wanted; {more} with {words}"
    if not now.sleep_mode and more == sequences and found.engine_share < now.engine_share - FAR:
        return f"the engine's {now.engine_share:g} of the memory is more than it can use: {words}"
    return None


def best_engine(sized: Sized, trainer: Training, chip: Chip) -> Training | None:
    """The training with its engine awake or asleep meanwhile, and a share, so that the engine holds most trajectories;
    None where nothing fits."""
    if not trainer.engine_share:
        return trainer if sizing.peak(trainer, chip) <= chip.memory else None
    ways = [dataclasses.replace(trainer, sleep_mode=way) for way in dict.fromkeys((trainer.sleep_mode, True))]
    ways = [dataclasses.replace(t, engine_share=best_share(sized, t, chip)) for t in ways]
    ways = [t for t in ways if sizing.peak(t, chip) <= chip.memory and holds_one(t, chip)]
    return max(ways, key=lambda t: concurrent_sequences(dataclasses.replace(sized, training=t), chip), default=None)


def best_share(sized: Sized, training: Training, chip: Chip) -> float:
    """Of the GPU's memory for the engine: what its trajectories take at their longest, as far as there is room. Without
    trajectories to train on, what it has, as far as there is room."""
    room = max(0.01, sizing.largest_share(training, chip))
    if sized.run is None:
        return min(training.engine_share, room)
    longest = sizing.engine_memory(training, sized.wanted * training.max_length)
    return min(room, math.ceil(100 * longest / chip.memory) / 100)


def engine_words(before: Training, after: Training) -> list[str]:
    words = []
    if after.sleep_mode != before.sleep_mode:
        words.append(f"--data.rollouts.sleep_mode {str(after.sleep_mode).lower()}")
    if after.engine_share != before.engine_share:
        words.append(f"--data.rollouts.engine.gpu_memory_utilization {after.engine_share:g}")
    return words


def holds_one(training: Training, chip: Chip) -> bool:
    """Whether the engine has room for a trajectory, with which vLLM starts."""
    return sizing.cache_tokens(training, chip) >= training.max_length


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
