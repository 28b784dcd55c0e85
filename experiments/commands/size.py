"""``make size``: whether an experiment fits on given GPUs, and how long it takes; loads nothing."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.commands.command import command, make_graph, numbers, option
from experiments.registry import sizing
from experiments.registry.constructors import arguments_of
from experiments.registry.errors import ExperimentError, nearest
from experiments.registry.files import Config
from experiments.registry.machine import assume_gpu, measured_cpu
from experiments.registry.shapes import GB, GPU_SPECS, Dimensions, GPUSpec, Precision, known_model
from experiments.registry.sizing import Adapters, Run, Strategy, Training
from experiments.stages.classes import import_class
from experiments.stages.context import RunContext
from experiments.stages.graph import Stage
from rollout.engines.vllm_cpu import CPU_KV_CACHE_BYTES

NAMES = {"self_teacher": "self-teacher", "average": "moving average"}  # of a module's attributes, in the table
GPUS = "1,8,16"
CPU = "cpu"
TOO_MUCH = "TOO MUCH"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Sized:
    """A training run on a given number of GPUs: its memory settings, amount of work and concurrency.

    Attributes:
        run: the work to do, or None if no trajectories are sampled.
        in_flight: trajectories that rollouts and engine take at once.
    """

    training: Training
    run: Run | None
    in_flight: int

    @property
    def wanted(self) -> int:
        """The number of sequences that each GPU would sample at once with unlimited memory."""
        return min(math.ceil(self.run.trajectories / self.training.gpus), self.in_flight) if self.run else 0

    def sequences(self, chip: GPUSpec) -> int:
        """Return the number of sequences that one GPU's engine can hold at once, at most ``wanted``. Each is assumed
        half as long as the longest."""
        return min(self.wanted, int(sizing.cache_tokens(self.training, chip) // max(self.training.context, 1)))


@command(
    "size",
    "whether an experiment fits on given GPUs, and estimated hours; loads nothing",
    option("--gpus", default=GPUS, help="numbers of GPUs, comma-separated"),
    option("--gpu", default="h100", help=f"{', '.join(GPU_SPECS)}; cpu: this machine's cores, measured"),
)
def size(args: argparse.Namespace, context: RunContext) -> None:
    """Print a table with memory by component, speeds and hours, one column per number of GPUs.

    Raises:
        ExperimentError: an experiment that trains nothing, an unknown GPU or model.
    """
    on_cpu = args.gpu == CPU
    if not on_cpu and args.gpu not in GPU_SPECS:
        raise ExperimentError(
            f"no GPU '{args.gpu}' is known{nearest(args.gpu, [*GPU_SPECS, CPU])}; there are: "
            f"{', '.join(GPU_SPECS)} and {CPU}"
        )
    counts = [1] if on_cpu else numbers("--gpus", args.gpus, GPUS, least=1)
    with contextlib.nullcontext() if on_cpu else assume_gpu():
        stage = make_graph(context).target()
    if stage.kind != "fit":
        raise ExperimentError(f"'{stage.name}' is of kind {stage.kind}: it trains nothing; name one that trains")
    module = module_of(stage)
    columns = [sized(stage, module, n, context.project.root) for n in counts]
    first = columns[0].training
    chip = measured_cpu("float32" if first.precision == "float32" else "bfloat16") if on_cpu else GPU_SPECS[args.gpu]
    if on_cpu:
        columns = [with_cpu_engines(columns[0], stage, chip, context.project.root)]
    models = [("policy", first.policy.parameters), *((name, d.parameters) for name, d, _ in first.frozen)]
    models += [("critic", first.critic.body)] if first.critic else []
    models += [("adapters", first.trained)] if first.adapters else []
    words = ", ".join(f"{name} {billions(count)}" for name, count in models)
    print(f"{stage.name} on {chip.name}: {words}; {first.strategy}, {first.precision}\n")
    rows = table(columns, chip)
    print_table(rows)
    peak = "measured speed of matrix products" if on_cpu else "GPU's peak"
    print(
        f"\nGB {'of all processes' if on_cpu else 'per GPU'}, computed and not measured. The roofline is the {peak}. "
        f"Times assume\nthat a run reaches {chip.efficiency:g} of it, and trajectories of half the longest length; "
        "tools and evaluation come on top."
    )
    if any(TOO_MUCH in cell for row in rows for cell in row):
        print(f"\n{TOO_MUCH}: docs/scaling.md lists what to change, in order; ARGS adds an option to this count.")


def with_cpu_engines(column: Sized, stage: Stage, chip: GPUSpec, root: Path) -> Sized:
    """Return the figures with the memory that the engines take on a CPU: weights, cache and work."""

    def share(engine: Config, parameters: float) -> float:
        if "kv_cache_bytes" not in engine:  # none, or on other machines
            return 0.0
        cache = float(engine["kv_cache_bytes"] or CPU_KV_CACHE_BYTES)
        size = element_of(engine) * parameters + cache + sizing.ENGINE_WORK
        return size / chip.memory

    _, rollouts, engine = sampling_options(stage)
    shares = {"engine_share": share(engine, column.training.policy.parameters)}
    if guide := guide_options(rollouts):
        shares["guide_share"] = share(guide, dimensions_of(guide["model"], stage, root).parameters)
    training = dataclasses.replace(column.training, engine_element=element_of(engine), **shares)
    return dataclasses.replace(column, training=training)


def element_of(engine: Config) -> int:
    """Return the bytes of a number in an engine on a CPU."""
    return BYTES[str(engine.get("dtype") or "float32")]


def options_of(config: Config | None) -> Config:
    """Return the arguments of a class in a configuration, with the class's defaults for those that are not given; empty
    without a class."""
    if not config:
        return {}
    known = arguments_of(import_class(config["class_path"], "size")).known
    defaults = {name: p.default for name, p in known.items() if p.default is not p.empty}
    return defaults | (config.get("init_args") or {})


def guide_options(rollouts: Config) -> Config:
    """Return the options of the engine that a guide plays with; empty where the rollouts have no guide."""
    return options_of((rollouts.get("guide") or {}).get("engine"))


def sampling_options(stage: Stage) -> tuple[Config, Config, Config]:
    """Return the options of a stage's data module, of its rollout system and of its engine; empty where it has none."""
    data = options_of(stage.config.get("data"))
    rollouts = options_of(data.get("rollouts"))
    return data, rollouts, options_of(rollouts.get("engine"))


