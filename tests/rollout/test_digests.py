"""Digests beside files: what was altered, cut off or lost is named; what was never listed is taken as it is."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from rollout.digests import DigestError, check_digests, list_path, write_digests


def flip(path, at=-1):
    """One bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "adapter").mkdir(parents=True)
    for name in ("config.json", "model-1.safetensors", "adapter/adapter.safetensors"):
        (folder / name).write_bytes(name.encode() * 1000)
    write_digests(folder)
    return folder


def test_what_was_not_altered_passes_wherever_it_is_moved(model, tmp_path):
    check_digests(model)
    (model / "README.md").write_text("added later")
    shutil.copytree(model, tmp_path / "copy")
    os.symlink(tmp_path / "copy", tmp_path / "link")
    check_digests(tmp_path / "link")
    subprocess.run(["sha256sum", "--check", "--quiet", "digests.sha256"], cwd=model, check=True)


@pytest.mark.parametrize("name", ["config.json", "adapter/adapter.safetensors"])
def test_one_bit_a_cut_and_a_loss_are_told_in_one_line(model, name):
    flip(model / name, at=500)
    with pytest.raises(DigestError, match=rf"{name} has SHA-256 \w+..., expected \w+...: .*make it again") as found:
        check_digests(model)
    assert "\n" not in str(found.value)
    flip(model / name, at=500)
    check_digests(model)
    os.truncate(model / name, 100)
    with pytest.raises(DigestError, match=f"{name} has SHA-256"):
        check_digests(model)
    (model / name).unlink()
    with pytest.raises(DigestError, match=f"{name} is missing"):
        check_digests(model)


def test_a_file_has_a_list_of_its_own_or_a_line_in_that_of_a_folder_around_it(model, tmp_path):
    single = tmp_path / "iteration-1.ckpt"
    single.write_bytes(b"weights")
    check_digests(single)
    write_digests(single)
    assert list_path(single).name == "iteration-1.ckpt.sha256"
    flip(single)
    with pytest.raises(DigestError, match=r"iteration-1\.ckpt has SHA-256"):
        check_digests(single)
    flip(model / "config.json")
    check_digests(model / "adapter")
    check_digests(model / "adapter" / "adapter.safetensors")
    with pytest.raises(DigestError, match="config.json"):
        check_digests(model / "config.json")


def test_a_damaged_list_is_no_proof(model):
    os.truncate(model / "digests.sha256", 100)
    with pytest.raises(DigestError, match="digests.sha256 is no list of SHA-256"):
        check_digests(model)


def test_models_from_elsewhere_have_no_digests(model):
    (model / "digests.sha256").unlink()
    flip(model / "config.json")
    check_digests(model)
