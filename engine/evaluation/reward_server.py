"""The HTTP side of ``engine.serve_reward``: requests in, batches of their sequences out, scores back.

Imports no torch, so that a port that is taken is known before a model loads.
"""

from __future__ import annotations

import http.server
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from engine.config import ConfigError
from engine.sample import Sample

Scores = list[float | None]
PATHS = ("/", "/score")
MOST_BYTES = 256 * 2**20
"""Of a request's body."""
IDLE = 300
"""Seconds after which a connection on which nothing comes is closed."""
GRACE = 5.0
"""Seconds that the last answers have to leave when the server stops."""


class BadRequest(ValueError):
    """A request cannot be answered; the message says why."""


class Unscorable(ValueError):
    """The model gives a request's sequences no score that can be sent."""


class Stopping(RuntimeError):
    """The server stops before it has an answer."""


@dataclass(eq=False)
class Asked:
    """A request that waits for its scores."""

    samples: list[Sample]
    scores: Future[Scores] = field(default_factory=Future)

    @property
    def tokens(self) -> int:
        """Of all its sequences."""
        return sum(sample.length for sample in self.samples)


class RewardServer:
    """Listens at once and answers 503 until ``start``; every connection has a thread, and one caller scores for all.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self._queue: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._read: Callable[[dict[str, Any]], list[Sample]] | None = None
        self._in_hand: list[Asked] = []
        self._stopping = False
        self._answering, self._answered = 0, threading.Condition()
        handler = type("Handler", (_Handler,), {"rewards": self})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise ConfigError(f"port: {host}:{port} cannot be listened on: {error.strerror or error}") from error
        self.url = f"http://{host}:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    @property
    def state(self) -> str:
        """``loading``, ``ok`` or ``stopping``."""
        return "stopping" if self._stopping else "loading" if self._read is None else "ok"

    def start(self, read: Callable[[dict[str, Any]], list[Sample]]) -> None:
        """Takes requests from here on.

        Args:
            read: makes a request's JSON sequences to score; raises ``BadRequest``. Called by one thread at a time.
        """
        self._read = read

    def batches(self, tokens: int) -> Iterator[list[Asked]]:
        """Requests as they come, those that wait together up to so many tokens; at least one."""
        held: Asked | None = None
        while True:
            batch = self._in_hand = [held or self._queue.get()]
            held, total = None, batch[0].tokens
            while not self._queue.empty():
                held = self._queue.get()
                if (total := total + held.tokens) > tokens:
                    self._in_hand = [*batch, held]
                    break
                batch.append(held)
                held = None
            yield batch

    def stop(self) -> None:
        """Answers 503 to what still waits, and listens no more."""
        self._stopping = True
        waiting = list(self._in_hand)
        while not self._queue.empty():
            waiting.append(self._queue.get())
        for asked in waiting:
            if not asked.scores.done():
                asked.scores.set_exception(Stopping("the server stops"))
        self._server.shutdown()
        self._server.server_close()
        with self._answered:
            self._answered.wait_for(lambda: not self._answering, GRACE)

    def scores(self, body: bytes) -> Scores:
        """A request's scores, when they are there; raises ``BadRequest``, ``Unscorable`` or ``Stopping``."""
        if self.state != "ok":
            raise Stopping(f"the server is {self.state}")
        assert self._read is not None
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise BadRequest(f"the body must be an object with prompts and completions, not {content!r:.80}")
        asked = Asked(self._read(content))
        self._queue.put(asked)
        return asked.scores.result()

    def answering(self, change: int) -> None:
        """Counts the requests under way."""
        with self._answered:
            self._answering += change
            self._answered.notify_all()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that has gone asks again if it wants."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE
    rewards: RewardServer

    def do_GET(self) -> None:
        """``/health``: 200 when scores can be had, else 503."""
        if self.path != "/health":
            self._send(HTTPStatus.NOT_FOUND, {"error": f"there is no {self.path}: ask GET /health or POST /score"})
            return
        state = self.rewards.state
        self._send(HTTPStatus.OK if state == "ok" else HTTPStatus.SERVICE_UNAVAILABLE, {"status": state})

    def do_POST(self) -> None:
        """``/score``: the scores of prompts and completions."""
        self.rewards.answering(1)
        try:
            self._send(*self._answer())
        finally:
            self.rewards.answering(-1)

    def _answer(self) -> tuple[HTTPStatus, dict[str, Any]]:
        length = self.headers.get("Content-Length")
        if length is None or not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True  # what follows is not read
            if length is None:
                return HTTPStatus.LENGTH_REQUIRED, {"error": "a request must have a Content-Length"}
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {
                "error": f"a request's Content-Length must be a number up to {MOST_BYTES}, not {length}"
            }
        body = self.rfile.read(int(length))
        if self.path not in PATHS:
            return HTTPStatus.NOT_FOUND, {"error": f"there is no {self.path}: ask POST /score"}
        try:
            return HTTPStatus.OK, {"scores": self.rewards.scores(body)}
        except BadRequest as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except Unscorable as error:
            return HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}
        except Stopping as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}

    def _send(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a run asks thousands of times."""


def texts(content: dict[str, Any], name: str) -> list[str]:
    """One of a request's lists of texts; raises ``BadRequest`` where it is none."""
    found = content.get(name)
    if not isinstance(found, list):
        raise BadRequest(f"'{name}' must be a list of strings, not {found!r:.80}" if name in content else _lacks(name))
    for place, text in enumerate(found):
        if not isinstance(text, str):
            raise BadRequest(f"'{name}' must be a list of strings, and its item {place} is {text!r:.80}")
    return found


def _lacks(name: str) -> str:
    return f"the body has no '{name}': it must be an object with the lists prompts and completions"


def same_length(lists: dict[str, Sequence[Any]]) -> None:
    """Raises ``BadRequest`` where lists of a request differ in length."""
    if len({len(one) for one in lists.values()}) > 1:
        counts = ", ".join(f"{len(one)} {name}" for name, one in lists.items())
        raise BadRequest(f"the lists must have an item for each response: there are {counts}")
