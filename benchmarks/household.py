"""The household simulator against ALFWorld itself: the same moves, the same words, and how fast.

``python -m benchmarks.household [--steps 1000]`` generates games of all six task types in both sizes and plays each in
both engines at once: once as the expert would, and once mostly at random, with commands among them that are not
possible. Text, admissible commands in order, and whether the goal is reached must be equal after every command; the
first difference stops the benchmark. Without ALFWorld (``make alfworld``) the simulator plays alone. Both speeds are
of one process.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from benchmarks import common
from experiments.worlds.household.expert import Expert
from experiments.worlds.household.games import TASK_TYPES, Game
from experiments.worlds.household.generate import SIZES, generate_game
from experiments.worlds.household.pddl import PddlGame, PddlPool, default_python
from experiments.worlds.household.simulator import Observation, Simulator

EPISODE = 40  # commands of an episode at random
TEMPLATES = (
    "go to {place}",
    "open {place}",
    "close {place}",
    "take {item} from {place}",
    "move {item} to {place}",
    "heat {item} with {place}",
    "clean {item} with {place}",
    "cool {item} with {place}",
    "slice {item} with {other}",
    "use {item}",
    "examine {item}",
    "examine {place}",
    "  look ",
    "Look",
    "put {item} in/on {place}",
    "go to the \ud800 \x00 moon",
    "",
)


class Disagreement(Exception):
    """The two engines said different things."""


@dataclass(slots=True)
class Play:
    """What was played, and the seconds that each engine took for its steps."""

    games: int = 0
    steps: int = 0
    won: int = 0
    simulator_s: float = 0.0
    alfworld_s: float = 0.0
    commands: list[str] = field(default_factory=list)  # of the present episode


def games(seed: int = 0) -> Iterator[Game]:
    """All task types in both sizes, over and over with new seeds."""
    for number in count(seed):
        for task_type in TASK_TYPES:
            for size in SIZES:
                yield generate_game(task_type, number, size=size)


def random_command(draw: random.Random, game: Game, observation: Observation) -> str:
    """Mostly something possible, and of that mostly something else than going elsewhere."""
    if draw.random() < 0.25:
        place, (item, other) = draw.choice(game.receptacles).name, (draw.choice(game.items).name for _ in range(2))
        return draw.choice(TEMPLATES).format(place=place, item=item, other=other)
    staying = [command for command in observation.admissible if not command.startswith("go to")]
    return draw.choice(staying if draw.random() < 0.7 else observation.admissible)


async def both(play: Play, simulator: Simulator, original: PddlGame | None, command: str | None) -> Observation:
    """One command (None: a new beginning) in both engines. Raises Disagreement."""
    began = time.perf_counter()
    ours = simulator.reset() if command is None else simulator.step(command)
    took = time.perf_counter() - began
    play.commands = [] if command is None else [*play.commands, command]
    if command is not None:
        play.steps, play.simulator_s = play.steps + 1, play.simulator_s + took
    if original is not None:
        began = time.perf_counter()
        theirs = await (original.reset() if command is None else original.step(command))
        if command is not None:
            play.alfworld_s += time.perf_counter() - began
        if ours != theirs:
            raise Disagreement(f"after {play.commands}:\nsimulator: {ours}\nALFWorld: {theirs}\n{simulator.game}")
    return ours


async def play_game(play: Play, game: Game, original: PddlGame | None, draw: random.Random, episode: int) -> None:
    """The expert's episode to its end, then one of ``episode`` commands, half of them the expert's while it has one."""
    simulator, expert = Simulator(game), Expert(game.goal)
    observation = await both(play, simulator, original, None)
    while not observation.won:
        observation = await both(play, simulator, original, expert.act(observation))
    play.games, play.won = play.games + 1, play.won + 1
    expert, share = Expert(game.goal), draw.choice((0.0, 0.5))
    observation = await both(play, simulator, original, None)
    for _ in range(episode):
        try:
            planned = expert.act(observation)
        except LookupError:  # the goal is reached and there is nothing left to look for
            planned = "inventory"
        command = planned if draw.random() < share else random_command(draw, game, observation)
        observation = await both(play, simulator, original, command)


async def measure(steps: int, seed: int, python: str | None) -> Play:
    play, draw = Play(), random.Random(seed)
    pool = PddlPool(python, 1, step_timeout_s=60) if python else None
    try:
        for game in games(seed):
            original = await pool.open(game) if pool else None
            await play_game(play, game, original, draw, EPISODE)
            if original:
                await original.close()
            if play.steps >= steps:
                return play
        raise AssertionError("games never end")
    finally:
        if pool:
            await pool.close()


def metric(play: Play) -> str:
    ours = play.steps / play.simulator_s
    if not play.alfworld_s:
        return f"{play.games} games, {play.steps} steps: simulator {ours:.0f} steps/s; no ALFWorld here (make alfworld)"
    theirs = play.steps / play.alfworld_s
    return (
        f"{play.games} games, {play.steps} steps without a difference: simulator {ours:.0f} steps/s, "
        f"ALFWorld {theirs:.1f} steps/s, ratio {ours / theirs:.0f}"
    )


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="at least so many, in whole games")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        play = asyncio.run(measure(options.steps, options.seed, default_python()))
    except Disagreement as difference:
        raise SystemExit(f"the engines differ {difference}") from None
    common.print_metrics(options, [metric(play)])


if __name__ == "__main__":
    main()
