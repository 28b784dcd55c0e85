"""Peak memory of chunked log-probs, entropy and forward KL against the naive form, at a real vocabulary.

``python -m benchmarks.chunked_logprobs [--tokens 1024] [--hidden 256] [--vocabulary 151936] [--chunk 32]``

Each form runs forward and backward in a process of its own, and what is reported is the growth of its peak resident
memory over what it held before the computation (weights and hidden states), the seconds, and a checksum of the
gradients, which must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import page

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("naive", "chunked")


def make_case(tokens: int, hidden: int, vocabulary: int):
    """Hidden states and output layers of a student and a (wider) teacher, as they leave the transformer bodies."""
    import torch

    from lightning_modules.projection import LMHead

    torch.manual_seed(0)
    student = LMHead(hidden, vocabulary, bias=False)
    teacher = torch.nn.Linear(2 * hidden, vocabulary, bias=False).requires_grad_(False)
    states = torch.randn(tokens, hidden, requires_grad=True)
    return student, teacher, states, torch.randn(tokens, 2 * hidden), torch.randint(vocabulary, (tokens,))


def naive(student, teacher, states, teacher_states, targets):
    """What one writes first: both log-softmaxes whole, kept for the backward pass."""
    log_p = student(states).log_softmax(-1)
    log_q = teacher(teacher_states).log_softmax(-1)
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return logprobs, entropy, (log_q.exp() * (log_q - log_p)).sum(-1)


def chunked(student, teacher, states, teacher_states, targets, chunk: int):
    """What the modules do: the same figures, the vocabulary a few tokens at a time."""
    import torch

    from lightning_modules.divergences import forward_kl
    from lightning_modules.projection import token_statistics

    def columns(logits, targets, teacher_states):
        with torch.no_grad():
            teacher_logits = teacher(teacher_states)
        return torch.cat([token_statistics(logits, targets), forward_kl(logits, teacher_logits)[:, None]], -1)

    return student(states, function=columns, rows=(targets, teacher_states), chunk=chunk).unbind(-1)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def measure(form: str, tokens: int, hidden: int, vocabulary: int, chunk: int) -> dict[str, float]:
    """Run one form in this process."""
    case = make_case(tokens, hidden, vocabulary)
    before, start = peak_bytes(), time.perf_counter()
    figures = naive(*case) if form == "naive" else chunked(*case, chunk)
    sum(f.mean() for f in figures).backward()
    return {
        "peak_bytes": peak_bytes() - before,
        "seconds": time.perf_counter() - start,
        "kl": float(figures[2].detach().mean()),
        "gradient": float(case[0].weight.grad.norm()) + float(case[2].grad.norm()),
    }


def compare(tokens: int, hidden: int, vocabulary: int, chunk: int) -> dict[str, dict[str, float]]:
    """Run both forms in child processes, one after the other."""
    results = {}
    for form in NAMES:
        numbers = [str(x) for x in (tokens, hidden, vocabulary, chunk)]
        command = [sys.executable, "-m", "benchmarks.chunked_logprobs", "--child", form, *numbers]
        # Freed blocks go back to the system at once, so that the peak counts live tensors, not a fragmented heap.
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "1048576"}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        results[form] = json.loads(done.stdout.splitlines()[-1])
    return results


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(sys.argv[2], *(int(x) for x in sys.argv[3:]))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunk", type=int, default=32, help="tokens whose logits exist at once")
    page.add_option(parser)
    sizes = vars(parser.parse_args())
    markdown = sizes.pop("markdown")
    results = compare(**sizes)
    figures = [
        f"{form}: peak +{r['peak_bytes'] / 2**20:.0f} MiB, {r['seconds']:.1f} s, KL {r['kl']:.5f}"
        for form, r in results.items()
    ]
    ratio = results["naive"]["peak_bytes"] / results["chunked"]["peak_bytes"]
    difference = abs(results["naive"]["gradient"] / results["chunked"]["gradient"] - 1)
    figures.append(f"naive / chunked: {ratio:.1f} in peak memory; gradient norms differ by {difference:.1e} relative")
    print(page.rows(figures) if markdown else "\n".join(figures))


if __name__ == "__main__":
    main()