def sized(stage: Stage, module: Any, gpus: int, root: Path) -> Sized:
    """Collect the figures of a stage's training run on ``gpus`` GPUs that the memory and time estimates need, as
    ``Sized``. Reads the configuration and the models' shapes."""
    model = stage.config["model"]["init_args"]
    trainer, (data, rollouts, engine) = stage.config.get("trainer") or {}, sampling_options(stage)
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
        guide_share=float(guide_options(rollouts).get("gpu_memory_utilization") or 0.0),
        sleep_mode=bool(rollouts.get("sleep_mode")),
        max_length=int(engine.get("max_length") or 4096),  # none without rollouts
        scores=bool(getattr(module, "reads_old_logprobs", True)),
    )
    in_flight = min(int(rollouts.get("concurrency", 256)), int(engine.get("max_num_seqs", 256)))
    return Sized(training, run_of(data, rollouts, model, training), in_flight)


def run_of(data: Any, rollouts: Any, model: Any, training: Training) -> Run | None:
    """Return how much an on-policy training run samples and trains. Returns None for other runs, or without
    ``iterations``."""
    if not data.get("prompts_per_iteration") or not data.get("iterations"):
        return None
    protocol = options_of(rollouts.get("protocol"))
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
    """Return the rank and the linear modules of the option ``model.lora``, or None without LoRA."""
    if not lora:
        return None
    from lightning_modules.models.lora import ALL_LINEAR, LoRA

    settings = LoRA(**lora)
    names = () if settings.targets == [ALL_LINEAR] else tuple(t.rpartition(".")[2] for t in settings.targets)
    return Adapters(settings.rank, names)


def frozen_models(module: Any, stage: Stage, root: Path, low_rank: bool) -> tuple[tuple[str, Dimensions, int], ...]:
    """Return (name, shape, bytes per parameter) of each model that is not trained. With LoRA, a frozen model from the
    policy's folder is the base and costs nothing, unless it is a moving average."""
    return tuple(
        (NAMES.get(name, name), dimensions_of(path, stage, root), BYTES[dtype])
        for name, (path, dtype) in module.frozen_models().items()
        if not low_rank or path != module.policy_path or name == "average"
    )


