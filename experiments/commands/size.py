"""``make size``: whether an experiment fits on given GPUs, what to change, and how long it takes; loads nothing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.commands.command import builds_index, command, make_graph, numbers, option
from experiments.registry import sizing
from experiments.registry.errors import ExperimentError, nearest
from experiments.registry.shapes import GB, GPU_SPECS, Dimensions, GPUSpec, Precision, known_model
from experiments.registry.sizing import Adapters, Run, Strategy, Training
from experiments.stages.context import RunContext
from experiments.stages.graph import Stage

NAMES = {"self_teacher": "self-teacher", "average": "moving average"}  # of a module's attributes, in the table
STRATEGY = "--trainer.strategy.class_path lightning_modules.sharding.strategies.ZeRO3"
OFFLOAD = "--trainer.strategy.init_args.offload"
SHARDED: dict[str, Any] = {"strategy": "zero3"}
REMEDIES: tuple[tuple[str, dict[str, Any]], ...] = (  # for a trainer that is too large, the cheapest first
    ("", {}),
    (STRATEGY, SHARDED),
    (f"{STRATEGY} {OFFLOAD}_optimizer true", SHARDED | {"offload_optimizer": True}),
    (
        f"{STRATEGY} {OFFLOAD}_optimizer true {OFFLOAD}_parameters true",
        SHARDED | {"offload_optimizer": True, "offload_parameters": True},
    ),
)
MICRO_BATCH = 4096  # tokens; smaller micro-batches do not fill a GPU
MORE = 1.25  # times as many sequences at once are worth another setting
FAR = 0.2  # a share of memory that is too large by this much is worth another setting
GPUS = "1,8,16"
RANK = 16  # of the adapters that are advised where sharding does not help
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Search indexes
CORPORA = {"wiki-18.jsonl": (21_015_324, 14_393_573_105)}  # passages, bytes; before the file is there
ENCODERS = {"e5-small-v2": 384, "e5-base-v2": 768, "e5-large-v2": 1024, "bge-base-en-v1.5": 768, "bge-m3": 1024}
QUERIES = 64
ROW = 45  # bytes that the index adds to a passage: its row, its offset, keys
LUCENE = 0.16  # of the text: 2.3 GB of wiki-18, as released


@dataclasses.dataclass(frozen=True, slots=True)
class Sized:
    """A training run on a number of GPUs.

    Attributes:
        run: the work to do, or None if no trajectories are sampled.
        low_rank: the same with adapters of rank ``RANK`` on a bfloat16 base.
        in_flight: trajectories that rollouts and engine take at once.
    """

    training: Training
    run: Run | None
    low_rank: Training
    in_flight: int

    @property
    def wanted(self) -> int:
        """Sequences that each GPU could sample at once."""
        return min(math.ceil(self.run.trajectories / self.training.gpus), self.in_flight) if self.run else 0

    def sequences(self, chip: GPUSpec) -> int:
        """Sequences of half the longest length that a GPU's engine holds at once, of those wanted."""
        return min(self.wanted, int(sizing.cache_tokens(self.training, chip) // max(self.training.context, 1)))


@command(
    "size",
    "whether an experiment fits on given GPUs, what to change, and estimated hours; loads nothing",
    option("--gpus", default=GPUS, help="numbers of GPUs, comma-separated"),
    option("--gpu", default="h100", help=", ".join(GPU_SPECS)),
)
def size(args: argparse.Namespace, context: RunContext) -> None:
    """Print memory by component, speeds and hours, a column per number of GPUs, and the options that make it fit.

    Raises:
        ExperimentError: an experiment that trains nothing, an unknown GPU or model.
    """
    if args.gpu not in GPU_SPECS:
        raise ExperimentError(
            f"no GPU '{args.gpu}' is known{nearest(args.gpu, GPU_SPECS)}; there are: {', '.join(GPU_SPECS)}"
        )
    counts = numbers("--gpus", args.gpus, GPUS, least=1)
    stage = make_graph(context).target()
    if builds_index(stage):
        print_index(stage, context.project.root)
        return
    if stage.kind != "fit":
        raise ExperimentError(f"'{stage.name}' is of kind {stage.kind}: it trains nothing; name one that trains")
    chip, module = GPU_SPECS[args.gpu], module_of(stage)
    columns = [sized(stage, module, n, context.project.root) for n in counts]
    first = columns[0].training
    models = [("policy", first.policy.parameters), *((name, d.parameters) for name, d, _ in first.frozen)]
    models += [("critic", first.critic.body)] if first.critic else []
    models += [("adapters", first.trained)] if first.adapters else []
    words = ", ".join(f"{name} {billions(count)}" for name, count in models)
    print(f"{stage.name} on {chip.name}: {words}; {first.strategy}, {first.precision}\n")
    print_table(table(columns, chip))
    for line in advice(columns, chip):
        print(f"\n{line}")
    print(
        "\nGB per GPU, computed and not measured. The roofline is the GPU's peak. Hours assume that a run reaches\n"
        f"{sizing.EFFICIENCY:g} of it, and trajectories of half the longest length; tools and evaluation come on top."
    )


def sized(stage: Stage, module: Any, gpus: int, root: Path) -> Sized:
    """The training run of ``stage`` on ``gpus`` GPUs, from its configuration and the models that it names."""
    model = stage.config["model"]["init_args"]
    trainer, data = stage.config.get("trainer") or {}, (stage.config.get("data") or {}).get("init_args") or {}
    rollouts = (data.get("rollouts") or {}).get("init_args") or {}
    engine = rollouts.get("engine", {}).get("init_args") or {}
    strategy, options = strategy_of(trainer.get("strategy"), gpus)
    policy, adapters = dimensions_of(model["policy"], stage, root), adapters_of(model.get("lora"))
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
        max_tokens_per_micro_batch=module.max_tokens_per_micro_batch,
        logits_chunk=module.logits_chunk,
        engine_share=float(engine.get("gpu_memory_utilization") or 0.0),
        sleep_mode=bool(rollouts.get("sleep_mode")),
        max_length=int(engine.get("max_length") or 4096),
    )
    change = {"adapters": Adapters(RANK), "frozen": frozen_models(module, stage, root, True), "precision": "bfloat16"}
    in_flight = min(int(rollouts.get("concurrency", 256)), int(engine.get("max_num_seqs", 256)))
    return Sized(training, run_of(data, rollouts, model, training), dataclasses.replace(training, **change), in_flight)


def run_of(data: Any, rollouts: Any, model: Any, training: Training) -> Run | None:
    """The work of an on-policy training run, or None for others, and without ``iterations``."""
    if not data.get("prompts_per_iteration") or not data.get("iterations"):
        return None
    protocol = rollouts.get("protocol", {}).get("init_args") or {}
    windowed = protocol.get("window") is not None or protocol.get("history") == "template"
    rows = max(1.0, rollouts.get("max_turns", 4) / 2) if windowed else 1.0
    turn = min(int(rollouts.get("max_turn_tokens", 500)), training.max_length)
    whole = min(int(rollouts.get("max_response_tokens", 4096)), training.max_length)
    return Run(
        iterations=int(data["iterations"]),
        trajectories=int(data["prompts_per_iteration"]) * int(data.get("group_size", 1)),
        rows=rows,
        sampled=rows * turn / 2 if windowed else whole / 2,
        epochs=int(model.get("epochs", 1)),
    )


def adapters_of(lora: Any) -> Adapters | None:
    """The rank and the linear modules of ``model.lora``."""
    if not lora:
        return None
    from lightning_modules.models.lora import ALL_LINEAR, LoRA

    settings = LoRA(**lora)
    names = () if settings.targets == [ALL_LINEAR] else tuple(t.rpartition(".")[2] for t in settings.targets)
    return Adapters(settings.rank, names)


def frozen_models(module: Any, stage: Stage, root: Path, low_rank: bool) -> tuple[tuple[str, Dimensions, int], ...]:
    """(name, shape, bytes per parameter) of each model that is not trained. With adapters, a frozen model from the
    policy's folder is the base and costs nothing, unless it is a moving average."""
    return tuple(
        (NAMES.get(name, name), dimensions_of(path, stage, root), BYTES[dtype])
        for name, (path, dtype) in module.frozen_models().items()
        if not low_rank or path != module.policy_path or name == "average"
    )


def module_of(stage: Stage) -> Any:
    """The module that ``stage`` trains, without models. Raises ExperimentError where it refuses its options."""
    from experiments.stages.parser import cli, instantiate, refusals
    from experiments.stages.validate import check_module

    where = f"experiment '{stage.name}'"
    if not stage.arguments:
        with refusals(f"{where}: model"):
            return instantiate(stage.config["model"], "model")
    return check_module(cli(stage.config, stage.arguments, where, instantiate=False), where)


def strategy_of(value: Any, gpus: int) -> tuple[Strategy, dict[str, Any]]:
    """The name and the options of ``trainer.strategy``."""
    options = value.get("init_args") or {} if isinstance(value, dict) else {}
    name = str((value or {}).get("class_path") if isinstance(value, dict) else value or "auto").lower()
    if "zero" in name or "deepspeed" in name:
        return ("zero2" if "2" in name.rpartition(".")[2] else "zero3"), options
    return ("ddp" if gpus > 1 else "single"), options


def precision_of(trainer: Any, dtype: Any) -> Precision:
    if dtype == "bfloat16" or str(trainer).endswith("-true") and str(trainer).startswith("bf16"):
        return "bfloat16"
    return "autocast" if str(trainer).startswith(("bf16", "16")) else "float32"


def dimensions_of(path: str, stage: Stage, root: Path) -> Dimensions:
    """The shape of the model at ``path``: from its file, else from the stage that will make it, else as published.

    Raises:
        ExperimentError: an unknown model.
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
        f"'{stage.name}': unknown model '{path}': no such folder, no stage makes it, and "
        "experiments/registry/shapes.py has no model of that name; download it, or train the stage that makes it"
    )


def table(columns: Sequence[Sized], chip: GPUSpec) -> list[list[str]]:
    """Rows of cells; the first row is the head."""
    trainings = [c.training for c in columns]
    parts = [sizing.memory(t, chip) for t in trainings]
    rows = [["GPUs", *(str(t.gpus) for t in trainings)]]
    for name in dict.fromkeys(name for part in parts for name in part):
        if any(part.get(name) for part in parts):
            rows.append([name, *(f"{part.get(name, 0) / GB:.1f}" for part in parts)])
    if any(sampling := [sizing.sampling_memory(t, chip) for t in trainings]):
        rows.append(["training, engine asleep", *(f"{sum(part.values()) / GB:.1f}" for part in parts)])
        rows.append(["sampling, optimizer away", *(f"{sum(part.values()) / GB:.1f}" for part in sampling)])
    peaks = [sizing.peak(t, chip) for t in trainings]
    cells = (f"{size / GB:.1f}" + ("" if size <= chip.memory else " TOO MUCH") for size in peaks)
    rows.append([f"all of {chip.memory / GB:.0f}", *cells])
    rows.append(["training tok/s, roofline", *(rounded(sizing.training_speed(t, chip)) for t in trainings)])
    if trainings[0].engine_share and columns[0].run is not None:
        rows.append(["cache, tokens per GPU", *(rounded(sizing.cache_tokens(t, chip)) for t in trainings)])
        rows.append(["sequences at once per GPU", *(f"{c.sequences(chip)} of {c.wanted}" for c in columns)])
        speeds = [sizing.generation_speed(c.training, chip, c.sequences(chip)) for c in columns]
        rows.append(["sampled tok/s, roofline", *(rounded(speed) if speed else "-" for speed in speeds)])
        times = [sizing.hours(c.training, chip, c.run, c.sequences(chip)) for c in columns if c.run]
        cells = (f"{time:.2g}" if time < 10 else rounded(time) for time in times)
        rows.append([f"hours, at {sizing.EFFICIENCY:g} of it", *cells])
    return rows


def advice(columns: Sequence[Sized], chip: GPUSpec) -> list[str]:
    """The options to add for each column that does not fit, or whose engine has too little or too much memory."""
    lines = [(column.training.gpus, settings(column, chip)) for column in columns]
    return [f"{gpus} GPU{'s' if gpus > 1 else ''}: {line}" for gpus, line in lines if line]


def settings(sized: Sized, chip: GPUSpec) -> str | None:
    """The cheapest options that help, or None where none is needed."""
    now = sized.training
    if fits(now, chip):
        return engine_settings(sized, chip) if now.engine_share and sized.run else None
    plain = next(filter(None, (fitted(sized, words, change, chip) for words, change in REMEDIES)), None)
    if plain is not None and OFFLOAD not in plain:
        return f"fits with {plain}"
    text = f"fits with {plain}" if plain else "no sharding or offloading makes it fit"
    base = "" if sized.low_rank.sharded else " --model.dtype bfloat16"
    low_rank = {field.name: getattr(sized.low_rank, field.name) for field in dataclasses.fields(Training)}
    words = f"--model.lora.rank {RANK}{base} --model.lr 1e-5"
    if now.adapters is None and (lora := fitted(sized, words, low_rank, chip)):
        text += f"; or, which is another training, with LoRA: {lora}"
    return text


def fits(t: Training, chip: GPUSpec) -> bool:
    """Whether trainer and engine fit; vLLM needs space for one trajectory."""
    return sizing.peak(t, chip) <= chip.memory and (not t.engine_share or sizing.cache_tokens(t, chip) >= t.max_length)


def fitted(sized: Sized, words: str, change: dict[str, Any], chip: GPUSpec) -> str | None:
    """Return ``words``, the options for ``change``, with those for smaller micro-batches and the engine that make it
    fit, or None."""
    trainer = dataclasses.replace(sized.training, **change)
    smaller = min(trainer.max_tokens_per_micro_batch, max(MICRO_BATCH, trainer.max_length))
    for tokens in dict.fromkeys((trainer.max_tokens_per_micro_batch, smaller)):
        found = best_engine(sized, dataclasses.replace(trainer, max_tokens_per_micro_batch=tokens), chip)
        if found is not None:
            more = (
                f"--model.max_tokens_per_micro_batch {tokens}" if tokens != trainer.max_tokens_per_micro_batch else ""
            )
            return " ".join(filter(None, (words, more, *engine_words(sized.training, found))))
    return None


def engine_settings(sized: Sized, chip: GPUSpec) -> str | None:
    """Options for an engine that could hold more of its trajectories, or that has more memory than it can use."""
    now, sequences = sized.training, sized.sequences(chip)
    found = best_engine(sized, now, chip) or now
    more = dataclasses.replace(sized, training=found).sequences(chip)
    words = " ".join(engine_words(now, found))
    if more > MORE * sequences:
        return f"{sequences} sequences at once where {sized.wanted} are wanted; {more} with {words}"
    if not now.sleep_mode and more == sequences and found.engine_share < now.engine_share - FAR:
        return f"the engine's {now.engine_share:g} of the memory is more than it can use: {words}"
    return None


def best_engine(sized: Sized, trainer: Training, chip: GPUSpec) -> Training | None:
    """Choose the engine's sleep mode and share so that it holds most trajectories; return None if nothing fits."""
    if not trainer.engine_share:
        return trainer if fits(trainer, chip) else None
    ways = [dataclasses.replace(trainer, sleep_mode=way) for way in dict.fromkeys((trainer.sleep_mode, True))]
    ways = [dataclasses.replace(t, engine_share=best_share(sized, t, chip)) for t in ways]
    fitting = [dataclasses.replace(sized, training=t) for t in ways if fits(t, chip)]
    best = max(fitting, key=lambda way: way.sequences(chip), default=None)
    return best and best.training


def best_share(sized: Sized, training: Training, chip: GPUSpec) -> float:
    """Share of the GPU's memory that the longest trajectories need, up to what the trainer leaves."""
    room = max(0.01, sizing.largest_share(training, chip))
    if sized.run is None:
        return min(training.engine_share, room)
    longest = sizing.engine_memory(training, sized.wanted * training.max_length)
    return min(room, math.ceil(100 * longest / chip.memory) / 100)


def engine_words(before: Training, after: Training) -> list[str]:
    share = f"--data.rollouts.engine.gpu_memory_utilization {after.engine_share:g}"
    return [
        *(
            [f"--data.rollouts.sleep_mode {str(after.sleep_mode).lower()}"]
            if after.sleep_mode != before.sleep_mode
            else []
        ),
        *([share] if after.engine_share != before.engine_share else []),
    ]


def print_index(stage: Stage, root: Path) -> None:
    """Print memory, disk and speed of every kind of search index; the stage's own is marked.

    Raises:
        ExperimentError: an unknown corpus or encoder.
    """
    from retrieval.dense import sizes
    from retrieval.index_config import HNSWConfig, IVFPQConfig

    arguments: dict[str, Any] = stage.config["task"]["init_args"]
    passages, size = corpus_size(root / arguments["corpus"], stage.name)
    threads, encoder = int(arguments.get("threads", 1)), arguments.get("encoder")
    text = (size + ROW * passages) / GB
    rows = [["", "memory, GB", "disk, GB", f"s for {QUERIES} queries, {threads} threads"]]
    rows.append(["bm25", str(arguments.get("java_heap", "1g")), gigabytes(text + LUCENE * size / GB), "-"])
    if encoder is not None:
        dimension = encoder_dimension(root / encoder["model"], stage.name)
        graphs = HNSWConfig(**(arguments.get("hnsw") or {})), IVFPQConfig(**(arguments.get("ivfpq") or {}))
        for kind in sizes.DENSE:
            memory = sizes.index_bytes(kind, passages, dimension, *graphs) / GB
            disk = text + memory + sizes.kept_bytes(kind, passages, dimension) / GB
            seconds = sizes.search_seconds(kind, passages, dimension, QUERIES, threads, *graphs)
            rows.append([kind, gigabytes(memory), gigabytes(disk), f"{seconds:.2g}"])
    print(f"{stage.name}: {passages:,} passages, {size / GB:.1f} GB of text (* is its kind)\n")
    own = arguments.get("kind", "bm25")
    print_table([[f"{name} *" if name == own else name, *cells] for name, *cells in rows])
    print(
        "\nMemory of the server; disk of the index with its texts. Seconds are scaled from docs/results/benchmarks.md\n"
        "and leave out encoding the queries. IVF-PQ and HNSW are approximate: `recall` in the index's metadata.json."
    )


def corpus_size(path: Path, name: str) -> tuple[int, int]:
    """(passages, bytes) of a corpus; a file's passages are estimated from its first lines."""
    if path.is_file() and path.suffix == ".jsonl":
        size = path.stat().st_size
        with path.open("rb") as file:
            lines = [len(line) for _, line in zip(range(1000), file, strict=False)]
        return round(size * len(lines) / max(sum(lines), 1)), size
    if path.name in CORPORA:
        return CORPORA[path.name]
    raise ExperimentError(f"'{name}': unknown corpus {path.name}; expected a .jsonl file at {path}; download it")


def encoder_dimension(folder: Path, name: str) -> int:
    file = folder / "config.json"
    if file.is_file():
        return int(json.loads(file.read_text())["hidden_size"])
    if folder.name in ENCODERS:
        return ENCODERS[folder.name]
    raise ExperimentError(f"'{name}': unknown encoder {folder.name}; expected its folder at {folder}; download it")


def gigabytes(size: float) -> str:
    return f"{size:.1f}" if size >= 1 else f"{size:.2g}"


def billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def rounded(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.0f}"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for first, *others in rows:
        print("  " + "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
