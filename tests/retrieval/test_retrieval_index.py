import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retrieval.__main__ import main as build_or_serve
from retrieval.corpus import PassageStore, file_sha256
from retrieval.index import BuildIndex
from retrieval.index_config import EncoderConfig, HNSWConfig, check_index, read_metadata
from retrieval.retriever import SearchSettings, check_indexes
from retrieval.types import CorpusError, IndexFolderError

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from pathlib import Path
from retrieval.index import BuildIndex
BuildIndex(sys.argv[1]).run(Path(sys.argv[2]))
"""


def build_elsewhere(corpus: Path, output: Path, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", BUILD, str(corpus), str(output)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def commands_naming(path: Path) -> list[str]:
    """Command lines of the running processes that mention ``path``."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # ended between the listing and the reading
            continue
        if str(path) in command:
            found.append(command)
    return found


def test_metadata_tells_what_the_index_holds(corpus, bm25_index):
    metadata = check_index(bm25_index, corpus.path)
    assert (metadata.kind, metadata.passages) == ("bm25", 200)
    assert metadata.corpus_bytes == corpus.path.stat().st_size and metadata.versions["pyserini"] == "1.6.0"
    assert sorted(os.listdir(Path(bm25_index).parent)) == ["index", "index.lock"]


def test_a_whole_index_is_kept_and_one_that_no_longer_fits_replaced(corpus, bm25_index, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(corpus.path.read_bytes())
    folder = Path(shutil.copytree(bm25_index, tmp_path / "out" / "index"))
    kept = folder.stat().st_ino
    first = BuildIndex(str(path)).run(tmp_path / "out")
    assert folder.stat().st_ino == kept and first == {"index": str(folder), **dataclasses.asdict(read_metadata(folder))}
    path.write_text('{"id": "0", "contents": "\\"A\\"\\nb"}\n')
    second = BuildIndex(str(path)).run(tmp_path / "out")
    assert folder.stat().st_ino != kept and second["passages"] == 1
    assert second["corpus_sha256"] == file_sha256(path) != first["corpus_sha256"]
    assert sorted(os.listdir(tmp_path / "out")) == ["index", "index.lock"]


@pytest.mark.slow
def test_an_index_of_other_columns_of_the_same_corpus_is_not_kept(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"head": "A", "german": "eins", "english": "one"}\n')
    for text in ("german", "english", "english"):
        before = (tmp_path / "out" / "index").exists() and (tmp_path / "out" / "index").stat().st_ino
        BuildIndex(str(path), columns={"title": "head", "text": text}).run(tmp_path / "out")
    assert (tmp_path / "out" / "index").stat().st_ino == before, "the third is the second"
    assert PassageStore(tmp_path / "out" / "index").document(0, 0.0).contents == '"A"\none'


def test_an_index_that_leaves_malformed_rows_out_says_so_and_is_not_kept_without(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"_id": "a", "text": "x"}\n{oops\n')
    built = BuildIndex(str(path), skip_malformed=True).run(tmp_path / "out")
    assert (built["passages"], built["skipped"]) == (1, 1)
    with pytest.raises(CorpusError, match="line 2: not JSON"):
        BuildIndex(str(path)).run(tmp_path / "out")


def test_an_index_of_another_corpus_is_refused(corpus, bm25_index, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_bytes(corpus.path.read_bytes().replace(b"p0", b"q0", 1))  # same size
    with pytest.raises(IndexFolderError, match=r"built from another corpus .* 200 passages"):
        check_index(bm25_index, other)
    with pytest.raises(CorpusError, match="no such file"):
        check_index(bm25_index, tmp_path / "none.jsonl")


def test_indexes_of_two_corpora_do_not_fuse(bm25_index, tmp_path):
    metadata = dataclasses.asdict(read_metadata(bm25_index)) | {"corpus_sha256": "0" * 64, "files": {}}
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(IndexFolderError, match="a hybrid needs the same passages"):
        check_indexes([bm25_index, str(tmp_path)])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "was interrupted"),
        ("{", "not an index description"),
        ("[]", "not an index description"),
        ('{"kind": "bm25"}', "not an index description"),
    ],
)
def test_a_folder_that_is_no_index_is_refused(tmp_path, content, what):
    if content is not None:
        (tmp_path / "metadata.json").write_text(content)
    with pytest.raises(IndexFolderError, match=what):
        read_metadata(tmp_path)
    with pytest.raises(IndexFolderError, match="missing; build it with"):
        read_metadata(tmp_path / "none")


def test_an_index_of_a_later_format_is_refused(bm25_index, tmp_path):
    metadata = dataclasses.asdict(read_metadata(bm25_index)) | {"format": 99}
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(IndexFolderError, match="format 99, this version reads 1"):
        read_metadata(tmp_path)


