"""What one client request asks of the workers, and what was chosen for it. Values only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farfill.gateway.body import BodyStream
from farfill.router.policy import Choice


@dataclass(frozen=True, slots=True)
class Work:
    """One request to be carried out.

    Attributes:
        target: path and query, as they go to the worker.
        headers: the client's.
        body: as the client sent it; a stream can be sent only once.
        fields: the body's, where it is a JSON object.
        streaming: the answer comes in pieces.
        generates: the answer is a completion or a chat (see `legs.Upstream`).
        output_tokens: how many it may make at most, or a guess; for the load that it is.
    """

    request_id: str
    tenant: str
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes | BodyStream | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    streaming: bool = False
    generates: bool = False
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chosen:
    """The path and what it rests on.

    Attributes:
        token_ids: of the prompt; None where the request has none, or is not to be split.
        prompt_tokens: their number; 0 for None.
        block_names: of the prompt's prefix blocks, by decode worker (each has its own fingerprint).
    """

    choice: Choice
    model: str
    token_ids: list[int] | None = None
    prompt_tokens: int = 0
    block_names: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
