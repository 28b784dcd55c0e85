from __future__ import annotations

import pytest

from rollout.files import DiskFullError, replacing, write_atomically


def test_a_write_that_finds_no_room_leaves_the_old_file_and_nothing_else(tmp_path, file_limit):
    path = tmp_path / "evaluation.json"
    write_atomically(path, "old")
    file_limit(1000)
    with pytest.raises(DiskFullError, match="evaluation.json.*previous version is intact.*RESUME=last"):
        write_atomically(path, "x" * 5000)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.json"]


def test_what_ends_badly_replaces_nothing(tmp_path):
    path = tmp_path / "new" / "file"
    with pytest.raises(ValueError, match="a bug"), replacing(path) as temporary:
        temporary.write_text("half")
        raise ValueError("a bug")
    assert list(path.parent.iterdir()) == []
