"""Digests beside files: what was altered, cut off or lost is named; what was never listed is taken as it is."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from common.digests import DigestError, check_digests, list_path, parse_list, sha256, write_digests, write_list


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


def damaged(content: bytes):
    """Every cut at the end, every flipped bit, every line left out or doubled, every loss of the first lines."""
    yield from (content[:end] for end in range(len(content)))
    places = [(at, 1 << bit) for at in range(len(content)) for bit in range(8)]
    yield from (content[:at] + bytes([content[at] ^ flipped]) + content[at + 1 :] for at, flipped in places)
    lines = content.splitlines(keepends=True)
    for at in range(len(lines)):
        yield from (b"".join(part) for part in (lines[:at] + lines[at + 1 :], lines[: at + 1] + lines[at:]))
        yield b"".join(lines[at + 1 :])


def test_every_cut_flip_and_lost_line_of_a_list_shows(model, tmp_path):
    single = tmp_path / "iteration-00000008.ckpt"
    single.write_bytes(b"weights")
    write_digests(single)
    for path in (model, single):
        content = list_path(path).read_bytes()
        assert parse_list(content) is not None
        assert [other for other in damaged(content) if parse_list(other) is not None] == []


@pytest.mark.parametrize("how", ["empty", "bit", "folder"])
def test_a_damaged_list_is_an_error_of_one_line(model, how):
    listed = list_path(model)
    content = listed.read_bytes()
    listed.unlink()
    if how == "folder":
        listed.mkdir()
    elif how == "link":
        listed.symlink_to("nowhere")
    else:
        last = content.rindex(b"\n", 0, -1) + 1
        bit = content.replace(b"config", b"bonfig")
        listed.write_bytes({"empty": b"", "cut": content[:-1], "bit": bit, "line": content[:last]}[how])
    for path in (model, model / "config.json"):
        with pytest.raises(DigestError, match="sha256 is not a complete list of .*: .*remove the list") as found:
            check_digests(path)
        assert "\n" not in str(found.value)


def test_a_list_counts_and_names_what_it_is_of(model, tmp_path):
    assert list_path(model).read_text().startswith("# 3 files, SHA-256 of this list: ")
    folder = tmp_path / "iteration-00000008.ckpt"
    model.rename(folder)
    write_list(folder, {"config.json": sha256(folder / "config.json")}, folder.name)
    assert list_path(folder).read_text().startswith("# 1 files of iteration-00000008.ckpt, SHA-256")
    check_digests(folder)
    check_digests(folder / "config.json")
    other = folder.rename(tmp_path / "iteration-00000009.ckpt")
    for path in (other, other / "config.json"):
        with pytest.raises(DigestError, match=r"list of iteration-00000008.ckpt: iteration-00000009.ckpt was renamed"):
            check_digests(path)


def test_lists_of_earlier_versions_are_read(model, tmp_path):
    single = tmp_path / "iteration-00000008.ckpt"
    single.write_bytes(b"weights")
    for path, files in ((model, ("config.json", "model-1.safetensors")), (single, (single.name,))):
        folder = list_path(path).parent
        list_path(path).write_text("".join(f"{sha256(folder / name)}  {name}\n" for name in files))
        check_digests(path)
        flip(folder / files[0])
        with pytest.raises(DigestError, match="has SHA-256"):
            check_digests(path)
    list_path(single).write_text(f"{sha256(single)}  iteration-00000007.ckpt\n")
    with pytest.raises(DigestError, match=r"list of iteration-00000007.ckpt: iteration-00000008.ckpt was"):
        check_digests(single)


def test_names_that_are_no_unicode_and_lists_of_nothing(tmp_path):
    write_digests(tmp_path, [])
    check_digests(tmp_path)
    (tmp_path / os.fsdecode(b"\xff\xe2\x80\xa8.jsonl")).write_text("x")
    write_digests(tmp_path)
    check_digests(tmp_path)


def test_models_from_elsewhere_have_no_digests(model):
    (model / "digests.sha256").unlink()
    flip(model / "config.json")
    check_digests(model)
