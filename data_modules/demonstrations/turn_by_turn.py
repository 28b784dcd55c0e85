"""Stage: rewrites conversations as trajectories with a separate prompt for every turn (window of history)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_modules.datasets.files import DatasetError, expand
from data_modules.evaluation_data import as_list
from rollout.protocols.base import ChatProtocol, PerTurnPrompts, sampled_turns
from rollout.storage import load_trajectories, save_trajectories
from rollout.trajectory import Trajectory, Turn


class TurnByTurn:
    """Rewrites saved conversations so that every turn has a separate prompt, written by a protocol with a window of
    history. They serve the cold start of a model that acts turn by turn. The sampled ids stay the same.

    Args:
        trajectories: files written by rollout.storage, or folders of them: one conversation each, of tasks that the
            protocol can render.
        protocol: a protocol with a window.

    Raises:
        ValueError: the protocol has no window.
    """

    def __init__(self, trajectories: Sequence[str], protocol: ChatProtocol) -> None:
        if not isinstance(protocol, PerTurnPrompts) or not protocol.per_turn_prompts:
            raise ValueError(f"{type(protocol).__name__} does not write a prompt for every turn; give it a window")
        self.files, self.protocol = as_list("trajectories", trajectories), protocol

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Rewrite each trajectory file and write it to ``trajectories/part-<n>.parquet`` in the output folder.

        Raises:
            DatasetError: no file, or a trajectory that cannot be written so.
        """
        turns = episodes = 0
        for number, path in enumerate(expand(self.files)):
            made = [self._of(t, f"{path}, trajectory {i}") for i, t in enumerate(load_trajectories(path))]
            save_trajectories(output_dir / "trajectories" / f"part-{number:05d}.parquet", made)
            episodes, turns = episodes + len(made), turns + sum(len(t.turns) for t in made)
        return {"trajectories": episodes, "turns": turns}

    def _of(self, trajectory: Trajectory, where: str) -> Trajectory:
        if any(turn.prompt_ids is not None for turn in trajectory.turns):
            raise DatasetError(f"{where}: its turns already have separate prompts; expected one conversation")
        turns: list[Turn] = []
        ids: list[int] = []
        logprobs: list[float] = []
        for k, turn in enumerate(trajectory.turns):
            calls = [call for call in trajectory.calls if call.turn < k]
            try:
                before = trajectory.turns[:k]
                sampled = sampled_turns(trajectory.response_ids, before)
                prompt = self.protocol.turn_prompt(trajectory.task, before, calls, sampled=sampled)
            except ValueError as error:
                raise DatasetError(f"{where}: {error}") from error
            end = len(ids) + turn.end - turn.start
            changes = {"start": len(ids), "end": end, "observation_end": end, "observation_truncated": prompt.cut}
            turns.append(dataclasses.replace(turn, **changes, prompt_ids=prompt.ids))
            ids += trajectory.response_ids[turn.start : turn.end]
            logprobs += trajectory.logprobs[turn.start : turn.end]
        return trajectory.replace(
            prompt_ids=turns[0].prompt_ids if turns else trajectory.prompt_ids,
            response_ids=tuple(ids),
            loss_mask=(1,) * len(ids),
            logprobs=tuple(logprobs),
            turns=tuple(turns),
        )