def flips(content: bytes, step: int):
    """One bit in every ``step``-th byte."""
    for at in range(0, len(content), step):
        yield content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def test_a_flipped_bit_in_a_description_is_refused_in_a_line(bm25_index, tmp_path):
    folder = shutil.copytree(bm25_index, tmp_path / "index")
    for name, step, read in (("metadata.json", 5, read_metadata), ("store.json", 1, PassageStore)):
        content = (folder / name).read_bytes()
        before = json.loads(content)
        for altered in flips(content, step):
            (folder / name).write_bytes(altered)
            try:
                read(folder)
            except IndexFolderError as error:
                assert "\n" not in str(error) and name in str(error)
            else:  # a blank for a blank, or the name of the digest
                assert {**json.loads(altered), "sha256": before["sha256"]}.items() >= before.items()
        (folder / name).write_bytes(content)
        read(folder)


@pytest.mark.parametrize(
    ("kind", "settings", "what"),
    [
        ("dense_flat", {"encoder": {"model": "m", "qooling": "cls"}}, "unexpected keyword argument 'qooling'"),
        ("dense_hnsw", {"encoder": {"model": "m"}, "hnsw": {"m": 1}}, "must be at least 2"),
        ("dense_fmat", {"encoder": {"model": "m"}}, "kind 'dense_fmat'"),
    ],
)
def test_settings_of_an_earlier_description_are_those_of_its_kind(bm25_index, tmp_path, kind, settings, what):
    values = dataclasses.asdict(read_metadata(bm25_index)) | {"kind": kind, "settings": settings, "files": {}}
    (tmp_path / "metadata.json").write_text(json.dumps(values))
    with pytest.raises(IndexFolderError, match=f"metadata.json: not an index description .*{what}"):
        read_metadata(tmp_path)


def test_a_full_disk_leaves_no_index(corpus, tmp_path):
    def limit() -> None:  # the kernel refuses to let any file grow further, as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (40 * 1024, 40 * 1024))

    build = build_elsewhere(corpus.path, tmp_path, preexec_fn=limit)
    output = build.communicate(timeout=600)[0]
    assert build.returncode != 0 and "File too large" in output
    assert os.listdir(tmp_path) == ["index.lock"]


def test_a_failing_lucene_leaves_no_index(corpus, tmp_path):
    with pytest.raises(IndexFolderError, match="after 0 of 200 passages"):
        BuildIndex(str(corpus.path), java_heap="1k").run(tmp_path)
    assert os.listdir(tmp_path) == ["index.lock"]


@pytest.mark.slow
def test_a_killed_build_leaves_no_index_and_does_not_block_the_next(corpus, tmp_path):
    build = build_elsewhere(corpus.path, tmp_path)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("index.partial-*/store.json")):  # the passages are written, Lucene starts
        assert build.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    build.send_signal(signal.SIGKILL)
    build.wait()
    build.stdout.close()
    assert list(tmp_path.glob("index.partial-*"))
    with pytest.raises(IndexFolderError, match="missing"):
        read_metadata(tmp_path / "index")
    while commands_naming(tmp_path):  # the indexer does not outlive its builder
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert BuildIndex(str(corpus.path)).run(tmp_path)["passages"] == 200
    assert sorted(os.listdir(tmp_path)) == ["index", "index.lock"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"encoder": EncoderConfig("m")}, "encoder must be absent"),
        ({"kind": "dense_flat"}, "encoder must be given"),
        ({"kind": "dense_flat", "encoder": EncoderConfig("m"), "hnsw": HNSWConfig()}, "hnsw must be absent"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, what):
    with pytest.raises(ValueError, match=what):
        BuildIndex("corpus.jsonl", **options)


def test_search_settings_without_effect_are_refused(bm25_index):
    with pytest.raises(ValueError, match="device: only for dense indexes"):
        SearchSettings(device="cpu").check([read_metadata(bm25_index)])
    bm25 = read_metadata(bm25_index)
    for kind in ("bm25", "dense_hnsw"):
        with pytest.raises(ValueError, match="gpu: only for dense_flat indexes"):
            SearchSettings(gpu=True).check([dataclasses.replace(bm25, kind=kind)])
    flat = dataclasses.replace(bm25, kind="dense_flat")
    with pytest.raises(ValueError, match="found device 'cpu'"):
        SearchSettings(gpu=True, device="cpu").check([flat])
    SearchSettings(gpu=True, device="cuda:0").check([bm25, flat])


def test_torn_files_are_refused_before_anything_is_opened(bm25_index, tmp_path):
    for name, state in (
        ("passages/00000.jsonl", "100 bytes long"),
        ("offsets.bin", "8 bytes long"),
        ("lucene", "missing"),
    ):
        folder = tmp_path / Path(name).stem
        shutil.copytree(bm25_index, folder)
        if name == "lucene":
            next((folder / name).glob("*.fdt")).unlink()
        else:
            os.truncate(folder / name, int(state.split()[0]))
        with pytest.raises(
            IndexFolderError, match=f"{name}.*: {state}, [0-9]+ bytes when it was built; build the index"
        ):
            check_index(folder)


def test_an_interrupted_build_says_how_to_go_on(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(BuildIndex, "run", interrupted)
    monkeypatch.setattr(
        sys, "argv", ["retrieval", "build", "--corpus", "c.jsonl", "--output", "out", "--kind", "dense_sq8"]
    )
    sys.argv += ["--encoder.model", "e5", "--encoder.query_prefix", "query: "]
    with pytest.raises(SystemExit, match="out/index is unchanged. The same command continues after the encoded"):
        build_or_serve()
