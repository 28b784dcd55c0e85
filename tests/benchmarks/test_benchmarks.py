"""Each benchmark runs at a tiny size and prints rows that fit the page. How fast it was is nobody's concern here."""

import re
import subprocess
import sys

import pytest

from experiments.project import ROOT

N = r"[0-9]+(\.[0-9]+)?"
ENGINE = rf"{N} s, {N} CPU s, [0-9]+ tokens per CPU s, {N} trajectories per CPU s"
RATE, PEAK = rf"{N} tokens per CPU s \({N} to {N}\)", rf", peak \+{N} MiB"
SAMPLERS = ("independent", "ARPO fixed", "ARPO as published")
SHAPES = {
    "retrieval": (
        "--passages 50 --queries 8 --repeats 1",
        [
            rf"{size} queries per request, {flight} at once: merged {N}/s, per query {N}/s, ratio {N}"
            for size, flight in ((1, 1), (1, 64), (64, 1), (64, 4))
        ],
    ),
    "engines": (
        "--prompts 1 --samples 2 --skip-vllm",
        [
            rf"transformers generate: {ENGINE}, ratio 1\.00, 0 prefix tokens spared",
            rf"TransformersEngine: {ENGINE}, ratio {N}, [1-9][0-9]* prefix tokens spared",
        ],
    ),
    "weight_push": (
        "--layers 1 --hidden 64 --repeats 1",
        [
            rf"{way}: [0-9]+ ms for {N} MiB, [0-9]+ MiB/s, ratio {N}"
            for way in (
                "own engine, shared memory",
                "own engine, with checksums",
                "server, shared memory",
                "server, HTTP buckets",
            )
        ],
    ),
    "rollouts": (
        "--trajectories 2 --turns 1 --repeats 1",
        [
            rf"search takes {ms} ms \(median\): agent loop {N} trajectories/s, barrier per turn {N}/s, ratio {N}"
            for ms in (0, 50, 200)
        ],
    ),
    "sandbox": (
        "--programs 2 --pause-ms 0 --at-once 1 2",
        [
            rf"{n} at once: warm pool {N} ms \(ratio {N}\), forked when asked {N} ms \(ratio {N}\), "
            rf"sandbox per program {N} ms \(ratio {N}\), unprotected process {N} ms"
            for n in (1, 2)
        ],
    ),
    "branching": (
        "--prompts 1 --samples 4",
        [
            rf"critical path of 2 searches of 50 ms: {N} ms",
            *(
                rf"16 trajectories, {name}: {N} ms, {N} of the critical path"
                for name in (*SAMPLERS, "barrier per turn", "searches one after the other")
            ),
            *(rf"4 prompts of 8, 8 slots, {name}: {N} s, the engine waits {N}% of it" for name in SAMPLERS),
            *(
                rf"1 prompts of 4, {name}: [0-4] forks, [0-9]+ searches executed, [0-9]+ tokens computed, "
                rf"[0-9]+ without prefix reuse, ratio 0\.[0-9]+"
                for name in SAMPLERS[:2]
            ),
            *(
                rf"orchestration, {name}: -?{N} us of processor time per turn \([0-9]+ turns; .+ taken off\)"
                for name in SAMPLERS
            ),
        ],
    ),
    "household": (
        "--steps 20",
        [
            rf"1 games, [0-9]+ steps: simulator {N} steps/s; no ALFWorld here \(make alfworld\)"
            rf"|1 games, [0-9]+ steps without a difference: simulator {N} steps/s, ALFWorld {N} steps/s, ratio {N}"
        ],
    ),
    "staleness": (
        "--prompts 1 --samples 2 --turns 1 --iterations 3 --repeats 1",
        [
            rf"search takes {ms} ms \(median\), {mode}: {N} s per iteration, {N} s of them waiting for rollouts, "
            rf"[0-9]+% of the generation hidden, tokens {lag} iterations old, ratio {N}"
            for ms in (0, 50, 200)
            for mode, lag in (
                ("staleness 0", r"0\.00"), ("staleness 1, finish", r"1\.00"), ("staleness 1, continue", r"[01]\.[0-9]+")
            )
        ],
    ),
    "step_weights": (
        "--rows 2 --tokens 200 --turns 4 --repeats 1",
        [
            rf"2 x 200 tokens: at once {N} CPU ms, position by position {N} CPU ms, ratio {N}; "
            r"weights differ by ([0-9]e-(0[6-9]|1[0-9])|0e\+00)"
        ],
    ),
    "sod_cost": (
        "--prompts 1 --samples 2 --turns 2 --repeats 1",
        [
            *(rf"{name}: {N} CPU s per step, peak \+{N} MiB" for name in ("GRPO", "OPD", "SOD")),
            *(rf"{names}: {N} in time, {N} in peak memory" for names in ("SOD / OPD", "OPD / GRPO")),
        ],
    ),
    "gpu": (
        "--tiny --prompts 2 --samples 2 --turns 1 --turn-tokens 8 --latency-ms 5 --iterations 3",
        [
            rf"tiny, staleness {k}: training [0-9,]+ tok/s, waiting for rollouts {N} s \([0-9,]+ sampled tok/s\), "
            rf"weight sync {N} s, iteration {N} s, {N} trajectories/s"
            for k in (0, 1)
        ],
    ),
    "packing": (
        "--rows 4 --budget 1200 --layers 1 --hidden 32 --repeats 1",
        [
            rf"{low} to {high} tokens, {form}: {N} tokens per CPU s, ratio {N}, padding {N}%, [1-9][0-9]* micro-batches; "
            r"gradient norms differ by ([0-9]e-(0[4-9]|1[0-9])|0e\+00)"
            for low, high in (("100", "1,000"), ("400", "500"))
            for form in ("unsorted", "sorted", "packed")
        ],
    ),
    "memory": (
        "--layers 1 --hidden 64 --rows 3 --techniques packing",
        [
            rf"packing, padded: peak \+{N} MiB, the naive form",
            rf"packing, packed: peak \+{N} MiB, naive / this {N}",
        ],
    ),
    "sharding": (
        "--layers 1 --hidden 64 --cases zero3-few-sub-groups ddp",
        [
            rf"{case}: peak \+{N} MiB a rank, counted {N} \(loading {N}, wrapping {N}, backward {N}, step {N}\); "
            rf"between steps {N}, counted {N}; {ratio}"
            for case, ratio in (
                ("ddp", "the naive form"), ("zero3-few-sub-groups", rf"naive / this {N}, counted 1\.[0-9]+")
            )
        ],
    ),
    "trl_comparison": (
        "--prompts 2 --samples 4 --tokens 8 --micro-rows 2 --repeats 1 --iterations 1 --skip-vllm --trl nowhere",
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
    "chunked_logprobs": (
        "--tokens 64 --hidden 64 --vocabulary 20000 --chunk 8",
        [
            rf"naive: peak \+{N} MiB, {N} s, KL {N}",
            rf"chunked: peak \+{N} MiB, {N} s, KL {N}",
            rf"naive / chunked: {N} in peak memory; gradient norms differ by 0\.0e\+00 relative"
            rf"|naive / chunked: {N} in peak memory; gradient norms differ by [0-9.]+e-(0[4-9]|1[0-9]) relative",
        ],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_prints_rows_for_the_page(name):
    words, figures = SHAPES[name]
    command = [sys.executable, "-m", f"benchmarks.{name}", *words.split(), "--markdown"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == len(figures), done.stdout
    for row, figure in zip(rows, figures, strict=True):
        _, shown, machine, found, _ = (cell.strip() for cell in row.split("|"))
        assert shown == f"`python -m benchmarks.{name} {words}`"
        assert re.fullmatch(r".+, [0-9]+ cores, load [0-9.]+, commit [0-9a-f]{7,}", machine)
        assert re.fullmatch(figure, found), found
    if name == "chunked_logprobs":
        naive, chunked = (float(re.search("KL ([0-9.]+)", row).group(1)) for row in rows[:2])
        assert naive == pytest.approx(chunked, rel=1e-3), "both forms compute the same divergence"


@pytest.mark.skipif(not (ROOT / ".venv-trl" / "bin" / "python").exists(), reason="no .venv-trl here (make trl)")
def test_loss_gradient_and_update_are_those_of_trl():
    command = "-m benchmarks.trl_comparison --parity --prompts 2 --samples 4 --tokens 8 --micro-rows 2".split()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("parity, ")]
    assert len(rows) == 6
    for row in rows:
        gradient, update = re.search("gradients differ by (.+) relative, weight updates by (.+)", row).groups()
        # AdamW's first step is near lr * sign(gradient), which magnifies noise; the second pass stands on its outcome.
        assert float(gradient) < (1e-3 if "second pass" in row else 5e-5), row
        assert float(update) < 1e-2, row


def test_make_benchmark_runs_every_script():
    done = subprocess.run(["make", "-n", "benchmark"], cwd=ROOT, capture_output=True, text=True, check=True)
    named = set(re.search(r"for name in ([a-z_ ]+);", done.stdout).group(1).split())
    by_itself = {"gpu"}  # measures nothing where there is none
    assert named | by_itself == SHAPES.keys() == {p.stem for p in (ROOT / "benchmarks").glob("*.py")} - {"page"}
