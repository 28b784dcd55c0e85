# Sourced by the set-up scripts, which define `fail`. `find_python` sets PYTHON, which may name the one to take.
find_python() {
    local candidate found=
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        "$candidate" -c '' 2>/dev/null || continue # not there, or a shim of pyenv without its version
        if ! "$candidate" -c "import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])"; then
            found="$found, $candidate is $("$candidate" --version 2>&1)"
        elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            found="$found, $candidate without venv (Ubuntu: apt-get install ${candidate##*/}-venv)"
        else
            PYTHON=$candidate
            return
        fi
    done
    found=${found:-, none}
    fail "Python 3.11 or 3.12 is needed; found: ${found#, }. Install one (Ubuntu 24.04: apt-get install python3.12-venv;
anywhere: uv python install 3.12), or name one: make setup PYTHON=/path/to/python3.12"
}
