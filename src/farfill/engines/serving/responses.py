"""The JSON objects that OpenAI clients read, built from an engine's events. Pure: no HTTP, no engine calls.

Shapes are OpenAI's, with vLLM's additions (`stop_reason`, `kv_transfer_params`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from farfill.engines.api import Tokenizer, TokenLogprob, Usage


@dataclass(slots=True)
class ChoiceText:
    """What one choice has said so far, and where its next token's text begins (for `text_offset`)."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_chars: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to tell a client about one choice: new text, new log-probabilities, its end."""

    choice: ChoiceText
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    finished: bool


@dataclass(frozen=True, slots=True)
class Head:
    """What all objects of one response have in common. `created` is in Unix seconds."""

    response_id: str
    created: int
    model: str


class Shape(Protocol):
    """How an endpoint says things: `/v1/completions` or `/v1/chat/completions`."""

    id_prefix: str
    role_first: bool

    def whole(
        self, head: Head, choices: Sequence[ChoiceText], usage: dict[str, Any], extra: dict[str, Any]
    ) -> dict[str, Any]:
        """The response that is not streamed."""

    def first(self, head: Head, choice: ChoiceText) -> dict[str, Any]:
        """The chunk that opens a choice, where `role_first`."""

    def chunk(self, head: Head, piece: Piece) -> dict[str, Any]: ...

    def last(self, head: Head, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that carries only the usage."""


class CompletionShape:
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    role_first = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def whole(
        self, head: Head, choices: Sequence[ChoiceText], usage: dict[str, Any], extra: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            **self._head(head),
            "choices": [
                self._choice(choice, choice.text, _or_none(choice.logprobs), finished=True, offset=0)
                for choice in choices
            ],
            "usage": usage,
            **extra,
        }

    def first(self, head: Head, choice: ChoiceText) -> dict[str, Any]:
        raise AssertionError("a completion has no opening chunk")

    def chunk(self, head: Head, piece: Piece) -> dict[str, Any]:
        choice = piece.choice
        made = self._choice(choice, piece.text, piece.logprobs, finished=piece.finished, offset=choice.token_chars)
        if piece.logprobs:
            choice.token_chars += sum(len(_text(self._tokenizer, entry.token_id)) for entry in piece.logprobs)
        return {**self._head(head), "choices": [made]}

    def last(self, head: Head, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(head), "choices": [], "usage": usage}

    @staticmethod
    def _head(head: Head) -> dict[str, Any]:
        return {"id": head.response_id, "object": "text_completion", "created": head.created, "model": head.model}

    def _choice(
        self,
        choice: ChoiceText,
        text: str,
        logprobs: Sequence[TokenLogprob] | None,
        *,
        finished: bool,
        offset: int,
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None if logprobs is None else completion_logprobs(self._tokenizer, logprobs, offset),
            "finish_reason": choice.finish_reason if finished else None,
            "stop_reason": choice.stop_reason if finished else None,
        }


class ChatShape:
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    role_first = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def whole(
        self, head: Head, choices: Sequence[ChoiceText], usage: dict[str, Any], extra: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            **self._head(head, "chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(_or_none(choice.logprobs)),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for choice in choices
            ],
            "usage": usage,
            **extra,
        }

    def first(self, head: Head, choice: ChoiceText) -> dict[str, Any]:
        return self._chunk(head, choice, {"role": "assistant", "content": ""}, None, finished=False)

    def chunk(self, head: Head, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text or not piece.finished else {}
        return self._chunk(head, piece.choice, delta, self._logprobs(piece.logprobs), finished=piece.finished)

    def last(self, head: Head, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(head, "chat.completion.chunk"), "choices": [], "usage": usage}

    @staticmethod
    def _head(head: Head, kind: str) -> dict[str, Any]:
        return {"id": head.response_id, "object": kind, "created": head.created, "model": head.model}

    def _chunk(
        self, head: Head, choice: ChoiceText, delta: dict[str, Any], logprobs: dict[str, Any] | None, *, finished: bool
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason if finished else None,
        }
        if finished:
            made["stop_reason"] = choice.stop_reason
        return {**self._head(head, "chat.completion.chunk"), "choices": [made]}

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if logprobs is None else {"content": chat_logprobs(self._tokenizer, logprobs)}


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`. `cached_tokens` is what an aggregated server would say: not computed for this request."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def completion_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The legacy form: parallel lists; each `top_logprobs` entry also has the chosen token."""
    tokens = [_text(tokenizer, entry.token_id) for entry in logprobs]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [
            {
                **{_text(tokenizer, token): logprob for token, logprob in reversed(entry.top)},
                _text(tokenizer, entry.token_id): entry.logprob,
            }
            for entry in logprobs
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """The chat form: one object for each token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return [
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.top],
        }
        for token in logprobs
    ]


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _or_none(logprobs: list[TokenLogprob]) -> list[TokenLogprob] | None:
    return logprobs or None
