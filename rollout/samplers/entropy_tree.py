"""AT2PO's sampler: whole trajectories, then new ones from the turns that were least certain (arXiv 2601.04767)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.ranges import NonNegativeFloat, PositiveInt
from rollout.samplers.base import GroupRunner, run_independent
from rollout.trajectory import Fork, Trajectory, Turn

Place = tuple[int, int]  # member of the group that sampled a turn, and the turn's number


@dataclass(frozen=True, slots=True)
class Candidate:
    """A turn that may be sampled again, or (without a source) the prompt."""

    score: float
    source: Trajectory | None
    turn: int = 0


class EntropyTreeSampler:
    """Rolls out trajectories from the prompt to their ends; then ``rounds`` times it samples again, and to the end, the
    ``expansions`` turns with the highest score::

        score = mean -log p of the turn's sampled tokens - sibling_penalty * (its siblings)

    Siblings are the other turns sampled from the same place. Candidates are all turns that others follow, and the
    prompt (score ``-sibling_penalty`` times its turns but one). The prompt or a first turn begins another trajectory.
    With fewer candidates than expansions the best are taken again. Of n trajectories n - rounds * expansions start
    first. Decisions and seeds depend on the group's seed only. The released setting is 22 trajectories, 2 rounds and 6
    expansions.

    Args:
        rounds: how often turns are chosen.
        expansions: new trajectories in a round.
        sibling_penalty: subtracted for each sibling, nats.
    """

    forks = True

    def __init__(
        self, rounds: PositiveInt = 2, expansions: PositiveInt = 6, sibling_penalty: NonNegativeFloat = 0.05
    ) -> None:
        self.rounds, self.expansions, self.sibling_penalty = rounds, expansions, sibling_penalty

    def check_group(self, n: int) -> None:
        """Raise ValueError if a group of n leaves no trajectory to begin with."""
        if n <= self.rounds * self.expansions:
            raise ValueError(
                f"a group has {n} trajectories, but {self.rounds} rounds of {self.expansions} expansions leave none to "
                f"begin with; expected a group_size above {self.rounds * self.expansions}, or fewer expansions"
            )

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        self.check_group(n)
        members = await run_independent(group, range(n - self.rounds * self.expansions))
        expanded: dict[Place, int] = {}
        for _ in range(self.rounds):
            candidates = self.candidates(members)
            chosen = [candidates[i % len(candidates)] for i in range(self.expansions)]
            async with asyncio.TaskGroup() as tasks:  # one that fails cancels the others
                started = []
                for number, candidate in enumerate(chosen, len(members)):
                    source = candidate.source
                    if source is None or source.turns[candidate.turn].start == 0:
                        started.append(tasks.create_task(group.run(number)))
                        continue
                    place = (source.index, candidate.turn)
                    expanded[place] = expanded.get(place, 0) + 1
                    key = f"{source.index}.{candidate.turn}.{expanded[place]}"
                    at = source.turns[candidate.turn].start
                    started.append(tasks.create_task(group.run(number, start=source, at=at, key=key)))
            members += [task.result() for task in started]
        return members

    def candidates(self, members: Sequence[Trajectory]) -> list[Candidate]:
        """Return the turns that may be sampled again, the best first."""
        usable = [member for member in members if not member.left_out]
        forks = {member.index: member.fork for member in members if member.fork is not None}
        paths = {member.index: path_of(member, forks) for member in usable}
        following: dict[Place | None, dict[Place, None]] = {None: {}}
        for path in paths.values():
            for before, place in zip([None, *path], path, strict=False):
                following.setdefault(before, {})[place] = None
        found = [Candidate(-self.sibling_penalty * max(len(following[None]) - 1, 0), None)]
        for member in usable:
            path = paths[member.index]
            for before, place in zip([None, *path], path[:-1], strict=False):
                if place[0] == member.index:  # else it is its source's
                    surprise = surprisal(member, member.turns[place[1]])
                    score = surprise - self.sibling_penalty * (len(following[before]) - 1)
                    found.append(Candidate(score, member, place[1]))
        return sorted(found, key=lambda candidate: -candidate.score)  # stable: equal ones by their member


def path_of(member: Trajectory, forks: Mapping[int, Fork]) -> list[Place]:
    """Return the turns (with tokens) of a trajectory, each with the member of its group that sampled it.

    Args:
        member: a whole trajectory.
        forks: origins of the group's forked trajectories, by their index; also of those that failed.
    """
    found = []
    for number, turn in enumerate(member.turns):
        if turn.end > turn.start:
            owner = member.index
            while owner in forks and turn.start < forks[owner].at:
                owner = forks[owner].parent
            found.append((owner, number))
    return found


def surprisal(trajectory: Trajectory, turn: Turn) -> float:
    """Return the mean -log p of a turn's sampled tokens, in nats."""
    return -sum(trajectory.logprobs[turn.start : turn.end]) / (turn.end - turn.start)
