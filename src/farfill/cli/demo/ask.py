"""One streamed chat request to the demo's gateway, with its real time to first token.

Not a client library: blocking, one request at a time, for a gateway on this machine.
"""

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from farfill.errors import OperationError, error_from_openai

TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        headers: of the response, names in lower case.
        first_token_s, total_s: seconds from sending the request.
        usage: OpenAI's usage object.
    """

    text: str
    headers: Mapping[str, str]
    first_token_s: float
    total_s: float
    usage: Mapping[str, Any]

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"])


def ask(port: int, model: str, messages: list[dict[str, str]], max_tokens: int) -> Answer:
    """Sends a greedy, streaming chat completion to the gateway on this machine.

    Raises:
        FarfillError: the gateway's error response or error event; `protocol_violation` for a stream that breaks off.
    """
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    began = time.perf_counter()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        if response.status != 200:
            raise error_from_openai(_json_or_text(response.read()), response.status)
        pieces: list[str] = []
        usage: Mapping[str, Any] = {}
        first_token_s: float | None = None
        for event in _events(response):
            if "error" in event:
                raise error_from_openai(event, 502)
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                piece = choice.get("delta", {}).get("content")
                if piece:
                    first_token_s = first_token_s or time.perf_counter() - began
                    pieces.append(piece)
    except (OSError, http.client.HTTPException) as error:
        raise OperationError("connection_lost", f"the gateway's answer broke off: {error!r}") from error
    finally:
        connection.close()
    if not usage or first_token_s is None:
        raise OperationError("protocol_violation", "the gateway's stream had no text or no usage")
    return Answer("".join(pieces), headers, first_token_s, time.perf_counter() - began, usage)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE]."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            yield json.loads(data)
        except ValueError as error:
            raise OperationError(
                "protocol_violation", f"the gateway's stream has an event cut off: {data!r}"
            ) from error
    raise OperationError("protocol_violation", "the gateway's stream ended before [DONE]")


def _json_or_text(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
