"""A stand-in for the Hugging Face hub: the part of its HTTP API that an upload of small files uses."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """Repositories by name: whether private, and files. ``token`` is the one that may write."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.endpoint = ""

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
