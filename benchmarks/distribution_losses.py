"""Compares what a distillation loss costs by how much of the distributions it sees, on a CPU with one thread.

``python -m benchmarks.distribution_losses [--tokens 2048] [--vocabulary 151936] [--top-k 256] [--repeats 3]``

Each form runs the output layers and the loss, forward and backward, on given hidden states of 1,024 dimensions in
float32, as a micro-batch of ``DivergenceLoss`` does:

* sampled token: its log-prob, and the entropy for the log, as a policy loss without an entropy bonus;
* top-k: these, and the reverse KL over the k likeliest tokens of a teacher and the rest;
* whole vocabulary: these, and the reverse KL over all tokens, from the teacher's hidden states.

The teacher's own pass before the update is in none of them.

Each measurement is a separate process. The output is the median of seconds, and the rise of the memory's peak; both
also as a ratio to the sampled token's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks import common
from lightning_modules.advantage_transforms.divergence_loss import whole_divergence
from lightning_modules.maths.divergences import reverse_kl, with_rest
from lightning_modules.models.projection import LMHead, TokenStatistics

HIDDEN = 1024


def sampled(hidden: Tensor, head: LMHead, targets: Tensor, *_: object) -> Tensor:
    return head(hidden, TokenStatistics(entropy=True), (targets,))[:, 0].sum()  # the entropy is logged only


def top_k(hidden: Tensor, head: LMHead, targets: Tensor, teacher: LMHead, states: Tensor, k: int) -> Tensor:
    # A teacher's likeliest tokens are made before the update; here any will do.
    ids = torch.randint(head.out_features, (len(hidden), k))
    judged = (torch.randn(len(hidden), k).log_softmax(-1)) - 0.1
    found = head(hidden, TokenStatistics(entropy=True), (torch.cat([targets[:, None], ids], 1),))
    student = found[:, 1 : 1 + k]
    return found[:, 0].sum() + reverse_kl(with_rest(student, "tail"), with_rest(judged, "tail"), True).sum()


def whole(hidden: Tensor, head: LMHead, targets: Tensor, teacher: LMHead, states: Tensor, k: int) -> Tensor:
    divergence = partial(whole_divergence, teacher_head=teacher, divergence=reverse_kl, temperature=1.0)
    return sampled(hidden, head, targets) + head(hidden, divergence, (states,)).sum()


FORMS: dict[str, Callable[..., Tensor]] = {"sampled token": sampled, "top-k": top_k, "whole vocabulary": whole}


def measure(form: str, tokens: int, vocabulary: int, k: int) -> tuple[float, float]:
    """Return the seconds of one form and the rise of its process's peak memory in MiB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head, teacher = (LMHead(HIDDEN, vocabulary, bias=False) for _ in range(2))
    hidden, states = torch.randn(tokens, HIDDEN, requires_grad=True), torch.randn(tokens, HIDDEN)
    head.weight.grad = torch.zeros_like(head.weight)
    targets = torch.randint(vocabulary, (tokens,))
    before, began = peak(), time.perf_counter()
    FORMS[form](hidden, head, targets, teacher, states, k).backward()
    return time.perf_counter() - began, peak() - before


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def metrics(options: argparse.Namespace) -> Iterator[str]:
    found: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
    for _ in range(options.repeats):
        for form, rows in found.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure, (form, options.tokens, options.vocabulary, options.top_k)))
    base = [max(statistics.median(values), 1e-3) for values in zip(*found["sampled token"], strict=True)]
    parts = []
    for form, rows in found.items():
        seconds, mebibytes = (statistics.median(values) for values in zip(*rows, strict=True))
        ratios = f" ({seconds / base[0]:.2f} and {mebibytes / base[1]:.2f} of the sampled token's)"
        parts.append(f"{form} {seconds:.1f} s, +{mebibytes:.0f} MiB{'' if form == 'sampled token' else ratios}")
    yield f"{options.tokens} tokens, V = {options.vocabulary:,}, k = {options.top_k}: {'; '.join(parts)}"


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = common.make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--top-k", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    common.print_metrics(options, metrics(options))


if __name__ == "__main__":
    main()
