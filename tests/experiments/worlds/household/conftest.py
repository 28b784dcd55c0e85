"""The Python that has ALFWorld, and an event loop that lives as long as a test module."""

import asyncio

import pytest

from experiments.worlds.household.pddl import PYTHON_VARIABLE, default_python


@pytest.fixture(scope="session")
def alfworld_python() -> str:
    if (python := default_python()) is None:
        pytest.skip(f"no ALFWorld here: run `make alfworld`, or name a Python that has it in {PYTHON_VARIABLE}")
    return python


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()
