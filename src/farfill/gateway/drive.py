"""The driver of one request: events in, `RequestMachine`, effects out. Every decision is the machine's.

Not here: which path is taken (`choose`), what HTTP the legs speak (`legs`), how the client gets it (`client_side`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, assert_never

import aiohttp
import msgspec

from farfill.errors import FarfillError
from farfill.gateway.body import decode_body, prefill_body
from farfill.gateway.client_side import ClientSide, end_to_end
from farfill.gateway.errors import REQUEST_ID_HEADER
from farfill.gateway.fleet import Fleet
from farfill.gateway.legs import (
    KV_BYTES_HEADER,
    TRANSFER_BYTES_HEADER,
    TRANSFER_SECONDS_HEADER,
    LegAnswer,
    Upstream,
    decode_leg,
    prefill_leg,
)
from farfill.gateway.stores import Reservation, Stores
from farfill.gateway.work import Chosen, Work
from farfill.router.messages import (
    AbortDecodeLeg,
    AbortPrefillLeg,
    ChoosingFailed,
    ClientGone,
    DecodeLegFailed,
    Effect,
    EndResponse,
    Event,
    Forward,
    LeaseNotRenewed,
    LeaseRenewed,
    PathChosen,
    PrefillLegFailed,
    RecordOutcome,
    ReleaseLease,
    RenewLease,
    Reserve,
    ReserveFailed,
    ReserveGranted,
    SendErrorBeforeHead,
    SendErrorEvent,
    SendHead,
    StartDecodeLeg,
    StartPrefillLeg,
    Tick,
)
from farfill.router.policy import Path
from farfill.router.request import RequestMachine
from farfill.router.states import TERMINAL
from farfill.transfer.spec import to_kv_transfer_params

_log = logging.getLogger(__name__)

# Pieces of output that may wait for a slow client, in each request; then the decode leg's connection is not read.
_EVENTS_MAX: Final = 16

PATH_HEADER: Final = "X-Farfill-Path"
REASON_HEADER: Final = "X-Farfill-Reason"
TRANSFER_HEADER: Final = "X-Farfill-Transfer"
PREFILL_SECONDS_HEADER: Final = "X-Farfill-Prefill-Seconds"


class Mailbox:
    """Events of one request, bounded for output; and its timer."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._crash: BaseException | None = None

    async def put(self, event: Event) -> None:
        while len(self._events) >= _EVENTS_MAX:
            self._room.clear()
            await self._room.wait()
        self.put_now(event)

    def put_now(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def crash(self, error: BaseException) -> None:
        """A bug in one of the request's tasks ends the request."""
        self._crash = error
        self._wake()

    async def get(self, deadline: float | None) -> Event:
        """The next event, or `Tick` once the deadline has come."""
        while True:
            if self._crash is not None:
                raise self._crash
            if deadline is not None and self._loop.time() >= deadline:
                return Tick()
            if self._events:
                event = self._events.popleft()
                if len(self._events) < _EVENTS_MAX:
                    self._room.set()
                return event
            self._arrived = self._loop.create_future()
            timer = None if deadline is None else self._loop.call_at(deadline, self._wake)
            try:
                await self._arrived
            finally:
                self._arrived = None
                if timer is not None:
                    timer.cancel()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


class Background:
    """Work that outlives the request that began it: releasing leases, taking late grants back."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def finish(self) -> None:
        """Returns when all of it is done; each piece has its own time limit."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s ended by a bug", task.get_name(), exc_info=error)


