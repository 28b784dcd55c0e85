"""Trajectories in parquet: an exact round trip, and clear words about files that are none."""

import asyncio
import json

import polars as pl
import pytest

from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.loop.agent_loop import AgentLoop, Budgets, Request
from rollout.storage import TrajectoryFileError, load_trajectories, save_trajectories
from rollout.tools.search import SearchTool
from rollout.trajectory import Action, ActionKind, Fork, Reward, StopReason, Task, Trajectory, Turn
from tests.rollout.scripted import TASK, TextEngine, ToyRetriever, search_then_answer


@pytest.fixture(scope="module")
def trajectory(protocol):
    """One with a search, documents and an answer."""
    engine = TextEngine(protocol, search_then_answer)
    loop = AgentLoop(engine, protocol, QuestionAnswering({"search": SearchTool(ToyRetriever())}), Budgets())

    async def run():
        await engine.start()
        return await loop.run(TASK, group="q1", index=0, request=Request(0, SamplingParams(200)))

    return asyncio.run(run())


def variants(trajectory):
    """Everything that can be None, empty or odd."""
    nested = {"hops": 2, "nested": {"list": [1, 2.5, None, "ü"]}}
    odd = Task("q/2", 'Who "was" Ωμέγα\n?', (), "toy", (), nested, (("system", ""), ("user", "Answer:\nΩ?")))
    n = len(trajectory.response_ids)
    precise = tuple(-(0.1 + 0.2) / 3 - 1e-17 * i if m else 0.0 for i, m in enumerate(trajectory.loss_mask))
    unfinished = Turn(0, 2, Action(ActionKind.INVALID, error="no tag"), "length", 7, 2, False, 0.1 + 0.2, 1 / 3)
    return [
        trajectory,
        trajectory.replace(reward=Reward(0.1 + 0.2, {"em": 1.0, "f1": 1 / 3}), index=1, logprobs=precise),
        trajectory.replace(task=odd, fork=Fork(0, n), tokens_computed=None, answer="", index=2),
        Trajectory(TASK, (), (), (), (), (), (), StopReason.INFRASTRUCTURE, "q1", 3),
        Trajectory(TASK, (1,), (2, 3), (1, 1), (-1.5, 0.0), (unfinished,), (), StopReason.LENGTH, "q1", 4),
    ]


def test_round_trip_is_exact(trajectory, tmp_path):
    path = tmp_path / "deep" / "trajectories.parquet"
    save_trajectories(path, variants(trajectory))
    assert load_trajectories(path) == variants(trajectory)
    assert trajectory.calls[0].result.documents  # the round trip had documents to carry
    save_trajectories(path, [])  # replaces
    assert load_trajectories(path) == []
    assert [p.name for p in path.parent.iterdir()] == ["trajectories.parquet"]


def test_files_of_before_prompts_were_recorded_are_read(trajectory, tmp_path):
    save_trajectories(tmp_path / "t.parquet", [trajectory])
    pl.read_parquet(tmp_path / "t.parquet").drop("prompt").write_parquet(tmp_path / "old.parquet")
    assert load_trajectories(tmp_path / "old.parquet") == [trajectory]


def test_files_of_before_turns_had_entropies_are_read(trajectory, tmp_path):
    save_trajectories(tmp_path / "t.parquet", [trajectory])
    frame = pl.read_parquet(tmp_path / "t.parquet")
    turns = [{k: v for k, v in turn.items() if k not in ("entropy", "branch_probability")}
             for turn in json.loads(frame["turns"][0])]  # fmt: skip
    frame.with_columns(pl.lit(json.dumps(turns)).alias("turns")).write_parquet(tmp_path / "old.parquet")
    assert load_trajectories(tmp_path / "old.parquet") == [trajectory]


def test_files_of_before_cut_turns_were_marked_are_read(trajectory, tmp_path):
    save_trajectories(tmp_path / "t.parquet", [trajectory])
    old = pl.col("turns").str.replace_all(', "ended": true', "", literal=True)
    pl.read_parquet(tmp_path / "t.parquet").with_columns(old).write_parquet(tmp_path / "old.parquet")
    assert "ended" not in pl.read_parquet(tmp_path / "old.parquet")["turns"].item()
    assert load_trajectories(tmp_path / "old.parquet") == [trajectory]


def test_columns_are_typed_for_other_readers(trajectory, tmp_path):
    save_trajectories(tmp_path / "t.parquet", [trajectory])
    frame = pl.read_parquet(tmp_path / "t.parquet")
    assert frame["response_ids"].to_list() == [list(trajectory.response_ids)]
    assert frame.schema["logprobs"] == pl.List(pl.Float64) and frame["reward"].to_list() == [None]


def test_what_would_not_come_back_is_refused(trajectory, tmp_path):
    for metadata in ({"a": (1, 2)}, {1: "a"}, {"a": object()}):
        odd = trajectory.replace(task=Task("q", "why?", (), "toy", (), metadata))
        with pytest.raises(TrajectoryFileError, match="q1/0: metadata"):
            save_trajectories(tmp_path / "t.parquet", [odd])
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_the_old_file(trajectory, tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    save_trajectories(path, [trajectory])

    def full(self, file, *args, **kwargs):
        with open(file, "wb") as out:
            out.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(OSError, match="no room"):
        save_trajectories(path, [])
    assert load_trajectories(path) == [trajectory] and list(tmp_path.iterdir()) == [path]
