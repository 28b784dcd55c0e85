#!/usr/bin/env bash
# Makes .templates, the published chat templates that tests/rollout/protocols/test_published_templates.py reads, or finds
# that it is there already. `make templates` runs it from the project's root.
#
# The templates come out of two packages of PyPI and stay out of the repository: each has its model's licence. Nothing is
# installed. pip prepares the metadata of a source distribution even where it only downloads, in a build environment of
# its own: most of the half minute.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=.venv/bin/python
FOLDER=.templates
STAMP=$FOLDER/.setup-stamp
TRL=1.16.0
LLAMA_CPP_PYTHON=0.3.36

fail() {
    printf '\nset-up of the chat templates stopped: %s\n' "$1" >&2
    exit 1
}

KEY=$(sha256sum <scripts/setup_templates.sh | cut -c1-16)

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$KEY" ]; then
    exit 0
fi

WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
free_gb=$(df -Pk "$WORK" | awk 'NR == 2 {print int($4 / 1048576)}')
[ "$free_gb" -ge 1 ] || fail "$free_gb GiB free in the temporary folder, about 1 GiB is needed (another one: TMPDIR)"

download() { # download pip-arguments...
    TMPDIR=$WORK "$PYTHON" -m pip download -qq --disable-pip-version-check --retries 5 --no-deps -d "$WORK" "$@" ||
        fail "this command failed:
    $PYTHON -m pip download --no-deps $*
If it was a download: check the network (proxy: HTTPS_PROXY, mirror: PIP_INDEX_URL) and run the same make command
again. Nothing has been marked as done."
}

printf 'fetching chat templates into %s; this happens once and takes about 30 seconds\n' "$FOLDER"
download "trl==$TRL"
download --no-binary llama-cpp-python "llama-cpp-python==$LLAMA_CPP_PYTHON"

rm -rf "$FOLDER"
"$PYTHON" - "$WORK" "$FOLDER" <<'UNPACK' || fail "a package has other contents than expected (see above)"
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

work, folder = map(Path, sys.argv[1:])


def keep(part, member, templates, licence, read):
    path = PurePosixPath(member)
    inside = path.match(f"{templates}/*.jinja") and not path.stem.endswith("_training")
    if inside or path.match(f"{templates}/README.md") or path.match(licence):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / path.name).write_bytes(read())


[wheel] = work.glob("trl-*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        keep("trl", name, "trl/chat_templates", "trl-*.dist-info/licenses/LICENSE", lambda name=name: archive.read(name))
[source] = work.glob("llama_cpp_python-*.tar.gz")
with tarfile.open(source) as archive:
    for member in archive:
        if member.isfile():
            take = lambda member=member: archive.extractfile(member).read()
            keep("llama", member.name, "vendor/llama.cpp/models/templates", "*/vendor/llama.cpp/LICENSE", take)
for part, least in {"trl": 40, "llama": 60}.items():
    found = len(list((folder / part).glob("*.jinja")))
    if found < least or not (folder / part / "LICENSE").is_file():
        sys.exit(f"found {found} templates and {'a' if (folder / part / 'LICENSE').is_file() else 'no'} licence in {part}")
UNPACK
printf '%s' "$KEY" >"$STAMP"
printf 'ready\n'