class Recorder(Protocol):
    """What is told of each request (metrics have it)."""

    def head_sent(self, path: Path, seconds: float, *, remote_tokens: int, local_tokens: int) -> None: ...
    def ended(self, outcome: RecordOutcome, tenant: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Upstreams:
    """What drivers share: everything behind the gateway."""

    session: aiohttp.ClientSession
    fleet: Fleet
    stores: Stores
    background: Background
    recorder: Recorder
    remember: Callable[[Chosen, str], None]


class RequestDriver:
    """Runs one request to its end.

    Args:
        machine: fresh. work: what the client asks. client: where the answer goes.
    """

    def __init__(self, machine: RequestMachine, work: Work, client: ClientSide, upstreams: Upstreams) -> None:
        self._machine = machine
        self._work = work
        self._client = client
        self._up = upstreams
        self._mailbox = Mailbox()
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._chosen: Chosen | None = None
        self._reservation: Reservation | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._prefill = LegAnswer()
        self._decode = LegAnswer()
        self.outcome: RecordOutcome | None = None

    async def run(self, choose: Callable[[], Awaitable[Chosen]]) -> RecordOutcome:
        """Drives the request until its one outcome.

        Cancelling this is the client's going away: both legs are aborted, the lease is released, then the
        cancellation goes on.
        """
        self._start("choose", self._choose(choose))
        try:
            while self._machine.state not in TERMINAL:
                await self._handle(await self._mailbox.get(self._machine.deadline))
        except ConnectionError as error:
            _log.info("request %s: the client is gone: %s", self._work.request_id, error)
        finally:
            self._give_up()
        assert self.outcome is not None
        return self.outcome

    async def _handle(self, event: Event) -> None:
        # What frees and records does not wait for a slow client, and is not lost if that one leaves just now.
        for_client = [effect for effect in self._machine.handle(event, self._loop.time()) if not self._act(effect)]
        for effect in for_client:
            await self._tell(effect)

    def _give_up(self) -> None:
        """The client is gone, or a bug ended the driver: the machine says what is to be freed."""
        if self._machine.state not in TERMINAL:
            for effect in self._machine.handle(ClientGone(), self._loop.time()):
                self._act(effect)
        for task in self._tasks.values():
            task.cancel()

    # --- effects ----------------------------------------------------------------------------------------------------

    def _act(self, effect: Effect) -> bool:
        """Carries out what needs no waiting. False: the effect is for the client (see `_tell`)."""
        match effect:
            case Reserve():
                # In the background: a grant that comes after the end must still be heard, to be given back.
                self._up.background.spawn(self._reserve(effect), f"reserve {effect.transfer_id}")
            case RenewLease():
                self._start("renew", self._renew())
            case ReleaseLease():
                self._up.background.spawn(self._release(), f"release {effect.transfer_id}")
            case StartPrefillLeg():
                self._start("prefill", self._run_prefill(effect))
            case StartDecodeLeg():
                self._start("decode", self._run_decode(effect))
            case AbortPrefillLeg():
                self._tasks["prefill"].cancel()
            case AbortDecodeLeg():
                self._tasks["decode"].cancel()
            case RecordOutcome():
                self.outcome = effect
                self._up.recorder.ended(effect, self._work.tenant)
            case SendHead() | Forward() | EndResponse() | SendErrorBeforeHead() | SendErrorEvent():
                return False
            case _:
                assert_never(effect)
        return True

    async def _tell(self, effect: Effect) -> None:
        """Carries out what the client sees."""
        match effect:
            case SendHead():
                self._count_head(effect)
                await self._client.send_head(self._decode.status, self._head(effect))
            case Forward(data):
                await self._client.forward(data)
            case EndResponse():
                await self._client.end()
            case SendErrorBeforeHead(error, path, reason):
                shown = {} if path is None else {PATH_HEADER: path.value, REASON_HEADER: reason}
                await self._client.error_before_head(error, shown)
            case SendErrorEvent(error):
                await self._client.error_after_head(error, told=self._decode.told)
            case _:
                raise AssertionError(f"{effect} is not for the client")

    def _head(self, effect: SendHead) -> dict[str, str]:
        drop = (REQUEST_ID_HEADER.lower(), "server", "date")
        headers = {
            name: value
            for name, value in end_to_end(self._decode.headers, *drop).items()
            if not name.lower().startswith("x-farfill-")
        }
        headers[PATH_HEADER] = effect.path.value
        headers[REASON_HEADER] = effect.reason
        if effect.transfer_id is not None:
            headers[TRANSFER_HEADER] = effect.transfer_id
            headers[KV_BYTES_HEADER] = str(effect.kv_bytes)
            for name in (TRANSFER_BYTES_HEADER, TRANSFER_SECONDS_HEADER):
                if name in self._decode.headers:
                    headers[name] = self._decode.headers[name]
            if self._prefill.report is not None:
                headers[PREFILL_SECONDS_HEADER] = f"{self._prefill.report.prefill_s:.6f}"
        return headers

    def _count_head(self, effect: SendHead) -> None:
        assert self._chosen is not None
        prompt = self._chosen.prompt_tokens
        remote = max(0, prompt - 1) if effect.transfer_id is not None else 0
        seconds = self._loop.time() - self._began
        self._up.recorder.head_sent(effect.path, seconds, remote_tokens=remote, local_tokens=prompt - remote)

    # --- tasks ------------------------------------------------------------------------------------------------------

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"{name} {self._work.request_id}")
        task.add_done_callback(self._task_ended)
        self._tasks[name] = task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mailbox.crash(error)

    async def _choose(self, choose: Callable[[], Awaitable[Chosen]]) -> None:
        try:
            self._chosen = await choose()
        except FarfillError as error:
            await self._mailbox.put(ChoosingFailed(error))
        else:
            await self._mailbox.put(PathChosen(self._chosen.choice))

    async def _reserve(self, effect: Reserve) -> None:
        assert self._chosen is not None
        event: Event
        try:
            self._reservation = await self._up.stores.reserve(
                effect.transfer_id, self._chosen.choice, self._chosen.prompt_tokens
            )
            event = ReserveGranted(self._reservation.spec.epoch, self._reservation.lease_s)
        except FarfillError as error:
            event = ReserveFailed(error)
        if self.outcome is None:
            self._mailbox.put_now(event)
        else:  # nobody reads the mailbox any more
            for late in self._machine.handle(event, self._loop.time()):
                self._act(late)

    async def _renew(self) -> None:
        assert self._reservation is not None
        try:
            lease_s = await self._up.stores.renew(self._reservation)
        except FarfillError as error:
            await self._mailbox.put(LeaseNotRenewed(error))
        else:
            await self._mailbox.put(LeaseRenewed(lease_s))

    async def _release(self) -> None:
        assert self._reservation is not None
        error = await self._up.stores.release(self._reservation)
        if error is not None:
            _log.info("request %s: the lease was not released, so it runs out: %s", self._work.request_id, error)

    async def _run_prefill(self, effect: StartPrefillLeg) -> None:
        assert self._chosen is not None
        assert self._chosen.token_ids is not None
        assert self._reservation is not None
        params = to_kv_transfer_params(self._reservation.spec, leg="prefill")
        body = prefill_body(self._chosen.model, self._chosen.token_ids, params)
        upstream = Upstream(
            effect.worker,
            "POST",
            self._url(effect.worker) + "/v1/completions",
            self._leg_headers({}),
            msgspec.json.encode(body),
        )
        with self._up.fleet.busy(effect.worker, self._chosen.prompt_tokens):
            await prefill_leg(self._up.session, upstream, self._prefill, self._noticing(effect.worker))

    async def _run_decode(self, effect: StartDecodeLeg) -> None:
        assert self._chosen is not None
        answer = self._decode = LegAnswer()
        work, body = self._work, self._work.body
        if effect.epoch is not None:
            assert self._reservation is not None
            params = to_kv_transfer_params(self._reservation.spec, leg="decode")
            body = msgspec.json.encode(decode_body(work.fields, params))
        upstream = Upstream(
            effect.worker,
            work.method,
            self._url(effect.worker) + work.target,
            self._leg_headers(work.headers),
            body,
            ends_with_done=work.ends_with_done,
        )
        with self._up.fleet.busy(effect.worker, self._chosen.prompt_tokens + work.output_tokens):
            post = self._noticing(effect.worker)
            await decode_leg(self._up.session, upstream, effect.attempt, answer, post)
        if answer.status == 200:
            self._up.remember(self._chosen, effect.worker)

    def _noticing(self, worker: str) -> Callable[[Event], Awaitable[None]]:
        async def post(event: Event) -> None:
            if isinstance(event, DecodeLegFailed | PrefillLegFailed) and event.error.code == "peer_unreachable":
                reached = isinstance(event, DecodeLegFailed) and event.reached
                if not reached:
                    self._up.fleet.noticed(worker, event.error)
            await self._mailbox.put(event)

        return post

    def _leg_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The client's own headers, less its key and the connection's, and what both legs get."""
        made = end_to_end(headers, "authorization", "cookie", "accept-encoding", REQUEST_ID_HEADER.lower())
        made.setdefault("Content-Type", "application/json")
        made["Accept-Encoding"] = "identity"
        made[REQUEST_ID_HEADER] = self._work.request_id
        return made

    def _url(self, worker: str) -> str:
        return self._up.fleet.workers[worker].address.url.rstrip("/")
