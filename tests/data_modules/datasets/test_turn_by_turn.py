"""Conversations become what a protocol with a window would have rolled out."""

import dataclasses

import pytest

from data_modules.datasets.files import DatasetError
from data_modules.demonstrations.turn_by_turn import TurnByTurn
from rollout.protocols.episodes import EpisodeProtocol
from rollout.storage import load_trajectories, save_trajectories
from tests.lightning_modules.algorithms.episode_helpers import episodes


def test_a_conversation_becomes_what_would_have_been_rolled_out(model_dir, tmp_path):
    talked, _ = episodes(model_dir, None)
    rolled_out, protocol = episodes(model_dir, 2)
    save_trajectories(tmp_path / "talks.parquet", talked)
    figures = TurnByTurn([str(tmp_path / "talks.parquet")], protocol).run(tmp_path)
    made = load_trajectories(tmp_path / "trajectories" / "part-00000.parquet")
    assert figures == {"trajectories": len(talked), "turns": sum(len(t.turns) for t in talked)}
    for a, b in zip(made, rolled_out, strict=True):
        same = {"seconds": 0.0, "tokens_computed": None}
        assert a.replace(**same) == b.replace(**same)


def test_what_cannot_be_written_so(model_dir, tmp_path):
    talked, protocol = episodes(model_dir, None)
    with pytest.raises(ValueError, match="give it a window"):
        TurnByTurn(["x"], protocol)
    rolled_out, protocol = episodes(model_dir, 2)
    save_trajectories(tmp_path / "a.parquet", rolled_out[:1])
    with pytest.raises(DatasetError, match="trajectory 0: its turns already have separate prompts"):
        TurnByTurn([str(tmp_path / "a.parquet")], protocol).run(tmp_path)
    nothing = talked[0].replace(task=dataclasses.replace(talked[0].task, question=" "))
    save_trajectories(tmp_path / "b.parquet", [nothing])
    with pytest.raises(DatasetError, match="shows nothing to begin with"):
        TurnByTurn([str(tmp_path / "b.parquet")], EpisodeProtocol(str(model_dir), "household")).run(tmp_path)
