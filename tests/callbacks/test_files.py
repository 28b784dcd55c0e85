from __future__ import annotations

from common.files import link_atomically, recover_folder, replace_folder


def _folder(path, content):
    path.mkdir()
    (path / "weights").write_text(content)
    return path


def test_replace_folder(tmp_path):
    target = _folder(tmp_path / "model", "old")
    replace_folder(_folder(tmp_path / "new", "new"), target)
    assert (target / "weights").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_killed_replacement_is_undone_or_finished(tmp_path):
    target = tmp_path / "model"
    _folder(tmp_path / ".model.old", "old")  # killed between the two renames
    recover_folder(target)
    assert (target / "weights").read_text() == "old"
    _folder(tmp_path / ".model.old", "older")  # killed before the old one was deleted
    recover_folder(target)
    assert (target / "weights").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_link_replaces_links_and_left_over_folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    _folder(tmp_path / "last.ckpt", "a real folder")
    for name in ("a", "b"):
        link_atomically(tmp_path / "last.ckpt", name)
        assert (tmp_path / "last.ckpt").read_text() == name
