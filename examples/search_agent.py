"""A search agent in one file: its tasks, environment, expert, reward and experiments. It learns on a CPU in minutes.

    python examples/search_agent.py

The agent must name the colour of a thing, which only a search can tell. A model with random weights first imitates an
expert that often searches twice; then GRPO rewards right answers with few searches. To adapt it, replace the classes
and keep the experiments below.
"""

import os
import random
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from data_modules.datasets.questions import write_tasks
from experiments.worlds.expert_engine import CarelessPolicy, WorldExpert
from experiments.worlds.tokenizer_training import train_tokenizer
from rollout.environments.base import StepResult, act_in_order
from rollout.rewards.qa import answer_parts
from rollout.trajectory import Action, CallOutcome, Reward, Task, ToolRequest, ToolResult, Trajectory

THINGS = "apple boat chair door engine flag glass hat island jacket kite lamp mirror nail orange piano".split()
COLOURS = "red blue green black white brown yellow pink".split()


class BuildColours:
    """The stage that writes the tasks. Each task has its own facts, so that nothing can be memorised."""

    def run(self, output_dir: Path) -> dict[str, int]:
        sizes = {"demonstrations": 2000, "train": 400, "val": 50, "test": 200}
        texts = []
        for split, count in sizes.items():
            draw, tasks = random.Random(split), []
            for i in range(count):
                facts = {thing: draw.choice(COLOURS) for thing in draw.sample(THINGS, 4)}
                thing = draw.choice(list(facts))
                metadata = {"facts": facts, "thing": thing}
                question = f"day {i}: what colour is the {thing}?"
                tasks.append(Task(f"{split}-{i}", question, (facts[thing],), "colours", metadata=metadata))
                texts.append(f"{question} <search> {thing} </search> the {thing} is {facts[thing]}.")
            write_tasks(output_dir / f"{split}.parquet", tasks, lambda task: task.question)
        train_tokenizer(texts, 512).save_pretrained(output_dir / "tokenizer")
        return sizes


class ColourLibrary:
    """The environment: answers searches from the facts of a task. The reward is computed after the episode."""

    tools = ("search",)

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> "Visit":
        return Visit(task.metadata["facts"])

    async def close(self) -> None:
        """Release what all visits share: nothing here."""


class Visit:
    """One episode."""

    def __init__(self, facts: dict[str, str]) -> None:
        self.facts = facts

    async def reset(self) -> None:
        """Keep the question of the task as the first observation."""

    async def step(self, action: Action) -> StepResult:
        return StepResult(*await act_in_order(action, self.search))

    async def search(self, request: ToolRequest) -> ToolResult:
        words = request.arguments["query"].split()
        found = [f"the {thing} is {self.facts[thing]}." for thing in words if thing in self.facts]
        return ToolResult(" ".join(found) or "nothing found.", CallOutcome.OK if found else CallOutcome.EMPTY)

    async def close(self) -> None: ...


class RightAndQuick:
    """The reward: 1 for a right answer, less 0.2 for each search after the first."""

    def score(self, trajectory: Trajectory) -> Reward:
        parts = answer_parts(trajectory)
        return Reward(parts["em"] * max(0.0, 1 - 0.2 * max(0, len(trajectory.calls) - 1)), parts)


class ColourPolicy(CarelessPolicy):
    """The expert's turns. With probability ``error_rate`` it first searches for "colour", which finds nothing."""

    def next_turn(self, task: Task, transcript: str) -> str:
        told = re.search(r"is (\w+)\.", transcript)
        if told:
            return f"<answer> {told[1]} </answer>"
        careless = "<search>" not in transcript and self.slips(task, 0) is not None
        return f"<search> {'colour' if careless else task.metadata['thing']} </search>"


class ColourExpert(WorldExpert):
    """The engine that writes demonstrations in place of a model."""

    QUESTION = re.compile(r"Question: (.*?)<\|im_end\|>", re.DOTALL)
    Policy = ColourPolicy