def module_of(stage: Stage) -> Any:
    """Return the Lightning module that ``stage`` trains, without loading its models. Raises ExperimentError if the
    module refuses its options."""
    from experiments.stages.parser import cli, instantiate, refusals
    from experiments.stages.validate import check_module

    where = f"experiment '{stage.name}'"
    if not stage.arguments:
        with refusals(f"{where}: model"):
            return instantiate(stage.config["model"], "model")
    return check_module(cli(stage.config, stage.arguments, where, instantiate=False), where)


def strategy_of(value: Any, gpus: int) -> tuple[Strategy, dict[str, Any]]:
    """Return the name and the options of the setting ``trainer.strategy``."""
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
    """Return the shape of the model at ``path``. Read it from the model's folder, else from the stage that will make
    the model, else from the published shapes.

    Raises:
        ExperimentError: an unknown model.
    """
    file = root / path / "config.json"
    if file.is_file():
        try:
            return Dimensions.of(json.loads(file.read_text()))
        except ValueError as error:
            raise ExperimentError(f"{file}: {error}. Give a model of these of about the same size") from None
    for upstream in stage.upstream:
        made_from = ((upstream.config.get("model") or {}).get("init_args") or {}).get("policy")
        made_from = made_from or ((upstream.config.get("task") or {}).get("init_args") or {}).get("source")
        if (root / path).is_relative_to(upstream.folder) and made_from:
            return dimensions_of(made_from, upstream, root)
    if (config := known_model(Path(path).name)) is not None:
        return Dimensions.of(config)
    raise ExperimentError(
        f"'{stage.name}': unknown model '{path}': no such folder, no stage makes it, and "
        "experiments/registry/shapes.py has no model of that name; download it, or train the stage that makes it"
    )


def table(columns: Sequence[Sized], chip: GPUSpec) -> list[list[str]]:
    """Return the table of memory and speeds as rows of text cells. The first row is the head."""
    trainings = [c.training for c in columns]
    parts = [sizing.memory(t, chip) for t in trainings]
    device = "machine" if chip.is_cpu else "GPU"
    rows = [["machines" if chip.is_cpu else "GPUs", *(str(t.gpus) for t in trainings)]]
    for name in dict.fromkeys(name for part in parts for name in part):
        if any(part.get(name) for part in parts):
            rows.append([name, *(f"{part.get(name, 0) / GB:.1f}" for part in parts)])
    if any(sampling := [sizing.sampling_memory(t, chip) for t in trainings]):
        rows.append(["training, engine asleep", *(f"{sum(part.values()) / GB:.1f}" for part in parts)])
        rows.append(["sampling, optimizer away", *(f"{sum(part.values()) / GB:.1f}" for part in sampling)])
    peaks = [sizing.peak(t, chip) for t in trainings]
    cells = (f"{size / GB:.1f}" + ("" if size <= chip.memory else f" {TOO_MUCH}") for size in peaks)
    rows.append([f"all of {chip.memory / GB:.0f}", *cells])
    rows.append(["training tok/s, roofline", *(rounded(sizing.training_speed(t, chip)) for t in trainings)])
    if trainings[0].engine_share and columns[0].run is not None:
        rows.append([f"cache, tokens per {device}", *(rounded(sizing.cache_tokens(t, chip)) for t in trainings)])
        rows.append([f"sequences at once per {device}", *(f"{c.sequences(chip)} of {c.wanted}" for c in columns)])
        speeds = [sizing.generation_speed(c.training, chip, c.sequences(chip)) for c in columns]
        rows.append(["sampled tok/s, roofline", *(rounded(speed) if speed else "-" for speed in speeds)])
        times = [sizing.hours(c.training, chip, c.run, c.sequences(chip)) for c in columns if c.run]
        cells = (f"{time:.2g}" if time < 10 else rounded(time) for time in times)
        rows.append([f"hours, at {chip.efficiency:g} of it", *cells])
        if chip.is_cpu:
            minutes = (60 * time / c.run.iterations for time, c in zip(times, columns, strict=True) if c.run)
            rows.append(["minutes per iteration", *(f"{value:.2g}" for value in minutes)])
    return rows


def billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def rounded(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.0f}"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for first, *others in rows:
        print("  " + "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
