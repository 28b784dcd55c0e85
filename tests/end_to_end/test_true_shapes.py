"""Qwen3-0.6B, 4 of its 28 layers, goes through a paper's recipe: see true_shapes.py for all of it, and for others."""

import pytest

from tests.end_to_end import true_shapes


@pytest.mark.slow
def test_a_recipe_learns_at_the_published_shape(tmp_path):
    true_shapes.write_questions(tmp_path / "questions.parquet")
    true_shapes.make_model(tmp_path / "model", "grpo_qwen3_0.6b", layers=4)
    found = true_shapes.run("grpo_qwen3_0.6b", tmp_path, "float32", ranks=1)
    assert found["train/tool_calls_per_trajectory"] > 0
    assert found["train/zero_variance_groups"] == 0 and found["train/grad_norm"] > 0
    assert found["train/logprob_gap_max"] < 1e-3, "the engine sampled from other weights, or with other numbers"
    assert found["weight_sync/probe_gap"] < 1e-3, "after the step"
