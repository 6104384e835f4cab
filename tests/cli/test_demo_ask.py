"""The demo's client: text, headers and times of a good stream; every bad end is an error, never a short answer."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from farfill.cli.demo.ask import ask
from farfill.errors import FarfillError

MESSAGES = [{"role": "user", "content": "Hi"}]


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def delta(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
DONE = event(b"[DONE]")


@contextmanager
def gateway(status: int, body: bytes) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Answers every request with `body`; yields its port and the requests it got."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("X-Farfill-Path", "remote")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing on the tests' output."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1], requests
        finally:
            server.shutdown()
            thread.join()


def test_a_good_stream() -> None:
    first = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    with gateway(200, first + delta("Hel") + delta("lo") + USAGE + DONE) as (port, requests):
        answer = ask(port, "m", MESSAGES, 24)
    assert (answer.text, answer.prompt_tokens, answer.headers["x-farfill-path"]) == ("Hello", 7, "remote")
    assert 0 < answer.first_token_s <= answer.total_s
    assert requests[0]["temperature"] == 0
    assert requests[0]["max_tokens"] == 24


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (503, json.dumps({"error": {"code": "no_worker", "message": "none"}}).encode(), "no_worker"),
        (502, b"<html>a proxy's page</html>", "engine_failed"),
        (200, delta("Hel") + event({"error": {"code": "transfer_stalled", "message": "m"}}), "transfer_stalled"),
        (200, delta("Hel") + USAGE, "protocol_violation"),
        (200, delta("Hel") + DONE, "protocol_violation"),
        (200, USAGE + DONE, "protocol_violation"),
        (200, delta("Hel") + b'data: {"choi', "protocol_violation"),
    ],
)
def test_every_bad_end_is_an_error(status: int, body: bytes, code: str) -> None:
    with gateway(status, body) as (port, _), pytest.raises(FarfillError) as caught:
        ask(port, "m", MESSAGES, 24)
    assert caught.value.code == code


def test_nobody_there() -> None:
    with gateway(200, b"") as (port, _):
        pass
    with pytest.raises(FarfillError) as caught:
        ask(port, "m", MESSAGES, 24)
    assert caught.value.code == "connection_lost"
