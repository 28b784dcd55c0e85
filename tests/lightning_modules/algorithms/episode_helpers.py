"""Episodes as the agent loop makes them: a scripted player in a small world, turn by turn or as one conversation."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import lightning as L
from torch.utils.data import DataLoader

from rollout.engines.base import SamplingParams
from rollout.environments.base import FirstObservation, StepResult
from rollout.loop.agent_loop import AgentLoop, Budgets, Request
from rollout.protocols.episodes import EpisodeProtocol
from rollout.skills.injection import Skills
from rollout.skills.retrieval import TaskType
from rollout.trajectory import CallOutcome, Task, ToolResult
from tests.rollout.scripted import TextEngine

TYPES = ("pick_and_place_simple", "pick_heat_then_place_in_recep")
TASKS = [Task(f"t{i}", "-", (), TYPES[i % 2]) for i in range(3)]


class Rooms:
    """Three rooms in a row; the third is the goal, worth 10. A turn that says "go" goes on."""

    def __init__(self, task, *, tools_enabled=True):
        self.task, self.room = task, 0

    async def reset(self):
        return FirstObservation(
            f"You are in room 0. Your task is to: reach room 3 ({self.task.id}).", {"admissible": ["go"]}
        )

    async def step(self, action):
        self.room += "go" in action.calls[0].arguments["action"]
        won = self.room == 3
        result = ToolResult(f"Room {self.room}.", CallOutcome.OK, info={"admissible": ["go", "wait"]})
        return StepResult((result,), (0.0,), won, 10.0 if won else 0.0, {"success": float(won)})

    async def close(self):
        pass


def say(context, seed):
    """Mostly "go", sometimes without the tags, by the seed."""
    rng = random.Random(seed)
    word = rng.choice(["go", "go", "wait", "go on now"])
    text = word if rng.random() < 0.3 else f"<action>{word}</action>"
    return text + "<|im_end|>"


def episodes(folder, window, n=4, tasks=TASKS, max_turns=5):
    """``n`` per task, and the protocol; the same actions whatever the window."""
    protocol = EpisodeProtocol(str(folder), texts="short", window=window, require_thinking=False)
    loop = AgentLoop(TextEngine(protocol, say), protocol, Rooms, Budgets(max_turns=max_turns, final_turn=False))

    async def play():
        await loop.engine.start()
        request = Request(0, SamplingParams(max_new_tokens=50))
        return [await loop.run(t, group=t.id, index=i, request=request) for t in tasks for i in range(n)]

    return asyncio.run(play()), protocol


class EpisodeData(L.LightningDataModule):
    """What the module asks of a RolloutDataModule, and batches of given trajectories."""

    group_size = 4

    def __init__(self, rows, protocol, batches=1):
        super().__init__()
        self.rollouts = SimpleNamespace(protocol=protocol, budgets=Budgets())
        self.rows, self.batches = rows, batches

    def __len__(self):
        return self.batches

    def train_dataloader(self):
        return DataLoader([self.rows] * self.batches, batch_size=None)


def skills(retriever=None, **options):
    return Skills("household_tiny", retriever or TaskType(), form="sentences", **options)
