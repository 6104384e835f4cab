"""From token ids to text, token by token: whole characters only, and stop strings found before they are shown.

Not here: vocabularies and templates (`tokenizer`), nor when a choice ends otherwise (`choice`).
"""

from collections.abc import Callable, Sequence
from typing import Final

REPLACEMENT: Final = "\ufffd"
# A UTF-8 character has at most four bytes, so at most four tokens; twice that cannot become a character any more.
PENDING_TOKENS_MAX: Final = 8
# Of those bytes, three at most can still wait for their last one.
PENDING_CHARS_MAX: Final = 3
# Without a clean border the window would grow for ever. What is kept must hold the pending characters.
GARBAGE_TOKENS_MAX: Final = 64
GARBAGE_TOKENS_KEPT: Final = 16


class Detokenizer:
    """Decodes one choice's tokens incrementally; the pieces joined are the decoding of the whole.

    Decoding a token may depend on the ones before it (spaces, byte runs), so each time the tokens since the last but
    one clean border are decoded again: a border is clean where the text does not end in an incomplete character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._border = 0  # tokens of the window before the last clean border
        self._emitted = 0  # characters of the window's text that have been given out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            piece = text[self._emitted :]
            if piece or len(self._window) - self._border > PENDING_TOKENS_MAX:  # special tokens may give no text
                self._restart(self._window[self._border :], pending_chars=0)
                self._border = len(self._window)
            return piece
        if len(self._window) - self._border <= PENDING_TOKENS_MAX:
            return ""
        # Not text, whatever comes next: give out all but what may still be the beginning of a character.
        pending = min(PENDING_CHARS_MAX, len(text) - len(text.rstrip(REPLACEMENT)))
        piece = text[self._emitted : len(text) - pending]
        self._emitted = max(self._emitted, len(text) - pending)
        if len(self._window) > GARBAGE_TOKENS_MAX:
            self._restart(self._window[-GARBAGE_TOKENS_KEPT:], pending_chars=pending)
            self._border = 0
        return piece

    def flush(self) -> str:
        piece = self._decode(self._window)[self._emitted :]
        self._window, self._border, self._emitted = [], 0, 0
        return piece

    def _restart(self, window: list[int], *, pending_chars: int) -> None:
        self._window = window
        self._emitted = max(0, len(self._decode(window)) - pending_chars)


class StopStrings:
    """Finds stop strings in a choice's text as it comes, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that has matched or None).

        Where several match, the one that begins first, then the first in the list. After a match nothing is held.
        """
        if not self._stops:
            return text, None
        held = self._held + text
        found = [(position, order) for order, stop in enumerate(self._stops) if (position := held.find(stop)) >= 0]
        if found:
            position, order = min(found)
            stop = self._stops[order]
            self._held = ""
            return held[: position + (len(stop) if self._include_stop else 0)], stop
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, shorter than it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
