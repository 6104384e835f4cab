"""From the store machine's effects to the words of the data plane. Shared by data connections and local access."""

from farfill.store.events import AcceptVerified, AnswerPresent, AnswerStored, Refuse, SendChunk
from farfill.store.protocol import (
    DETAIL_CHARS_MAX,
    Chunk,
    ClientMessage,
    Get,
    Have,
    Present,
    Put,
    Refused,
    ServerMessage,
    Stored,
    Verified,
    bitmap_of,
)


def name_of(message: ClientMessage) -> str:
    """The message's tag."""
    match message:
        case Put():
            return "put"
        case Get():
            return "get"
        case Have():
            return "have"
        case Verified():
            return "verified"


def refused(message: ClientMessage, code: str, detail: str) -> Refused:
    index = message.index if isinstance(message, Put | Get) else None
    return Refused(message.transfer_id, message.epoch, name_of(message), index, code, detail[:DETAIL_CHARS_MAX])


def answer_to(
    message: ClientMessage, effect: AnswerStored | SendChunk | AnswerPresent | AcceptVerified | Refuse
) -> ServerMessage | None:
    """What goes back to who sent `message`; None: nothing does."""
    match effect:
        case AnswerStored():
            return Stored(effect.transfer_id, effect.epoch, effect.index)
        case SendChunk():
            handle = effect.handle
            return Chunk(handle.transfer_id, handle.epoch, handle.index, effect.payload_bytes, effect.checksum)
        case AnswerPresent():
            return Present(effect.transfer_id, effect.epoch, bitmap_of(effect.indices), effect.verified)
        case AcceptVerified():
            return None
        case Refuse():
            return refused(message, effect.code, effect.detail)
