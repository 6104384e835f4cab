"""The workers as the gateway sees them: polled, compared with each other, and what each has to do for us.

Not here: which one a request gets (`farfill.router.policy`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from farfill.errors import ConfigurationError, FarfillError, OperationError, OverloadError, PeerError
from farfill.gateway.info import INFO_BYTES_MAX, INFO_PATH, WorkerInfo, read_info
from farfill.gateway.settings import WorkerAddress
from farfill.gateway.upstream import failure_of, read_error
from farfill.kv.fingerprint import Category, compare
from farfill.router.policy import NO_WORKER_RETRY_S, WorkerFacts

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class FleetWorker:
    """One worker. `info` stays as it was last said; `failure` is why it is not up, None while it is."""

    address: WorkerAddress
    info: WorkerInfo | None = None
    failure: FarfillError | None = None
    outstanding_tokens: int = 0

    @property
    def up(self) -> bool:
        return self.info is not None and self.failure is None and not self.info.draining


class Fleet:
    """Polls every worker on its own; the answers of `facts` never wait.

    Args:
        poll_s: between two looks; also how long a look may take.
        on_new_life: called with a worker's name when another process answers under it (its caches are gone).
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        workers: Sequence[WorkerAddress],
        poll_s: float,
        on_new_life: Callable[[str], None],
    ) -> None:
        self._session = session
        self._poll_s = poll_s
        self._on_new_life = on_new_life
        self.workers = {address.name: FleetWorker(address) for address in workers}
        self.incompatible: dict[tuple[str, str], str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Looks at all of them once, then keeps looking. Workers that are down now may come later."""
        await asyncio.gather(*(self.look(name) for name in self.workers))
        self._tasks = [asyncio.create_task(self._keep_looking(name), name=f"poll {name}") for name in self.workers]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- for the router ---------------------------------------------------------------------------------------------

    def facts(self, *roles: str) -> list[WorkerFacts]:
        """Workers of these roles, of which a model is known."""
        return [
            WorkerFacts(
                name, worker.address.site, worker.info.model, up=worker.up, outstanding_tokens=worker.outstanding_tokens
            )
            for name, worker in self.workers.items()
            if worker.address.role in roles and worker.info is not None
        ]

    def unknown(self, *roles: str) -> bool:
        """Whether there is a worker of these roles that has never answered: its model is not known."""
        return any(worker.info is None for worker in self.workers.values() if worker.address.role in roles)

    def models(self) -> Mapping[str, int]:
        """Models that decode workers have, each with the largest maximum length: over that nobody can serve."""
        found: dict[str, int] = {}
        for worker in self._decoders():
            assert worker.info is not None
            found[worker.info.model] = max(found.get(worker.info.model, 0), worker.info.max_model_len)
        return found

    def _decoders(self) -> list[FleetWorker]:
        return [w for w in self.workers.values() if w.address.role in ("decode", "both") and w.info is not None]

    def info(self, name: str) -> WorkerInfo:
        """Raises OverloadError: `no_worker` where it never answered."""
        info = self.workers[name].info
        if info is None:
            raise OverloadError("no_worker", f"worker {name} has not answered yet", retry_after_s=NO_WORKER_RETRY_S)
        return info

    @contextlib.contextmanager
    def busy(self, name: str, tokens: int) -> Iterator[None]:
        """Counts tokens as outstanding at a worker while the block runs."""
        worker = self.workers[name]
        worker.outstanding_tokens += tokens
        try:
            yield
        finally:
            worker.outstanding_tokens -= tokens

    def noticed(self, name: str, error: FarfillError) -> None:
        """A request found the worker out of reach: no further one is sent there until it answers a look again."""
        worker = self.workers[name]
        if worker.failure is None:
            _log.warning("worker %s is out of reach: %s", name, error)
            worker.failure = error

    # --- looking ----------------------------------------------------------------------------------------------------

    async def _keep_looking(self, name: str) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.look(name)

    async def look(self, name: str) -> None:
        """One poll; its result, good or bad, is kept."""
        worker = self.workers[name]
        try:
            info = await self._ask(worker.address)
        except FarfillError as error:
            if worker.failure is None or worker.failure.code != error.code:
                _log.warning("worker %s at %s is down: %s", name, worker.address.url, error)
            worker.failure = error
            return
        if worker.failure is not None or worker.info is None:
            _log.info("worker %s at %s is up: %s, model %s", name, worker.address.url, info.engine, info.model)
        previous, worker.info, worker.failure = worker.info, info, None
        if previous is not None and previous.instance != info.instance:
            self._on_new_life(name)
        if previous is None or previous.fingerprint != info.fingerprint:
            self._compare()

    async def _ask(self, address: WorkerAddress) -> WorkerInfo:
        try:
            async with (
                asyncio.timeout(self._poll_s),
                self._session.get(address.control.rstrip("/") + INFO_PATH, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise await read_error(response)
                raw = await response.content.read(INFO_BYTES_MAX + 1)
                while len(raw) <= INFO_BYTES_MAX and (more := await response.content.read(INFO_BYTES_MAX)):
                    raw += more
        except TimeoutError:
            raise OperationError("setup_timeout", f"no answer within {self._poll_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise failure_of(error, address.name) from error
        info = read_info(raw)
        if info.name != address.name:
            raise PeerError(
                "peer_unauthenticated",
                f"{address.url} says that it is {info.name!r}, the configuration says {address.name!r}",
                field="name",
            )
        if info.role != "both" and info.role != address.role:
            raise ConfigurationError(
                "config_invalid",
                f"worker {address.name} has the role {info.role}, and gateway.workers wants it for {address.role}",
                field="gateway.workers",
            )
        return info

    def _compare(self) -> None:
        known = [worker for worker in self.workers.values() if worker.info is not None]
        self.incompatible = {}
        for prefill in known:
            for decode in known:
                if prefill is decode or prefill.address.role == "decode" or decode.address.role == "prefill":
                    continue
                assert prefill.info is not None
                assert decode.info is not None
                if prefill.info.model != decode.info.model:
                    continue
                for mismatch in compare(decode.info.fingerprint, prefill.info.fingerprint):
                    if mismatch.category is Category.MUST_EQUAL:
                        pair = (prefill.address.name, decode.address.name)
                        self.incompatible.setdefault(pair, mismatch.field)
                        _log.warning(
                            "%s may not prefill for %s: %s is %s there and %s here: %s",
                            *pair, mismatch.field, mismatch.theirs, mismatch.ours, mismatch.remedy,
                        )  # fmt: skip
