"""Compares a GRPO iteration with two tool calls per trajectory here and in TRL's tool loop, by call latency.

    python -m benchmarks.tool_calls [--prompts 4] [--samples 4] [--turn-tokens 24] [--repeats 5]
    python -m benchmarks.tool_calls --model MODEL --questions FILE --threads 2 --micro-rows 2 --latencies 0ms

Both sides have the same random Qwen3 in float32, prompts, optimiser and one thread. The first two turns of a trajectory
are read as calls, whatever the text. Each call sleeps for 0, 50 or 200 ms, or a log-normal time (median 50 ms, sigma
1), the same for both sides. An iteration consists of rollouts, rewards and one optimiser step; the first of each
measurement is not counted. The sides take turns. The output is the median over repeats of the median iteration, in wall
time and processor time (including our engine's), and the wall time of training alone (scoring, forward, backward,
optimiser) and of the rest (rollouts; here also the weight push).

TRL's trainer generates with transformers. It runs the tools of one trajectory after those of another, also asynchronous
tools (``GRPOTrainer._tool_call_loop``, TRL 1.16), so a plain function represents both. Its asynchronous trainer is not
compared, because it samples from a vLLM server with weights sent by NCCL and needs GPUs.

With ``--model`` (the cold start of smollm2_sft) and ``--questions`` (the atlas's train.parquet) the model is real, and
its turns end where it ends them. Numbers of tokens then differ by sampling, so tokens per second are printed, too.

TRL has its own environment (``make trl``); without it, only our side is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks import common
from benchmarks.against_trl.tool_cases import CALLS, LATENCIES, MODEL, ToolCase
from benchmarks.trl_comparison import TRL_PYTHON, side

NO_TRL = "no TRL here (make trl): nothing is compared"
RESPONSE_TOKENS = 512  # enough for two results and three turns
KEYS = ("seconds", "cpu", "training_s", "tokens")
Times = list[dict[str, float]]  # of the median iteration of each repeat


def metric(latency: str, times: dict[str, Times]) -> str:
    parts, medians = [], []
    for label, repeats in times.items():
        wall = [row["seconds"] for row in repeats]
        middle = {
            "wall time": statistics.median(wall),
            "processor time": statistics.median(row["cpu"] for row in repeats),
            "training": statistics.median(row["training_s"] for row in repeats),
            "rollouts": statistics.median(row["seconds"] - row["training_s"] for row in repeats),
        }
        rate = statistics.median(row["tokens"] / row["seconds"] for row in repeats)
        parts.append(
            f"{label} {middle['wall time']:.2f} s of wall time ({min(wall):.2f} to {max(wall):.2f}; rollouts "
            f"{middle['rollouts']:.2f}, training {middle['training']:.2f}), {middle['processor time']:.2f} CPU s, "
            f"{rate:.0f} tokens/s"
        )
        medians.append(middle)
    if len(medians) > 1:
        ours, theirs = medians
        parts.append("TRL / ours " + ", ".join(f"{theirs[key] / ours[key]:.2f} in {key}" for key in ours))
    return f"{CALLS} calls of {latency} a trajectory: {'; '.join(parts)}"


def metrics(options: argparse.Namespace) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        sides = {"ours": stack.enter_context(side("ours_tools", sys.executable))}
        sizes = options.prompts, options.samples, options.turn_tokens, RESPONSE_TOKENS
        sides["ours"].ask("prepare", folder, *sizes, options.model, options.questions)
        if options.trl.exists():
            sides["TRL"] = stack.enter_context(side("theirs_tools", options.trl))
        yield ", ".join(f"{k} {v}" for one in sides.values() for k, v in one.versions.items())
        if len(sides) == 1:
            yield NO_TRL
        found: dict[str, dict[str, Times]] = {latency: {label: [] for label in sides} for latency in options.latencies}
        for repeat in range(options.repeats):
            for latency, times in found.items():
                for label, one in sides.items():
                    counts = {"iterations": options.iterations, "threads": options.threads}
                    counts["micro_rows"] = options.micro_rows or options.prompts * options.samples
                    case = ToolCase("grpo", MODEL, None, **counts, latency=latency)
                    rows = one.ask("measure", case, folder)["rows"]
                    middle = {key: statistics.median(row[key] for row in rows) for key in KEYS}
                    times[label].append(middle)
                    seconds = f"{middle['seconds']:.2f} s, {middle['cpu']:.2f} CPU s"
                    print(f"{repeat + 1} {latency}, {label}: {seconds}", file=sys.stderr, flush=True)
        for latency, times in found.items():
            yield metric(latency, times)


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="trajectories per prompt")
    parser.add_argument("--latencies", nargs="+", choices=LATENCIES, default=list(LATENCIES), help="of a call")
    parser.add_argument("--turn-tokens", type=int, default=24, help="sampled in a turn on average")
    parser.add_argument("--model", help="folder of a real model, instead of a random one")
    parser.add_argument("--questions", help="question file for the real model")
    parser.add_argument("--threads", type=int, default=1, help="of each side")
    parser.add_argument("--micro-rows", type=int, help="rows that go through the model at once; default: all")
    parser.add_argument("--iterations", type=int, default=3, help="per measurement, the first not counted")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trl", type=Path, default=TRL_PYTHON, help="interpreter of the environment that has TRL")
    options = parser.parse_args()
    common.print_metrics(options, metrics(options))


if __name__ == "__main__":
    main()
