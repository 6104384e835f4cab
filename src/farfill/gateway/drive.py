"""The driver of one request: events in, `RequestMachine`, effects out. Every decision is the machine's.

Not here: which path is taken (`choose`), what HTTP the legs speak (`legs`), how the client gets it (`client_side`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, assert_never

import aiohttp
import msgspec
from yarl import URL

from farfill.errors import FarfillError
from farfill.gateway.body import cache_salt, decode_body, local_body, prefill_body
from farfill.gateway.client_side import ANSWER_BYTES_MAX, ClientSide, end_to_end
from farfill.gateway.connector_legs import Direction, Question, connector_decode_leg, connector_prefill_leg
from farfill.gateway.errors import REQUEST_ID_HEADER
from farfill.gateway.fleet import Fleet
from farfill.gateway.legs import (
    KV_BYTES_HEADER,
    TRANSFER_BYTES_HEADER,
    TRANSFER_SECONDS_HEADER,
    LegAnswer,
    Tail,
    Upstream,
    decode_leg,
    prefill_leg,
)
from farfill.gateway.mailbox import Background, Mailbox
from farfill.gateway.stores import Reservation, Stores
from farfill.gateway.work import Chosen, Work
from farfill.router.messages import (
    AbortDecodeLeg,
    AbortPrefillLeg,
    ChoosingFailed,
    ClientGone,
    DecodeLegDone,
    DecodeLegFailed,
    Effect,
    EndResponse,
    Event,
    FellBack,
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
)
from farfill.router.policy import Path
from farfill.router.request import RequestMachine
from farfill.router.states import TERMINAL
from farfill.transfer.spec import to_kv_transfer_params

_log = logging.getLogger(__name__)

# Of a client's headers: its key, and what the gateway sets itself.
_NOT_FOR_WORKERS: Final = ("authorization", "cookie", "accept-encoding", REQUEST_ID_HEADER.lower())

PATH_HEADER: Final = "X-Farfill-Path"
REASON_HEADER: Final = "X-Farfill-Reason"
TRANSFER_HEADER: Final = "X-Farfill-Transfer"
PREFILL_SECONDS_HEADER: Final = "X-Farfill-Prefill-Seconds"


class Recorder(Protocol):
    """What is told of each request (metrics have it)."""

    def head_sent(self, path: Path, seconds: float, *, remote_tokens: int, local_tokens: int) -> None: ...
    def ended(self, outcome: RecordOutcome, tenant: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Upstreams:
    """What drivers share: everything behind the gateway. `tenants_apart`: none sees what another has cached."""

    session: aiohttp.ClientSession
    fleet: Fleet
    stores: Stores
    background: Background
    recorder: Recorder
    remember: Callable[[Chosen, str], None]
    tenants_apart: bool = False


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
        self._attempt = 0
        self._told = Tail()  # of what the client was sent
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
        """The client is gone, or a bug ended the driver: the machine says what is to be freed.

        What had come and was not read yet is read now: a grant among it must be given back.
        """
        last: list[Event] = []
        if self._machine.state not in TERMINAL:
            # Many clients hang up at the end mark, before the worker's connection has said that nothing follows.
            complete = self._work.generates and self._work.streaming and self._told.verdict()[0] is None
            last = [DecodeLegDone(self._attempt) if complete else ClientGone()]
        for event in (*last, *self._mailbox.take_all()):
            for effect in self._machine.handle(event, self._loop.time()):
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
            case FellBack():
                _log.warning(
                    "request %s falls back to local prefill at %s: %s, [%s] %s; was path %s, prefill %s, decode %s",
                    self._work.request_id, effect.next_worker, effect.failure_class.value, effect.error.code,
                    effect.error.message, effect.path.value, effect.prefill_worker, effect.decode_worker,
                )  # fmt: skip
            case RecordOutcome():
                self.outcome = effect
                self._up.recorder.ended(effect, self._work.tenant)
                _log.info(
                    "request %s of %s: %s, path %s, reason %s, code %s, %.3f s",
                    self._work.request_id, self._work.tenant, effect.state, effect.path, effect.reason, effect.code,
                    effect.duration_s,
                )  # fmt: skip
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
                self._told.take(data)
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
            if self.outcome is None:
                self._mailbox.crash(error)
            else:  # too late to end the request, and not too late to be heard
                _log.error("%s ended by a bug", task.get_name(), exc_info=error)

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
        question = self._question(effect.worker, "sent")
        token_ids = self._chosen.token_ids if question is None else self._chosen.token_ids[:-1]
        body = prefill_body(self._chosen.model, token_ids, params, self._salt())
        upstream = Upstream(
            effect.worker,
            "POST",
            self._url(effect.worker, "/v1/completions"),
            self._leg_headers({}),
            msgspec.json.encode(body),
        )
        with self._up.fleet.busy(effect.worker, self._chosen.prompt_tokens):
            post = self._noticing(effect.worker)
            if question is None:
                await prefill_leg(self._up.session, upstream, self._prefill, post)
            else:
                await connector_prefill_leg(self._up.session, upstream, question, self._prefill, post)

    async def _run_decode(self, effect: StartDecodeLeg) -> None:
        assert self._chosen is not None
        answer = self._decode = LegAnswer()
        self._attempt = effect.attempt
        work, body = self._work, self._work.body
        if effect.epoch is not None:
            assert self._reservation is not None
            params = to_kv_transfer_params(self._reservation.spec, leg="decode")
            body = msgspec.json.encode(decode_body(work.fields, params, self._salt()))
        elif work.generates and isinstance(body, bytes):
            body = local_body(body, work.fields, self._salt())
        upstream = Upstream(
            effect.worker,
            work.method,
            self._url(effect.worker, work.target),
            self._leg_headers(work.headers),
            body,
            generates=work.generates,
            answer_bytes_max=None if work.streaming else ANSWER_BYTES_MAX,
        )
        with self._up.fleet.busy(effect.worker, self._chosen.prompt_tokens + work.output_tokens):
            post = self._noticing(effect.worker)
            question = None if effect.epoch is None else self._question(effect.worker, "received")
            if question is None:
                await decode_leg(self._up.session, upstream, effect.attempt, answer, post)
            else:
                await connector_decode_leg(self._up.session, upstream, question, effect.attempt, answer, post)
        if answer.status == 200:
            self._up.remember(self._chosen, effect.worker)

    def _salt(self) -> str | None:
        return cache_salt(self._work.fields, self._work.tenant if self._up.tenants_apart else None)

    def _question(self, worker: str, direction: Direction) -> Question | None:
        """For a leg of a transfer at an engine with a connector; None: the worker's answer says it all."""
        if not self._up.fleet.info(worker).connector:
            return None
        assert self._reservation is not None
        control_url = self._up.fleet.workers[worker].address.control
        spec = self._reservation.spec
        return Question(self._up.session, worker, control_url, spec.transfer_id, direction, spec.clocks.queue_s)

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
        made = {
            name: value
            for name, value in end_to_end(headers, *_NOT_FOR_WORKERS).items()
            if not name.lower().startswith("x-farfill-")
        }
        made.setdefault("Content-Type", "application/json")
        made["Accept-Encoding"] = "identity"
        made[REQUEST_ID_HEADER] = self._work.request_id
        return made

    def _url(self, worker: str, target: str) -> URL:
        """As the client encoded it: to decode and encode it anew could make another path of it."""
        return URL(self._up.fleet.workers[worker].address.url.rstrip("/") + target, encoded=True)
