"""The experiments of the repository."""

import pytest

from experiments.registry.project import Project
from experiments.stages.graph import Graph


@pytest.fixture(scope="session")
def shipped(tmp_path_factory) -> Graph:
    """One graph for all names: what several experiments depend on is resolved once."""
    return Graph(Project(outputs=tmp_path_factory.mktemp("outputs")), "dgpo_tiny")
