"""Plain text about an invented world, to teach a tiny model the language.

A model with random weights has read nothing and cannot even copy a name. The articles describe *another* world (same
words, other facts), so they teach the language but none of the facts that questions ask about.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from experiments.worlds.fictional_world.schema import RELATIONS_OF
from experiments.worlds.fictional_world.world import Entity, World
from rollout.tools.search import format_passages


def article(world: World, entity: Entity, rng: random.Random, shown: int = 3, notes: int = 2) -> str:
    """Return an article about one invented entity: ``shown`` passages in the format of search results, then ``notes``
    notes that restate some facts.

    The notes make a model read: to continue after "It is" it must find the right passage.
    """
    relations = rng.sample(RELATIONS_OF[entity.kind], shown)
    passages = [world.passages[world.passage_of[entity.id, r.keyword]] for r in relations]
    text = format_passages((p.title, p.text) for p in passages)
    for relation in rng.sample(relations, notes):
        text += f"Note on {entity.mention} {relation.keyword}. It is {world.told(entity, relation.keyword)}.\n"
    return text


def linked_articles(world: World, rng: random.Random, article: Callable[..., str]) -> Iterator[str]:
    """Yield articles (texts) without end. Each is about an entity that a fact of the previous article's entity
    names."""
    entity = rng.choice(world.entities)
    while True:
        text = article(world, entity, rng)
        follow = rng.choice(RELATIONS_OF[entity.kind])
        entity = world.entities[world.facts[entity.id, follow.keyword]]
        yield text
