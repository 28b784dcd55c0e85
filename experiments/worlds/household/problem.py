"""Writes a generated game as an ALFWorld game file: ALFWorld's domain and grammar, and our PDDL problem.

For the file's content see sdar.md, 3.7. The goals mean the same as those of ``alfworld.gen.goal_library``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from experiments.worlds.household.alfworld_tables import CAN_HOLD
from experiments.worlds.household.games import LOOK, TWO, Game, Item, Receptacle

_PREDICATES = {"container": "isReceptacleObject"}  # for other properties the predicate is the word itself
_DONE = {"clean": "isClean", "heat": "isHot", "cool": "isCool"}


def game_file(game: Game, domain: str, grammar: str) -> dict[str, Any]:
    """Return the content of an ALFWorld game file (``game.tw-pddl``) for a generated game.

    Args:
        domain: ALFWorld's ``alfred.pddl``.
        grammar: ALFWorld's ``alfred.twl2``, in which "UNKNOWN GOAL" stands for the task's sentence.
    """
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", game.sentence),
        "pddl_problem": problem(game),
        "solvable": True,
        "walkthrough": None,
    }


def problem(game: Game) -> str:
    """Return a generated game as the text of a PDDL problem. The engine numbers the things of a type by identifier,
    last first, so identifiers are chosen to give the game's numbers.
    """
    counts = Counter(thing.type for thing in (*game.receptacles, *game.items))
    ids = {thing.name: _identifier(thing, counts[thing.type]) for thing in (*game.receptacles, *game.items)}
    return "\n".join(
        [
            "(define (problem household) (:domain alfred)",
            "(:objects agent1 - agent loc_start - location",
            *_objects(game, ids),
            ")",
            "(:init (= (total-cost) 0) (atLocation agent1 loc_start)",
            *_facts(game, ids),
            ")",
            f"(:goal {_goal(game)}))",
        ]
    )


def _identifier(thing: Receptacle | Item, count: int) -> str:
    location = f"bar_{count - thing.number:03d}"
    basin = thing.type.removesuffix("Basin")  # the engine says "sinkbasin" only for this form
    return f"{thing.type}_{location}" if basin == thing.type else f"{basin}_{location}_bar_{thing.type}"


def _location(receptacle: str, ids: dict[str, str]) -> str:
    return f"loc_of_{ids[receptacle]}"


def _objects(game: Game, ids: dict[str, str]) -> list[str]:
    lines = [f"{ids[item.name]} - object" for item in game.items]
    for receptacle in game.receptacles:
        lines += [f"{ids[receptacle.name]} - receptacle", f"{_location(receptacle.name, ids)} - location"]
    lines += [f"{kind}Type - otype" for kind in sorted({item.type for item in game.items})]
    return lines + [f"{kind}Type - rtype" for kind in sorted({receptacle.type for receptacle in game.receptacles})]


def _facts(game: Game, ids: dict[str, str]) -> list[str]:
    lines = []
    for receptacle in game.receptacles:
        known = ids[receptacle.name]
        lines.append(f"(receptacleType {known} {receptacle.type}Type)")
        lines.append(f"(receptacleAtLocation {known} {_location(receptacle.name, ids)})")
        if receptacle.openable:
            lines.append(f"(openable {known})")
    for item in game.items:
        known = ids[item.name]
        lines += [f"(objectType {known} {item.type}Type)", f"(inReceptacle {known} {ids[item.place]})"]
        lines.append(f"(objectAtLocation {known} {_location(item.place, ids)})")
        lines += [f"({_PREDICATES.get(word, word)} {known})" for word in item.properties]
    kinds = sorted({item.type for item in game.items})
    for holder in sorted({receptacle.type for receptacle in game.receptacles}):
        lines += [f"(canContain {holder}Type {kind}Type)" for kind in kinds if kind in CAN_HOLD[holder]]
    return lines


def _goal(game: Game) -> str:
    goal = game.goal
    if goal.task_type == LOOK:
        return (
            "(and (exists (?t - object ?r - receptacle ?a - agent ?l - location) (and"
            f" (objectType ?t {goal.toggle}Type) (toggleable ?t) (isToggled ?t) (inReceptacle ?t ?r)"
            " (receptacleAtLocation ?r ?l) (atLocation ?a ?l)))"
            f" (exists (?o - object ?a - agent) (and (objectType ?o {goal.target}Type) (holds ?a ?o))))"
        )
    objects = ("?o1", "?o2") if goal.task_type == TWO else ("?o1",)
    parts = [f"(receptacleType ?r {goal.destination}Type)"]
    for known in objects:
        parts += [f"(objectType {known} {goal.target}Type)", f"(inReceptacle {known} ?r)"]
        if goal.treatment is not None:
            parts.append(f"({_DONE[goal.treatment[0]]} {known})")
    if len(objects) == 2:
        parts.append("(not (= ?o1 ?o2))")
    variables = " ".join(f"{known} - object" for known in objects)
    return f"(exists (?r - receptacle {variables}) (and {' '.join(parts)}))"
