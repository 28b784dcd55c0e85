from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from common.files import DiskFullError, is_no_room, replacing, write_atomically


def test_a_write_that_finds_no_room_leaves_the_old_file_and_nothing_else(tmp_path, file_limit):
    path = tmp_path / "evaluation.json"
    write_atomically(path, "old")
    file_limit(1000)
    with pytest.raises(DiskFullError, match="evaluation.json.*previous version is intact.*the same command again"):
        write_atomically(path, "x" * 5000)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.json"]


@pytest.mark.parametrize("size", [0, 5000])
@pytest.mark.parametrize("save", [torch.save, save_file])
def test_the_errors_of_torch_and_safetensors_are_known(tmp_path, file_limit, size, save):
    file_limit(size)
    with pytest.raises(Exception) as told:
        save({"a": torch.zeros(10_000)}, tmp_path / "a")
    file_limit()
    assert is_no_room(told.value)


def test_what_ends_badly_replaces_nothing(tmp_path):
    path = tmp_path / "new" / "file"
    with pytest.raises(ValueError, match="a bug"), replacing(path) as temporary:
        temporary.write_text("half")
        raise ValueError("a bug")
    assert list(path.parent.iterdir()) == []
