#!/usr/bin/env bash
# Makes .venv-alfworld, the environment of the household engine `alfworld`, or finds that it is there already.
# `make alfworld` runs it from the project's root.
#
# ALFWorld goes into an environment of its own: its planner and its game interpreter are compiled here, and its forty
# packages are none of the trainer's business. No game is downloaded: the project generates its own. For the original
# ones: ALFWORLD_DATA=folder .venv-alfworld/bin/alfworld-download.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-alfworld
STAMP=$VENV/.setup-stamp
PINS='alfworld==0.4.2 textworld==1.7.0 fast-downward-textworld==20.6.4'

fail() {
    printf '\nset-up of ALFWorld stopped: %s\n' "$1" >&2
    exit 1
}

KEY=$(sha256sum <scripts/setup_alfworld.sh | cut -c1-16)

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$KEY" ] && [ -x "$VENV/bin/python" ]; then
    exit 0
fi

. scripts/find_python.sh
find_python
for tool in cmake g++ make; do
    command -v $tool >/dev/null ||
        fail "no $tool found (ALFWorld's planner is compiled). On Debian and Ubuntu: apt-get install cmake g++ make"
done
free_gb=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
[ -d "$VENV" ] || [ "$free_gb" -ge 2 ] || fail "$free_gb GiB free here, about 2 GiB are needed"

rm -f "$STAMP"
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv "$VENV" # an interrupted one has no pip

printf 'setting up %s; this happens once and takes about 4 minutes, most of them compiling\n' "$VENV"
# shellcheck disable=SC2086  # the pins are words
"$VENV/bin/python" -m pip install -qq --disable-pip-version-check --retries 5 $PINS || fail "this command failed:
    $VENV/bin/python -m pip install $PINS
If it was a download: check the network (proxy: HTTPS_PROXY, mirror: PIP_INDEX_URL) and run the same make command
again. If the compiler stopped: its message is above. If the disk is full: free some space. Nothing has been marked as
done."

ALFWORLD_DATA=${TMPDIR:-/tmp} "$VENV/bin/python" - <<'CHECK' || fail "ALFWorld does not start (see above). Remove $VENV and run make alfworld again."
import fast_downward
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs import PddlEnv

AlfredDemangler(PddlEnv())
CHECK
printf '%s' "$KEY" >"$STAMP"
printf 'ready\n'
