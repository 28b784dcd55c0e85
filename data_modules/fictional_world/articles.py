"""Plain text of an invented world, for teaching a tiny model the language before anything else.

Real base models have read the web; a model made from nothing has read nothing and cannot even copy a name. Articles
about *another* world (same words, other facts) give it the language without a single fact that questions ask about.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from data_modules.fictional_world.schema import RELATIONS_OF
from data_modules.fictional_world.world import Entity, World
from rollout.tools.search import format_passages
from rollout.trajectory import Action, ActionKind, StopReason, Task, Trajectory, Turn


def article(world: World, entity: Entity, rng: random.Random, shown: int = 3, notes: int = 2) -> str:
    """``shown`` passages about one entity, as search results are printed, then ``notes`` that restate facts of them.

    The notes are what makes a model read: to go on after "It is" it has to find the passage that is meant.
    """
    relations = rng.sample(RELATIONS_OF[entity.kind], shown)
    passages = [world.passages[world.passage_of[entity.id, r.keyword]] for r in relations]
    text = format_passages((p.title, p.text) for p in passages)
    for relation in rng.sample(relations, notes):
        told = world.entities[world.facts[entity.id, relation.keyword]]
        text += f"Note on {entity.mention} {relation.keyword}. It is {told.mention}.\n"
    return text


def token_sequences(
    world: Any, tokenizer: Any, length: int, count: int, seed: int, article: Callable[..., str] = article
) -> Iterator[list[int]]:
    """``count`` sequences of ``length`` ids: articles of linked entities, one after the other, cut to size.

    Args:
        world: a ``World``, or a ``NumberWorld`` with its own ``article(world, entity, rng)``.
    """
    rng = random.Random(f"articles:{seed}")
    for _ in range(count):
        entity, ids = rng.choice(world.entities), []
        while len(ids) < length:
            ids += tokenizer(article(world, entity, rng), add_special_tokens=False).input_ids
            follow = rng.choice(RELATIONS_OF[entity.kind])
            entity = world.entities[world.facts[entity.id, follow.keyword]]
        yield ids[:length]


def as_trajectory(ids: list[int], number: int, bos_id: int) -> Trajectory:
    """A text as a trajectory whose every token is in the loss, so that `SFT` trains on it unchanged."""
    turn = Turn(0, len(ids), Action(ActionKind.INVALID, error="plain text"), "length", 0, len(ids))
    return Trajectory(
        task=Task(id=f"article-{number}", question="", golden_answers=(), data_source="articles"),
        prompt_ids=(bos_id,),
        response_ids=tuple(ids),
        loss_mask=(1,) * len(ids),
        logprobs=(0.0,) * len(ids),
        turns=(turn,),
        calls=(),
        stop_reason=StopReason.LENGTH,
        group=f"article-{number}",
        index=0,
    )
