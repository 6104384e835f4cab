"""Gathers what `choose_path` needs of a request: its model, its token ids, what is cached where. Then asks it.

Not here: the rules (`farfill.router.policy`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import aiohttp
import msgspec

from farfill.errors import ClientError, FarfillError, OperationError, OverloadError, PeerError
from farfill.gateway.body import token_ids_given, tokenize_body
from farfill.gateway.errors import REQUEST_ID_HEADER
from farfill.gateway.fleet import Fleet
from farfill.gateway.relay import RelayWatch
from farfill.gateway.stores import Stores
from farfill.gateway.upstream import failure_of, read_error
from farfill.gateway.work import Chosen, Work
from farfill.kv.prefix import prefix_block_hashes, prefix_salt
from farfill.router.policy import (
    NO_WORKER_RETRY_S,
    Choice,
    Path,
    RequestFacts,
    RouterSettings,
    WorkerFacts,
    choose_path,
    splitting_blocker,
)
from farfill.router.prefix_index import PrefixIndex

DECODERS: Final = ("decode", "both")
PREFILLERS: Final = ("prefill", "both")
# Token ids of the longest prompts, as JSON, with the strings of nothing.
_TOKENS_BYTES_MAX: Final = 64 * 1024**2


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class Chooser:
    """Chooses for every request of a gateway."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        fleet: Fleet,
        relay: RelayWatch | None,
        stores: Stores,
        index: PrefixIndex,
        rules: RouterSettings,
        setup_s: float,
    ) -> None:
        self._session = session
        self._fleet = fleet
        self._relay = relay
        self._stores = stores
        self._index = index
        self._rules = rules
        self._setup_s = setup_s

    def model_of(self, asked: str | None) -> str:
        """The model that serves a request; it may leave the name out where there is only one.

        Raises:
            ClientError: `unknown_model`. OverloadError: `no_worker` where no decode worker has answered yet.
        """
        models = self._fleet.models()
        if asked is not None and asked in models:
            return asked
        if not models or self._fleet.unknown(*DECODERS):
            raise OverloadError(
                "no_worker", "no decode worker of this model has answered yet", retry_after_s=NO_WORKER_RETRY_S
            )
        if asked is None and len(models) == 1:
            return next(iter(models))
        known = ", ".join(repr(model) for model in sorted(models))
        what = "name a model" if asked is None else f"the model {asked[:200]!r} is not here"
        raise ClientError("unknown_model", f"{what}; there is: {known}", field="model")

    async def local(self, work: Work, asked: str | None, *, replayable: bool = True) -> Chosen:
        """For an endpoint that can't be split. `replayable`: its body can be sent a second time."""
        model = self.model_of(asked)
        facts = RequestFacts(model, 0, blocker=splitting_blocker(False, work.fields))
        choice = choose_path(facts, self._fleet.facts(*DECODERS), (), {}, self._rules)
        if not replayable:
            choice = replace(choice, decode_workers=choice.decode_workers[:1])
        return Chosen(choice, model)

    async def path(self, work: Work, asked: str | None, rules: RouterSettings | None = None) -> Chosen:
        """For a completion or a chat. `rules`: other ones than the gateway's own.

        Raises:
            FarfillError: `unknown_model`, `no_worker`, `context_length_exceeded`, or the worker's own refusal of the
                prompt.
        """
        model = self.model_of(asked)
        blocker = splitting_blocker(True, work.fields)
        decoders = self._fleet.facts(*DECODERS)
        tokens: list[int] | None = None
        if blocker is None:
            tokens, blocker = await self._token_ids(work, model, decoders)
        count = len(tokens) if tokens is not None else 0
        self._check_length(model, count, work.fields)
        names = self._block_names(decoders, model, tokens or (), work.tenant)
        cached = {worker: self._index.cached_tokens(worker, blocks) for worker, blocks in names.items()}
        facts = RequestFacts(model, count, cached, blocker)
        choice = choose_path(
            facts, self._fleet.facts(*DECODERS), self._fleet.facts(*PREFILLERS), self._fleet.incompatible,
            rules or self._rules, relay_up=self._relay is None or self._relay.up,
        )  # fmt: skip
        if choice.path is not Path.LOCAL and not await self._stores.can_hold(choice, count):
            # To ask the store would fail every time, and use up the fallbacks that others need.
            choice = Choice(Path.LOCAL, "exceeds_store", choice.decode_workers)
        return Chosen(choice, model, tokens, count, names)

    def remember(self, chosen: Chosen, worker: str) -> None:
        """The worker has answered, so it has the prompt's cache now."""
        self._index.remember(worker, chosen.block_names.get(worker, ()))

    def _check_length(self, model: str, count: int, fields: Mapping[str, Any]) -> None:
        limit = self._fleet.models().get(model)
        if limit is not None and count >= limit:
            raise ClientError(
                "context_length_exceeded",
                f"the prompt has {count} tokens; the model's maximum length, answer included, is {limit}",
                field="messages" if "messages" in fields else "prompt",
            )

    def _block_names(
        self, decoders: Sequence[WorkerFacts], model: str, tokens: Sequence[int], tenant: str
    ) -> dict[str, list[bytes]]:
        by_digest: dict[str, list[bytes]] = {}
        names: dict[str, list[bytes]] = {}
        for worker in decoders:
            if worker.model != model or not worker.up:
                continue
            fingerprint = self._fleet.info(worker.name).fingerprint_digest
            if fingerprint not in by_digest:
                salt = prefix_salt(fingerprint, tenant=tenant, adapter="")
                by_digest[fingerprint] = prefix_block_hashes(tokens, self._index.block_tokens, salt=salt)
            names[worker.name] = by_digest[fingerprint]
        return names

    async def _token_ids(
        self, work: Work, model: str, decoders: Sequence[WorkerFacts]
    ) -> tuple[list[int] | None, str | None]:
        """(token ids, blocker): the ids by a decode worker's own tokeniser, once for the whole request."""
        given = token_ids_given(work.fields)
        if given is not None:
            return given, None
        body = tokenize_body(work.fields)
        if body is None:
            return None, "not_tokenizable"  # no text: the engine's own error is the best there is
        body["model"] = model
        error: FarfillError | None = None
        able = [worker for worker in decoders if worker.up and worker.model == model]
        for worker in sorted(able, key=lambda worker: (worker.outstanding_tokens, worker.name)):
            try:
                return await self._tokenize(worker.name, msgspec.json.encode(body), work.request_id), None
            except (OperationError, OverloadError) as failure:
                error = failure
                if failure.code == "peer_unreachable":
                    self._fleet.noticed(worker.name, failure)
            except ClientError as refusal:
                if refusal.code in ("unknown_endpoint", "method_not_allowed"):
                    return None, "not_tokenizable"  # an engine without /tokenize
                raise
        if error is not None:
            raise error
        return None, None  # choose_path says that there is no worker

    async def _tokenize(self, worker: str, body: bytes, request_id: str) -> list[int]:
        url = self._fleet.workers[worker].address.url.rstrip("/") + "/tokenize"
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", REQUEST_ID_HEADER: request_id}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._setup_s, sock_read=self._setup_s)
        try:
            async with self._session.post(
                url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise await read_error(response)
                raw = bytearray()
                async for data in response.content.iter_any():
                    raw += data
                    if len(raw) > _TOKENS_BYTES_MAX:
                        raise PeerError("protocol_violation", f"{worker}: more tokens than any model takes")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise failure_of(error, worker) from error
        try:
            tokens = msgspec.json.decode(raw, type=_Tokens).tokens
        except msgspec.DecodeError as error:
            raise PeerError("protocol_violation", f"{worker}: /tokenize is not as agreed: {error}") from None
        if not all(0 <= token < 2**32 for token in tokens):
            raise PeerError("protocol_violation", f"{worker}: /tokenize gave what are no token ids")
        return tokens
