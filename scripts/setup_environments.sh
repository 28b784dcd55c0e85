#!/usr/bin/env bash
# Makes .venv-openenv and .venv-verifiers, the environments of OpenEnv's servers and of verifiers, or finds that they are
# there already. `make environments` runs it from the project's root.
#
# Both need other versions of openai, mcp and fastmcp than vLLM does.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    printf '\nset-up of %s stopped: %s\n' "$1" "$2" >&2
    exit 1
}

. scripts/find_python.sh
find_python

make_environment() { # make_environment NAME REQUIREMENT CHECK
    local venv=.venv-$1 stamp=.venv-$1/.setup-stamp key
    key=$(printf '%s' "$2" | cat - scripts/setup_environments.sh | sha256sum | cut -c1-16)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && [ -x "$venv/bin/python" ]; then return; fi
    printf 'setting up %s; this happens once and takes about a minute\n' "$venv"
    rm -f "$stamp"
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv "$venv" # an interrupted one has no pip
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --retries 5 "$2" ||
        fail "$venv" "pip install $2 failed (see above). If it was a download, run the same make command again"
    "$venv/bin/python" -c "$3" || fail "$venv" "it does not start (see above); remove it and run make environments again"
    printf '%s' "$key" >"$stamp"
}

make_environment openenv 'openenv==0.10.0' 'import openenv.core.env_server.http_server'
make_environment verifiers 'verifiers==0.4.0' 'import verifiers.v1'
printf 'ready\n'
