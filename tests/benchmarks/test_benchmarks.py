"""Each benchmark runs at a tiny size and prints rows that fit the page. How fast it was is nobody's concern here."""

import re
import subprocess
import sys

import pytest

from experiments.registry.project import ROOT

N = r"[0-9]+(\.[0-9]+)?"
RATE, PEAK = rf"{N} tokens per CPU s \({N} to {N}\)", rf", peak \+{N} MiB"
SHAPES = {
    "tool_calls": (
        "--prompts 1 --samples 4 --latencies 0ms --turn-tokens 4 --iterations 1 --repeats 1 --trl nowhere",
        [
            r"lightning .+, torch .+, transformers .+",
            r"no TRL here \(make trl\): nothing is compared",
            rf"2 calls of 0ms a trajectory: ours {N} s of wall time \({N} to {N}; rollouts {N}, "
            rf"training {N}\), {N} CPU s, {N} tokens/s",
        ],
    ),
    "smollm2_training": (
        "--repeats 1 --trajectories 2",
        [
            rf"SmolLM2-135M, training part of a GRPO iteration, float32: ours {N} tokens/s, peak {N} GiB; plain loop, "
            rf"2 rows at once: {N} tokens/s, {N} GiB; ours / plain {N} in speed, {N} in peak memory"
        ],
    ),
    "agent_programs": (
        "--rollouts 4 --repeats 2",
        [
            rf"4 programs at once: processor time of a turn is {N} \[{N}, {N}\] of the agent loop's \({N} ms\)",
            *(rf"{turns} turns: {N} tokens in one row, {N} in a row per request \({N} times\)" for turns in (2, 8, 32)),
        ],
    ),
    "distribution_losses": (
        "--tokens 64 --vocabulary 500 --top-k 8 --repeats 1",
        [
            rf"64 tokens, V = 500, k = 8: sampled token {N} s, \+{N} MiB; "
            + "; ".join(
                rf"{form} {N} s, \+{N} MiB \({N} and {N} of the sampled token's\)"
                for form in ("top-k", "whole vocabulary")
            )
        ],
    ),
    "trl_comparison": (
        "--prompts 2 --samples 4 --tokens 8 --micro-rows 2 --repeats 1 --iterations 1 --trl nowhere",
        [
            r"no TRL here \(make trl\): nothing is compared, parity is not checked",
            rf"GRPO, whole iteration: ours {RATE}, {N} CPU s of which training {N}, {N} s of wall time",
            *(
                rf"GRPO, training part, {lengths}: ours {RATE}{memory}"
                for lengths, memory in (
                    ("geometric lengths, 1 step", PEAK),
                    ("geometric lengths, 2 steps", ""),
                    ("equal lengths, 1 step", PEAK),
                )
            ),
            rf"distillation, geometric lengths: ours {RATE}{PEAK}",
            rf"GRPO, training part, V = 32,768: ours {RATE}{PEAK}",
            rf"distillation, V = 32,768: ours {RATE}{PEAK}",
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_prints_rows_for_the_page(name):
    words, metrics = SHAPES[name]
    command = [sys.executable, "-m", f"benchmarks.{name}", *words.split(), "--markdown"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == len(metrics), done.stdout
    for row, metric in zip(rows, metrics, strict=True):
        _, shown, machine, found, _ = (cell.strip() for cell in row.split("|"))
        assert shown == f"`python -m benchmarks.{name} {words}`"
        assert re.fullmatch(r".+, [0-9]+ cores, load [0-9.]+, commit [0-9a-f]{7,}", machine)
        assert re.fullmatch(metric, found), found


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv-trl" / "bin" / "python").exists(), reason="no .venv-trl here (make trl)")
def test_loss_gradient_and_update_are_those_of_trl():
    command = "-m benchmarks.trl_comparison --parity --prompts 2 --samples 4 --tokens 8 --micro-rows 2".split()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("parity, ")]
    losses = [row for row in rows if row.startswith("parity, loss of ")]
    assert len(rows) == 6 + len(losses) == 6 + 12
    for row in losses:
        assert all(float(x) < 1e-12 for x in re.search("by at most (.+), gradients by (.+)", row).groups()), row
    for row in rows[:6]:
        gradient, update = re.search("gradients differ by (.+) relative, weight updates by (.+)", row).groups()
        # AdamW's first step is near lr * sign(gradient), which magnifies noise; the second pass stands on its outcome.
        assert float(gradient) < (1e-3 if "second pass" in row else 5e-5), row
        assert float(update) < 1e-2, row


def test_make_benchmark_runs_every_script():
    done = subprocess.run(["make", "-n", "benchmark"], cwd=ROOT, capture_output=True, text=True, check=True)
    named = set(re.search(r"for name in ([a-z0-9_ ]+);", done.stdout).group(1).split())
    assert named == SHAPES.keys() == {p.stem for p in (ROOT / "benchmarks").glob("*.py")} - {"common", "files_touched"}
