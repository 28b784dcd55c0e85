"""Two real ranks: every rank reports all questions, and one file is written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import polars as pl

WORKER = """
import json, sys
import lightning as L
from callbacks.arcap import ARCap
from callbacks.evaluation import Evaluation
from callbacks.trajectory_log import best_and_worst
from callbacks.common import gather_lists
from tests.callbacks.helpers import EvaluationData, Hands, make_call, make_trajectory

stage = sys.argv[1]
trainer = L.Trainer(default_root_dir=stage, accelerator="cpu", devices=2, strategy="ddp", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    callbacks=[Evaluation(), ARCap()])
rank = trainer.global_rank
answers = {0: ["grey harbor", "x", "grey harbor"], 1: ["x"]}[rank]
questions = [make_trajectory(f"r{rank}q{i}", answer=a) for i, a in enumerate(answers)]
batches = {0: [questions[:2], questions[2:]], 1: [questions, []]}[rank]  # rank 1's last batch is empty
metrics = trainer.test(Hands(), datamodule=EvaluationData({"agent": batches}), verbose=False)[0]
assert metrics["test/em"] == 0.5 and metrics["test/em_n"] == 4.0, metrics
assert [t.group for t in gather_lists(questions)] == ["r0q0", "r0q1", "r0q2", "r1q0"]
"""


def test_two_ranks_report_all_questions_once(tmp_path):
    root = Path(__file__).resolve().parents[2]
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in (0, 1):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(root),
            "TORCHELASTIC_RUN_ID": "test", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, str(script), str(tmp_path / "stage")]
        processes.append(subprocess.Popen(command, env=environment, cwd=root, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    report = json.loads((tmp_path / "stage" / "evaluation.json").read_text())
    assert report["test"]["em"]["n"] == 4 and report["test"]["em"]["mean"] == 0.5
    frame = pl.read_parquet(tmp_path / "stage" / "evaluation" / "test.parquet")
    assert frame["id"].to_list() == ["r0q0", "r0q1", "r0q2", "r1q0"]
