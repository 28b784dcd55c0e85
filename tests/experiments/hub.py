"""A stand-in for the Hugging Face hub: the part of its HTTP API that uploads and downloads of small files use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

GET = re.compile(
    r"(/api)?/((?P<kind>models|datasets)/)?(?P<name>[^/]+/[^/]+)"
    r"/(?P<what>revision|tree|resolve)/(?P<revision>[^/]+)(/(?P<file>.+))?"
)


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def commit(revision: str) -> str:
    """The id of the commit that a branch or tag names."""
    return digest(revision.encode())


class Hub:
    """Repositories by name: whether private, and files. ``token`` is the one that may write. ``published``: files that
    anyone may read, by repository (``datasets/owner/name`` or ``models/owner/name``), revision and path."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.published: dict[str, dict[str, dict[str, bytes]]] = {}
        self.downloads: list[str] = []  # paths of the files that were read
        self.endpoint = ""

    def read(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of a GET."""
        found = GET.fullmatch(path)
        kind = found and (found["kind"] or "models")
        revisions = self.published.get(f"{kind}/{found['name']}", {}) if found else {}
        if found and kind == "models" and found["name"] in self.files:
            revisions = {"main": self.files[found["name"]]}
        revision = next((r for r in revisions if found and unquote(found["revision"]) in (r, commit(r))), None)
        if found is None or revision is None:
            code = "RevisionNotFound" if revisions else "RepoNotFound"
            return 404, {"X-Error-Code": code, "X-Error-Message": "not found"}, b""
        files = revisions[revision]
        if found["what"] == "revision":
            about = {"id": found["name"], "sha": commit(revision), "siblings": [{"rfilename": file} for file in files]}
            return 200, {}, json.dumps(about).encode()
        if found["what"] == "tree":
            tree = [{"type": "file", "path": f, "size": len(c), "oid": digest(c)} for f, c in files.items()]
            return 200, {}, json.dumps(tree).encode()
        content = files.get(found["file"])
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": commit(revision)}, content

    def answer(self, path: str, body: bytes, token: str | None) -> tuple[int, dict]:
        if token != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            if name in self.private:
                return 409, {"error": "You already created this model repo", "url": f"{self.endpoint}/{name}"}
            self.private[name], self.files[name] = asked["visibility"] == "private", {}
            return 200, {"url": f"{self.endpoint}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name = "/".join(path.split("/")[3:5])
        if path == f"/api/models/{name}/preupload/main":
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return 200, {"files": modes}
        if path == f"/api/models/{name}/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "deletedFile":
                    del self.files[name][line["value"]["path"]]
                if line["key"] == "file":
                    self.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return 200, {"success": True, "commitOid": "c" * 40, "commitUrl": f"{self.endpoint}/{name}/commit/c"}
        return 404, {"error": f"no such path: {path}"}


@contextmanager
def serve(token: str) -> Iterator[Hub]:
    hub = Hub(token)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, said = hub.answer(self.path.partition("?")[0], body, self.headers.get("Authorization"))
            text = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if status >= 400:
                self.send_header("X-Error-Message", said["error"])
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, headers, content = hub.read(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
                hub.downloads += [path] if "/resolve/" in path else []

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
