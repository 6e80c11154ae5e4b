"""A reward server on this machine that answers as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], Any]
"""Status, headers, and content: bytes, or what is sent as JSON."""


@contextmanager
def serving(answer: Callable[[str, dict[str, Any]], Answer]) -> Iterator[str]:
    """A server that answers a path and a request's JSON; gives its URL.

    With the status 0 it hangs up without an answer; with the header X-Trickle its answer comes byte by byte.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, headers, content = answer(self.path, body)
            if status == 0:
                return
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response_only(status)  # without a date of its own
            for name, value in ({"Content-Length": str(len(text))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            for byte in text if "X-Trickle" in headers else ():
                self.wfile.write(bytes([byte]))
                time.sleep(0.02)
            if "X-Trickle" not in headers:
                self.wfile.write(text)

        def do_GET(self) -> None:  # what a followed 302 would become
            raise AssertionError("the request lost its method")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that hang up are part of the tests
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
