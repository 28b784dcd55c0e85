"""Plain text of an invented world, for teaching a tiny model the language before anything else.

Real base models have read the web; a model made from nothing has read nothing and cannot even copy a name. Articles
about *another* world (same words, other facts) give it the language without a single fact that questions ask about.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from experiments.worlds.fictional_world.schema import RELATIONS_OF
from experiments.worlds.fictional_world.world import Entity, World
from rollout.tools.search import format_passages


def article(world: World, entity: Entity, rng: random.Random, shown: int = 3, notes: int = 2) -> str:
    """``shown`` passages about one entity, as search results are printed, then ``notes`` that restate facts of them.

    The notes are what makes a model read: to go on after "It is" it has to find the passage that is meant.
    """
    relations = rng.sample(RELATIONS_OF[entity.kind], shown)
    passages = [world.passages[world.passage_of[entity.id, r.keyword]] for r in relations]
    text = format_passages((p.title, p.text) for p in passages)
    for relation in rng.sample(relations, notes):
        text += f"Note on {entity.mention} {relation.keyword}. It is {world.told(entity, relation.keyword)}.\n"
    return text


def linked_articles(world: World, rng: random.Random, article: Callable[..., str]) -> Iterator[str]:
    """Articles without end: the first about any entity, each further one about an entity of a fact of the last."""
    entity = rng.choice(world.entities)
    while True:
        text = article(world, entity, rng)
        follow = rng.choice(RELATIONS_OF[entity.kind])
        entity = world.entities[world.facts[entity.id, follow.keyword]]
        yield text
