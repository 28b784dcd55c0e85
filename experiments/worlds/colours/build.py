"""Stage that writes the tasks and the tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

from data_modules.datasets.questions import write_tasks
from experiments.worlds.tokenizer_training import train_tokenizer
from rollout.trajectory import Task

THINGS = "apple boat chair door engine flag glass hat island jacket kite lamp mirror nail orange piano".split()
COLOURS = "red blue green black white brown yellow pink".split()
SIZES = {"demonstrations": 2000, "train": 400, "val": 50, "test": 200}


class BuildColours:
    """Stage that writes ``<split>.parquet`` and ``tokenizer``."""

    def run(self, output_dir: Path) -> dict[str, int]:
        """Write the files and return the number of tasks of each split."""
        texts = []
        for split, count in SIZES.items():
            draw, tasks = random.Random(split), []
            for number in range(count):
                facts = {thing: draw.choice(COLOURS) for thing in draw.sample(THINGS, 4)}
                thing = draw.choice(list(facts))
                question = f"day {number}: what colour is the {thing}?"
                metadata = {"facts": facts, "thing": thing}
                tasks.append(Task(f"{split}-{number}", question, (facts[thing],), "colours", metadata=metadata))
                texts.append(
                    f'{question} {{"name": "search", "arguments": {{"query": "{thing}"}}}} the {thing} is '
                    f"{facts[thing]}. nothing found. Which word shall I look up? colour"
                )
            write_tasks(output_dir / f"{split}.parquet", tasks, lambda task: task.question)
        train_tokenizer(texts, 512).save_pretrained(output_dir / "tokenizer")
        return SIZES