EXPERIMENTS = {
    "colours_world": """
        experiment: {kind: task, summary: tasks and tokenizer}
        task: {class_path: search_agent.BuildColours}
    """,
    "colours_model": """
        experiment: {kind: task, summary: random weights}
        task:
          class_path: experiments.stages.tasks.InitialModel
          init_args:
            {tokenizer: "${stage:colours_world}/tokenizer", hidden_size: 96, layers: 3, initializer_range: 0.07}
    """,
    "bases/colours": """
        values:
          rollouts:
            class_path: rollout.system.RolloutSystem
            init_args:
              engine:
                class_path: rollout.engines.vllm_engine.VLLMEngine
                init_args: {model: "${model.init_args.policy}", max_length: 128}
              protocol:
                class_path: rollout.protocols.search_r1.SearchR1Protocol
                init_args: {tokenizer: "${stage:colours_world}/tokenizer", template: short, eos_ends: true}
              environment: {class_path: search_agent.ColourLibrary}
              reward: {class_path: search_agent.RightAndQuick}
              max_turns: 3
              max_turn_tokens: 16
              max_observation_tokens: 32
              max_response_tokens: 96
    """,
    "bases/colours_fit": """
        inherits: [bases/colours]
        experiment: {hardware: CPU, data: "${stage:colours_world}", columns: [em, searches, response_tokens]}
        trainer: {accelerator: cpu, precision: 32-true, callbacks: {arcap: null}}
        data:
          init_args:
            rollouts: ${values.rollouts}
            val_files: ["${stage:colours_world}/val.parquet"]
            test_files: ["${stage:colours_world}/test.parquet"]
    """,
    "colours_demonstrations": """
        inherits: [bases/colours]
        experiment: {kind: task, summary: the expert's trajectories}
        values:
          rollouts:
            init_args:
              engine:
                class_path: search_agent.ColourExpert
                init_args:
                  tokenizer: ${stage:colours_world}/tokenizer
                  files: ["${stage:colours_world}/demonstrations.parquet"]
                  error_rate: 0.5
        task:
          class_path: data_modules.demonstrations.generate_trajectories.GenerateTrajectories
          init_args: {rollouts: "${values.rollouts}", files: ["${stage:colours_world}/demonstrations.parquet"]}
    """,
    "colours_sft": """
        inherits: [bases/supervised, bases/colours_fit]
        experiment: {summary: SFT on the expert's trajectories, label: SFT, algorithm: SFT, models: colours_model}
        trainer: {max_epochs: 3}
        model:
          class_path: lightning_modules.algorithms.sft.SFT
          init_args: {policy: "${stage:colours_model}/model", lr: 3.0e-3, schedule: cosine, warmup_steps: 20}
        data: {init_args: {trajectories: ["${stage:colours_demonstrations}/trajectories"], batch_tokens: 1024}}
    """,
    "colours": """
        inherits: [bases/on_policy, bases/colours_fit]
        experiment: {summary: GRPO rewards quick answers, label: GRPO, algorithm: GRPO, compare: [colours_sft]}
        trainer: {val_check_interval: 10}
        model:
          class_path: lightning_modules.algorithms.grpo.GRPO
          init_args:
            {policy: "${stage:colours_sft}/model", lr: 3.0e-4, num_mini_batches: 1, max_tokens_per_micro_batch: 8192}
        data:
          init_args:
            train_files: ["${stage:colours_world}/train.parquet"]
            prompts_per_iteration: 8
            group_size: 8
            iterations: 30
    """,
}


def main() -> int:
    """Write the experiments as files and train them, each in its own process; then print the table."""
    from experiments.commands.cli import main as command

    with TemporaryDirectory() as folder:
        for name, text in EXPERIMENTS.items():
            path = Path(folder, f"{name}.yaml")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        os.environ["COMPACT_AGENTS_EXPERIMENTS"] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        sys.path.insert(0, str(Path(__file__).parent))
        return command(["train", "colours", "--compare", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
