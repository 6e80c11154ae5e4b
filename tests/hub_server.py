"""A stand-in for the Hugging Face hub on this machine: the few endpoints that uploading a folder needs."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What has come."""

    url: str = ""
    made: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests for a repository."""
    tokens: set[str | None] = field(default_factory=set)
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Their messages."""


@contextmanager
def serving(name: str) -> Iterator[Hub]:
    """A hub on which a repository of that name can be made and uploaded to; everything else is refused with 403."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hub.tokens.add(self.headers.get("Authorization"))
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                if f"{asked.get('organization')}/{asked['name']}" != name:
                    self.answer(403, {"error": f"only {name} can be made here"})
                    return
                hub.made.append(asked)
                self.answer(200, {"url": f"{hub.url}/{name}", "id": name})
            elif self.path == f"/api/models/{name}/preupload/main":
                files = [
                    {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for one in json.loads(body)["files"]
                ]
                self.answer(200, {"files": files})
            elif self.path == f"/api/models/{name}/commit/main":
                for line in map(json.loads, body.decode().splitlines()):
                    if line["key"] == "header":
                        hub.commits.append(line["value"]["summary"])
                    else:
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.answer(200, {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1"})
            else:
                self.answer(403, {"error": f"no {self.path}"})

        def answer(self, status: int, content: dict[str, Any]) -> None:
            text = json.dumps(content).encode()
            self.send_response_only(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
