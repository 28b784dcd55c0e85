"""The protocol of the tiny model, and rollout systems in virtual time."""

import asyncio

import pytest

from rollout.protocols.search_r1 import SearchR1Protocol
from tests.rollout.samplers.branching_world import World
from tests.rollout.virtual_time import VirtualTimeLoop


@pytest.fixture(scope="session")
def protocol(model_dir) -> SearchR1Protocol:
    return SearchR1Protocol(str(model_dir), template="short")


@pytest.fixture
def world(protocol, monkeypatch):
    monkeypatch.setattr(asyncio, "new_event_loop", VirtualTimeLoop)
    world = World(protocol)
    yield world
    world.close()
