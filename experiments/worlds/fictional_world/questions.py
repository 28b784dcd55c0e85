"""Questions of one to three hops, and their splits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from experiments.worlds.fictional_world.schema import RELATIONS_OF, Relation
from experiments.worlds.fictional_world.world import Entity, World
from rollout.trajectory import Task

WRAPPERS = ("What is {np}?", "Name {np}.", "Tell me {np}.")


@dataclass(frozen=True, slots=True)
class Chain:
    """The meaning of a multi-hop question: start at ``subject`` (an entity) and follow ``relations``."""

    subject: Entity
    relations: tuple[Relation, ...]
    path: tuple[Entity, ...]  # the entity after each relation; the last one is the answer

    @property
    def key(self) -> tuple[int, tuple[str, ...]]:
        return self.subject.id, tuple(r.keyword for r in self.relations)


def draw_chain(world: World, subject: Entity, hops: int, rng: random.Random) -> Chain | None:
    """Draw a random multi-hop question with ``hops`` relations. Return None if this attempt visits an entity or name
    twice.
    """
    here, relations, path = subject, [], []
    names = {subject.name}
    for _ in range(hops):
        relation = rng.choice(RELATIONS_OF[here.kind])
        here = world.entities[world.facts[here.id, relation.keyword]]
        if here.name in names:
            return None
        names.add(here.name)
        relations.append(relation)
        path.append(here)
    return Chain(subject, tuple(relations), tuple(path))


def phrase(chain: Chain, rng: random.Random) -> str:
    """Return the text of a question for the chain (an entity and the relations to follow). It contains no keyword of a
    relation.
    """
    subject = chain.subject
    text = f"the {subject.mention}" if subject.qualifier else subject.mention
    for relation in chain.relations:
        text = rng.choice(relation.phrases).format(x=text)
    return rng.choice(WRAPPERS).format(np=text)


def as_task(world: World, chain: Chain, question: str, task_id: str, split: str) -> Task:
    subjects = (chain.subject, *chain.path[:-1])
    gold = tuple(
        world.passages[world.passage_of[subject.id, relation.keyword]]
        for subject, relation in zip(subjects, chain.relations, strict=True)
    )
    hops = len(chain.relations)
    return Task(
        id=task_id,
        question=question,
        golden_answers=chain.path[-1].aliases,
        data_source=f"fictional_{hops}hop",
        gold_passages=tuple((p.title, p.text) for p in gold),
        metadata={
            "hops": hops,
            "split": split,
            "subject": chain.subject.id,
            "relations": [r.keyword for r in chain.relations],
            "mentions": [chain.subject.mention, *(e.mention for e in chain.path)],
        },
    )


def draw_questions(
    world: World, subjects: list[Entity], count: int, hop_shares: tuple[float, ...], rng: random.Random, taken: set
) -> Iterator[Chain]:
    """Yield ``count`` new random multi-hop questions, with hops weighted by ``hop_shares``, and add their keys to
    ``taken``.
    """
    made = 0
    for _ in range(50 * count + 1000):
        if made == count:
            return
        hops = rng.choices(range(1, len(hop_shares) + 1), weights=hop_shares)[0]
        chain = draw_chain(world, rng.choice(subjects), hops, rng)
        if chain is None or chain.key in taken:
            continue
        taken.add(chain.key)
        made += 1
        yield chain
    raise ValueError(f"fictional world: could not find {count} different questions; ask for fewer or more entities")
