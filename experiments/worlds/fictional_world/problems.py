"""Questions that need search and Python: look numbers up, then compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from experiments.worlds.fictional_world.questions import WRAPPERS
from experiments.worlds.fictional_world.schema import QUANTITIES_OF, RELATIONS_OF
from experiments.worlds.fictional_world.world import Entity, World
from rollout.trajectory import Task

# Formulas over one and two numbers, in Python, with wordings. No wording contains a constant of its formula, because a
# tiny model copies numbers that it has just read and few others.
ONE_NUMBER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{a} ** 2", ("What is the square of {np}?", "Square {np}.")),
    ("{a} * 12", ("What is a dozen times {np}?", "Multiply {np} by a dozen.")),
)
TWO_NUMBERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{a} * {b}", ("What is {np} times {np2}?", "Multiply {np} by {np2}.")),
    ("{a} ** 2 + {b} ** 2", ("Add the squares of {np} and {np2}.", "Sum up the squares of {np} and {np2}.")),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact to look up: the entity, the keyword that finds it, and the content of its passage."""

    entity: Entity
    keyword: str
    told: str


@dataclass(frozen=True, slots=True)
class Problem:
    """The meaning of a question with search and computation: facts to look up in order, then a formula over them."""

    family: str
    facts: tuple[Fact, ...]
    code: str  # Python with the numbers filled in; empty if there is nothing to compute
    answers: tuple[str, ...]
    question: str

    @property
    def key(self) -> tuple[object, ...]:
        return self.family, tuple((s.entity.id, s.keyword) for s in self.facts), self.code


def _noun(entity: Entity) -> str:
    return f"the {entity.mention}" if entity.qualifier else entity.mention


def _number(world: World, entity: Entity, rng: random.Random) -> tuple[Fact, str]:
    quantity = rng.choice(QUANTITIES_OF[entity.kind])
    fact = Fact(entity, quantity.keyword, world.told(entity, quantity.keyword))
    return fact, rng.choice(quantity.phrases)


def _computed(family: str, facts: tuple[Fact, ...], code: str, question: str) -> Problem:
    value = eval(code, {"__builtins__": {}})  # a formula and numbers of this module
    return Problem(family, facts, code, (str(value),), question)


def _one(world: World, subjects: list[Entity], rng: random.Random) -> Problem:
    entity = rng.choice(subjects)
    fact, phrase = _number(world, entity, rng)
    return _with_one_number("one", (fact,), phrase.format(x=_noun(entity)), rng)


def _hop(world: World, subjects: list[Entity], rng: random.Random) -> Problem:
    """Draw a question about the number of an entity that another fact names (two lookups)."""
    subject = rng.choice(subjects)
    relation = rng.choice(RELATIONS_OF[subject.kind])
    found = world.entities[world.facts[subject.id, relation.keyword]]
    fact, phrase = _number(world, found, rng)
    words = phrase.format(x=rng.choice(relation.phrases).format(x=_noun(subject)))
    return _with_one_number("hop", (Fact(subject, relation.keyword, found.mention), fact), words, rng)


def _with_one_number(family: str, facts: tuple[Fact, ...], words: str, rng: random.Random) -> Problem:
    formula, wordings = rng.choice(ONE_NUMBER)
    return _computed(family, facts, formula.format(a=facts[-1].told), rng.choice(wordings).format(np=words))


def _two(world: World, subjects: list[Entity], rng: random.Random) -> Problem:
    first, second = rng.sample(subjects, 2)
    (a, phrase), (b, phrase2) = _number(world, first, rng), _number(world, second, rng)
    formula, wordings = rng.choice(TWO_NUMBERS)
    words = {"np": phrase.format(x=_noun(first)), "np2": phrase2.format(x=_noun(second))}
    return _computed("two", (a, b), formula.format(a=a.told, b=b.told), rng.choice(wordings).format(**words))


def _lookup(world: World, subjects: list[Entity], rng: random.Random) -> Problem:
    """Draw a question about one number, which needs a search but no computation."""
    entity = rng.choice(subjects)
    fact, phrase = _number(world, entity, rng)
    question = rng.choice(WRAPPERS).format(np=phrase.format(x=_noun(entity)))
    return Problem("lookup", (fact,), "", (fact.told,), question)


def _compute(world: World, subjects: list[Entity], rng: random.Random) -> Problem:
    """Draw a question about two given numbers, which needs a computation but no search."""
    formula, wordings = rng.choice(TWO_NUMBERS)
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    return _computed("compute", (), formula.format(a=a, b=b), rng.choice(wordings).format(np=a, np2=b))


FAMILIES: dict[str, Callable[[World, list[Entity], random.Random], Problem]] = {
    "one": _one,
    "two": _two,
    "hop": _hop,
    "lookup": _lookup,
    "compute": _compute,
}


def draw_problems(
    world: World,
    subjects: list[Entity],
    count: int,
    shares: dict[str, float],
    rng: random.Random,
    taken: set[object],
    avoid: frozenset[int] = frozenset(),
) -> list[Problem]:
    """Draw ``count`` problems with new keys and questions. ``shares`` are the weights of the families (kinds) of
    problems.

    None looks up a fact of an entity in ``avoid``. Adds the problems to ``taken``.

    Raises:
        ValueError: the world has too few problems.
    """
    problems: list[Problem] = []
    for _ in range(50 * count + 1000):
        if len(problems) == count:
            return problems
        family = rng.choices(list(shares), weights=list(shares.values()))[0]
        problem = FAMILIES[family](world, subjects, rng)
        seen = problem.key in taken or problem.question in taken
        if seen or any(fact.entity.id in avoid for fact in problem.facts):
            continue
        taken.update((problem.key, problem.question))
        problems.append(problem)
    raise ValueError(f"fictional world: could not find {count} different problems; ask for fewer or more entities")


def as_task(world: World, problem: Problem, task_id: str, split: str) -> Task:
    passages = [world.passages[world.passage_of[fact.entity.id, fact.keyword]] for fact in problem.facts]
    return Task(
        id=task_id,
        question=problem.question,
        golden_answers=problem.answers,
        data_source=f"tools_{problem.family}",
        gold_passages=tuple((p.title, p.text) for p in passages),
        metadata={
            "split": split,
            "family": problem.family,
            "steps": [[fact.entity.mention, fact.keyword, fact.told] for fact in problem.facts],
            "code": problem.code,
        },
    )
