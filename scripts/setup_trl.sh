#!/usr/bin/env bash
# Makes .venv-trl, the environment of TRL in `python -m benchmarks.trl_comparison`, or finds that it is there already.
# `make trl` runs it from the project's root.
#
# TRL goes into an environment of its own: it needs accelerate and datasets, which nothing else here does, and imports
# whatever it finds (vLLM, DeepSpeed, PEFT). What both sides run on, torch and transformers above all, has the versions
# of requirements/cpu.txt in both, so that the comparison is one of trainers.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-trl
STAMP=$VENV/.setup-stamp
PINS='trl==1.16.0 accelerate==1.15.0 datasets==5.2.0'

fail() {
    printf '\nset-up of TRL stopped: %s\n' "$1" >&2
    exit 1
}

KEY=$(cat requirements/pins.in requirements/cpu.txt scripts/setup_trl.sh | sha256sum | cut -c1-16)

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$KEY" ] && [ -x "$VENV/bin/python" ]; then
    exit 0
fi

. scripts/find_python.sh
find_python
free_gb=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
[ -d "$VENV" ] || [ "$free_gb" -ge 3 ] ||
    fail "$free_gb GiB free here, about 3 GiB are needed (and some 6 more where pip takes torch's CUDA build)"

rm -f "$STAMP"
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv "$VENV" # an interrupted one has no pip

# The versions without their hashes: pip would ask for a hash of every other package, too.
VERSIONS=$VENV/versions.txt
{ grep '^torch==' requirements/pins.in; sed -n '/^[a-z].*==/s/ \\$//p' requirements/cpu.txt; } >"$VERSIONS"

step() { # step NAME pip-arguments...
    printf '  %s\n' "$1"
    shift
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --retries 5 -c "$VERSIONS" "$@" || fail "this command failed:
    $VENV/bin/python -m pip install -c $VERSIONS $*
If it was a download: check the network (proxy: HTTPS_PROXY, mirror: PIP_INDEX_URL) and run the same make command
again. If the disk is full: free some space. Nothing has been marked as done."
}

printf 'setting up %s; this happens once and takes about 2 minutes\n' "$VENV"
step "torch" "$(grep '^torch==' "$VERSIONS")"
# shellcheck disable=SC2086  # the pins are words
step "TRL" "$(grep '^transformers==' "$VERSIONS")" $PINS

"$VENV/bin/python" - <<'CHECK' || fail "TRL does not start (see above). Remove $VENV and run make trl again."
from trl import DistillationTrainer, GRPOTrainer
CHECK
printf '%s' "$KEY" >"$STAMP"
printf 'ready\n'
