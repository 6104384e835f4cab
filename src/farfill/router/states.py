"""The states of a request and the transitions between them, as data.

Not here: what each event does (`request`).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from farfill.router.messages import (
    ChoosingFailed,
    ClientGone,
    DecodeLegDone,
    DecodeLegFailed,
    DecodeLegOutput,
    DecodeLegStarted,
    LeaseNotRenewed,
    LeaseRenewed,
    PathChosen,
    PrefillLegAccepted,
    PrefillLegDone,
    PrefillLegFailed,
    ReserveFailed,
    ReserveGranted,
    Tick,
)


class RequestState(StrEnum):
    CHOOSING = "choosing"  # tokenising, choosing, and waiting for the store's grant
    RESERVED = "reserved"  # staging is granted, both legs are starting
    PREFILLING = "prefilling"  # a worker computes the prompt's cache
    TRANSFERRING = "transferring"  # it is computed and stored; the decode side still fetches
    VERIFIED = "verified"  # the decode side has, and has checked, all it needs
    DECODING = "decoding"  # output went to the client
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = RequestState
TERMINAL: Final = frozenset({_S.DONE, _S.FAILED, _S.CANCELLED})
# In these states the head may have gone to the client; in none before them.
HEAD_SENT: Final = frozenset({_S.VERIFIED, _S.DECODING})


def _to(*states: RequestState) -> frozenset[RequestState]:
    return frozenset(states)


_RETRY: Final = _to(_S.PREFILLING, _S.FAILED)  # falls back (and then prefills on the decode worker), or fails
_LEGS_RUN: Final[Mapping[type, frozenset[RequestState]]] = {
    DecodeLegStarted: _to(_S.VERIFIED),
    DecodeLegFailed: _RETRY,
    ClientGone: _to(_S.CANCELLED),
}
_HEAD_IS_OUT: Final[Mapping[type, frozenset[RequestState]]] = {
    DecodeLegOutput: _to(_S.DECODING),
    DecodeLegDone: _to(_S.DONE),
    DecodeLegFailed: _to(_S.FAILED),
    ClientGone: _to(_S.CANCELLED),
}

# State -> event -> the states it may lead to. An event that is not here is a bug in the driver, unless it is late (a
# leg that was given up, a request that has ended): `RequestMachine._is_late` tells.
TRANSITIONS: Final[Mapping[RequestState, Mapping[type, frozenset[RequestState]]]] = {
    _S.CHOOSING: {
        PathChosen: _to(_S.CHOOSING, _S.PREFILLING),
        ChoosingFailed: _to(_S.FAILED),
        ReserveGranted: _to(_S.RESERVED),
        ReserveFailed: _RETRY,
        ClientGone: _to(_S.CANCELLED),
        Tick: _to(_S.CHOOSING) | _RETRY,
    },
    _S.RESERVED: {
        **_LEGS_RUN,
        PrefillLegAccepted: _to(_S.PREFILLING),
        PrefillLegDone: _to(_S.TRANSFERRING),
        PrefillLegFailed: _RETRY,
        LeaseRenewed: _to(_S.RESERVED),
        LeaseNotRenewed: _to(_S.RESERVED) | _RETRY,
        Tick: _to(_S.RESERVED) | _RETRY,
    },
    _S.PREFILLING: {
        **_LEGS_RUN,
        PrefillLegDone: _to(_S.TRANSFERRING),
        PrefillLegFailed: _RETRY,
        LeaseRenewed: _to(_S.PREFILLING),
        LeaseNotRenewed: _RETRY,
        Tick: _RETRY,
    },
    _S.TRANSFERRING: {
        **_LEGS_RUN,
        LeaseRenewed: _to(_S.TRANSFERRING),
        LeaseNotRenewed: _to(_S.TRANSFERRING) | _RETRY,
        Tick: _to(_S.TRANSFERRING) | _RETRY,
    },
    **{
        state: {
            **_HEAD_IS_OUT,
            PrefillLegAccepted: _to(state),
            PrefillLegDone: _to(state),
            PrefillLegFailed: _to(state),
            LeaseRenewed: _to(state),
            LeaseNotRenewed: _to(state),
            Tick: _to(state, _S.FAILED),
        }
        for state in HEAD_SENT
    },
    **{state: {} for state in TERMINAL},
}
