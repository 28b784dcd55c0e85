"""A rollout system whose program talks to a scripted model in Qwen3's chat format."""

import pytest

from rollout.programs.protocol import ProgramProtocol
from tests.rollout.chat_models import chat_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    return chat_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def protocol(folder) -> ProgramProtocol:
    return ProgramProtocol(folder)
