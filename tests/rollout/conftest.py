import pytest

from rollout.protocols.search_r1 import SearchR1Protocol


@pytest.fixture(scope="session")
def protocol(model_dir) -> SearchR1Protocol:
    return SearchR1Protocol(str(model_dir), template="short")
