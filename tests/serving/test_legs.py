"""Rules: one transfer serves three placements; what is decoded remotely is what one worker alone says; only VERIFIED
decodes; the first failure of a leg cancels the rest of it; whatever way it ends, nothing is kept.
"""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from tiny_engine import TinyEngine
from worker_kit import WAIT_S, Front, Site, http_session, worker_site

from farfill import tls
from farfill.config.tree import Role
from farfill.engines.api import GenerationRequest, OnEvent
from farfill.engines.serving.call import settled
from farfill.errors import OperationError, OverloadError
from farfill.kv.spec import TransferId
from farfill.transfer.spec import Clocks, to_kv_transfer_params

PROMPT = [256, *(b"The cache of a prompt is computed in one place and read in another." * 3)]
GREEDY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 40, "ignore_eos": True}


class Hold:
    """Holds an engine before a phase until the test lets go; says when it is there."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, request_id: str, phase: str) -> None:
        if phase == self.phase:
            self.reached.set()
            assert self.go.wait(WAIT_S)

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, WAIT_S)


@pytest.fixture
def hold() -> Iterator[Hold]:
    hold = Hold("prefill")
    yield hold
    hold.go.set()


@dataclass
class Pair:
    front: Front
    producer: Site
    consumer: Site
    between: Site

    def at(self, placement: str) -> Site:
        return {"producer": self.producer, "consumer": self.consumer, "relay": self.between}[placement]

    async def nothing_kept(self) -> None:
        for site in (self.producer, self.consumer, self.between):
            await site.nothing_kept()


@contextlib.asynccontextmanager
async def pair_of(
    *,
    producer: TinyEngine | None = None,
    consumer: TinyEngine | None = None,
    files: dict[str, tls.TlsFiles] | None = None,
    **front: Any,
) -> AsyncIterator[Pair]:
    files = files or {}
    context = tls.client_context(files["gateway"]) if files else None
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(http_session(context))
        east = await stack.enter_async_context(
            worker_site(name="east", role=Role.PREFILL, engine=producer, tls=files.get("east"))
        )
        west = await stack.enter_async_context(
            worker_site(name="west", role=Role.DECODE, engine=consumer, tls=files.get("west"))
        )
        relay = await stack.enter_async_context(worker_site(name="relay", tls=files.get("relay")))
        yield Pair(Front(session, east, west, **front), east, west, relay)


async def local(pair: Pair, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    async with pair.front.session.post(f"{pair.consumer.url}{path}", json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


@pytest.mark.parametrize("placement", ["producer", "consumer", "relay"])
async def test_a_remote_answer_is_the_local_one(placement: str) -> None:
    async with pair_of() as pair:
        expected = await local(pair, GREEDY)
        spec = await pair.front.reserve(pair.at(placement), PROMPT)
        (prefill_status, prefill), (status, decoded, headers) = await asyncio.gather(
            pair.front.prefill(spec, PROMPT), pair.front.decode(spec, GREEDY)
        )
        assert prefill_status == 200, prefill
        assert status == 200, decoded
        assert decoded["choices"] == expected["choices"]
        assert decoded["usage"] == expected["usage"]

        assert prefill["choices"][0]["text"] == ""
        assert prefill["usage"]["completion_tokens"] == 0
        assert prefill["kv_transfer_params"]["do_remote_prefill"] is True
        assert "key" not in prefill["kv_transfer_params"]["farfill"]
        plaintext_bytes = int(headers["X-Farfill-Kv-Bytes"])
        assert int(headers["X-Farfill-Transfer-Bytes"]) > plaintext_bytes > 48 * spec.prefix_tokens
        assert float(headers["X-Farfill-Transfer-Seconds"]) > 0
        assert prefill["farfill"]["transfer_bytes"] >= int(headers["X-Farfill-Transfer-Bytes"])
        assert prefill["farfill"].keys() >= {"queue_s", "prefill_s", "transfer_s", "cached_tokens"}

        assert pair.producer.metric("farfill_transfers_total", direction="sent", outcome="ok") == 1
        assert pair.consumer.metric("farfill_transfers_total", direction="received", outcome="ok") == 1
        assert pair.consumer.metric("farfill_worker_prompt_tokens_total", source="imported") == spec.prefix_tokens
        assert pair.consumer.engine.stats().imported_tokens_total == spec.prefix_tokens


async def test_streams_chats_and_several_choices_decode_from_one_transfer() -> None:
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "tell me of chunks " * 8}],
        "temperature": 1,
        "seed": 7,
        "n": 3,
        "max_tokens": 12,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
    }
    async with pair_of() as pair:
        expected = await local(pair, chat, "/v1/chat/completions")
        prompt = pair.consumer.engine.tokenizer.apply_chat_template(chat["messages"])
        spec = await pair.front.reserve(pair.producer, prompt)
        _, (status, decoded, _) = await asyncio.gather(
            pair.front.prefill(spec, prompt), pair.front.decode(spec, chat, "/v1/chat/completions")
        )
        assert status == 200, decoded
        assert decoded["choices"] == expected["choices"]
        assert len(decoded["choices"]) == 3


async def test_cached_tokens_are_those_of_the_prefill_side() -> None:
    async with pair_of(producer=TinyEngine(prefix_cache=True)) as pair:
        cached = []
        for _ in range(2):
            spec = await pair.front.reserve(pair.producer, PROMPT)
            (_, prefill), (_, decoded, _) = await asyncio.gather(
                pair.front.prefill(spec, PROMPT), pair.front.decode(spec, GREEDY)
            )
            cached.append(decoded["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert prefill["farfill"]["cached_tokens"] == cached[-1]
        assert cached == [0, len(PROMPT) - 1]


async def test_eight_transfers_at_once() -> None:
    async with pair_of() as pair:
        prompts = [[256, *(f"request number {number}, ".encode() * (number + 1))] for number in range(8)]
        bodies = [{**GREEDY, "prompt": prompt} for prompt in prompts]
        expected = [(await local(pair, body))["choices"] for body in bodies]
        specs = [
            await pair.front.reserve(pair.at(("producer", "consumer", "relay")[number % 3]), prompt)
            for number, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(
            *(pair.front.prefill(spec, prompt) for spec, prompt in zip(specs, prompts, strict=True)),
            *(pair.front.decode(spec, body) for spec, body in zip(specs, bodies, strict=True)),
        )
        assert [answer[0] for answer in answers] == [200] * 16
        assert [answer[1]["choices"] for answer in answers[8:]] == expected


async def test_over_mutual_tls(tmp_path: Path) -> None:
    files = certificates(tmp_path, "east", "west", "relay", "gateway")
    async with pair_of(files=files) as pair:
        assert pair.producer.url.startswith("https://")
        expected = await local(pair, GREEDY)
        for placement in ("producer", "consumer", "relay"):
            spec = await pair.front.reserve(pair.at(placement), PROMPT)
            (_, prefill), (status, decoded, _) = await asyncio.gather(
                pair.front.prefill(spec, PROMPT), pair.front.decode(spec, GREEDY)
            )
            assert status == 200, (prefill, decoded)
            assert decoded["choices"] == expected["choices"]


async def test_a_foreign_and_an_expired_certificate_and_none_are_refused(tmp_path: Path) -> None:
    files = certificates(tmp_path / "ours", "east")
    foreign = certificates(tmp_path / "theirs", "gateway")["gateway"]
    stranger = tls.client_context(foreign)
    stranger.load_verify_locations(files["east"].ca)
    nobody = tls.client_context(files["east"])
    bare = ssl.create_default_context(cafile=str(files["east"].ca))
    expired = tls.write_certificate(tmp_path / "ours", "late", days=1e-5)  # began five minutes ago, for a second
    late = ssl.create_default_context(cafile=str(files["east"].ca))
    late.load_cert_chain(expired.certificate, expired.key)
    async with worker_site(name="east", tls=files["east"]) as site:
        for context in (stranger, bare, late):
            async with http_session(context) as session:
                with pytest.raises((aiohttp.ClientError, OSError)):
                    await session.get(f"{site.url}/health")
        async with http_session(nobody) as session, session.get(f"{site.url}/health") as response:
            assert response.status == 200


# ------------------------------------------------------------------------------------------------ before a byte moves


@pytest.mark.parametrize(
    ("leg", "changes", "code"),
    [
        ("prefill", {"producer": "somebody-else"}, "stale_epoch"),
        ("decode", {"consumer": "somebody-else"}, "stale_epoch"),
        ("prefill", {"prefix_tokens": 3}, "prompt_mismatch"),
        ("decode", {"prefix_tokens": 3}, "prompt_mismatch"),
        ("prefill", {"wire_version": 99}, "wire_version_unsupported"),
        ("decode", {"wire_version": 99}, "wire_version_unsupported"),
        ("prefill", {"transfer_id": TransferId("f" * 32)}, "lease_unknown"),
        ("decode", {"transfer_id": TransferId("f" * 32)}, "lease_unknown"),
        ("prefill", {"epoch": 2**52}, "stale_epoch"),
        ("decode", {"epoch": 2**52}, "stale_epoch"),
    ],
)
async def test_a_spec_that_does_not_hold_is_refused_with_its_code(leg: str, changes: dict[str, Any], code: str) -> None:
    async with pair_of() as pair:
        honest = await pair.front.reserve(pair.producer, PROMPT)
        spec = type(honest)(**{**{name: getattr(honest, name) for name in honest.__struct_fields__}, **changes})
        if leg == "prefill":
            status, answer = await pair.front.prefill(spec, PROMPT)
        else:
            status, answer, _ = await pair.front.decode(spec, GREEDY)
        assert answer["error"]["code"] == code
        assert status == 502
        await pair.front.release(pair.producer, honest)


async def test_roles_are_kept() -> None:
    async with pair_of() as pair:
        spec = await pair.front.reserve(pair.producer, PROMPT)
        cases = [
            (pair.producer, "/v1/completions", GREEDY, 403, "prefill_only"),
            (pair.producer, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 403, None),
            (
                pair.producer,
                "/v1/completions",
                {**GREEDY, "kv_transfer_params": to_kv_transfer_params(spec, leg="decode")},
                403,
                "prefill_only",
            ),
            (
                pair.consumer,
                "/v1/completions",
                {**GREEDY, "kv_transfer_params": to_kv_transfer_params(spec, leg="prefill")},
                400,
                "unsupported_parameter",
            ),
        ]
        for site, path, body, status, code in cases:
            async with pair.front.session.post(f"{site.url}{path}", json=body) as response:
                assert response.status == status
                assert (await response.json())["error"]["code"] == (code or "prefill_only")
        await pair.front.release(pair.producer, spec)


async def test_a_prompt_that_is_too_long_moves_no_byte() -> None:
    async with pair_of(consumer=TinyEngine(max_model_len=100)) as pair:
        spec = await pair.front.reserve(pair.producer, PROMPT)
        status, answer, _ = await pair.front.decode(spec, GREEDY)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert pair.consumer.metric("farfill_transfer_bytes_total", direction="received") == 0
        await pair.front.release(pair.producer, spec)


# ---------------------------------------------------------------------------------------------------- failures midway


async def test_another_fingerprint_is_refused_by_the_decode_side() -> None:
    async with pair_of(producer=TinyEngine(model_seed="weights-2")) as pair:
        spec = await pair.front.reserve(pair.producer, PROMPT)
        (_, _), (status, answer, _) = await asyncio.gather(
            pair.front.prefill(spec, PROMPT), pair.front.decode(spec, GREEDY)
        )
        assert (status, answer["error"]["code"]) == (502, "fingerprint_mismatch")
        assert "weights" in answer["error"]["message"]
        assert (
            pair.consumer.metric("farfill_transfers_total", direction="received", outcome="fingerprint_mismatch") == 1
        )
        await pair.front.release(pair.producer, spec)


async def test_another_prompt_of_the_same_length_is_refused_by_the_decode_side() -> None:
    async with pair_of() as pair:
        spec = await pair.front.reserve(pair.producer, PROMPT)
        other = [*PROMPT[:-2], 65, PROMPT[-1]]
        (_, _), (status, answer, _) = await asyncio.gather(
            pair.front.prefill(spec, other), pair.front.decode(spec, GREEDY)
        )
        assert (status, answer["error"]["code"]) == (502, "prompt_mismatch")
        await pair.front.release(pair.producer, spec)


async def test_a_released_lease_ends_both_legs(hold: Hold) -> None:
    async with pair_of(producer=TinyEngine(before_step=hold)) as pair:
        spec = await pair.front.reserve(pair.consumer, PROMPT)
        legs = asyncio.gather(pair.front.prefill(spec, PROMPT), pair.front.decode(spec, GREEDY))
        await hold.until_reached()
        await pair.front.release(pair.consumer, spec)
        hold.go.set()
        (prefill_status, prefill), (status, decoded, _) = await legs
        assert (prefill_status, prefill["error"]["code"]) == (502, "transfer_cancelled")
        assert (status, decoded["error"]["code"]) == (502, "transfer_cancelled")
        await pair.nothing_kept()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_gateway_that_hangs_up_frees_the_leg(hold: Hold, leg: str) -> None:
    async with pair_of(producer=TinyEngine(before_step=hold)) as pair:
        site = pair.producer if leg == "prefill" else pair.consumer
        ends = recorded_ends(site, "send" if leg == "prefill" else "receive")
        spec = await pair.front.reserve(pair.producer, PROMPT)
        prefill = asyncio.create_task(pair.front.prefill(spec, PROMPT))
        decode = asyncio.create_task(pair.front.decode(spec, GREEDY))
        await hold.until_reached()
        async with asyncio.timeout(WAIT_S):
            # The decode leg has arrived, too: it waits in the store for what is not there yet.
            await settled(pair.producer.running.worker.store.memory.when(lambda ledger: ledger.gets_parked > 0))
            (prefill if leg == "prefill" else decode).cancel()
            await site.running.worker.admission.idle()
        with pytest.raises(OperationError, match="the request has ended") as ended:
            await asyncio.wait_for(settled(ends[0].future), WAIT_S)
        assert ended.value.code == "transfer_cancelled"
        hold.go.set()
        direction = "sent" if leg == "prefill" else "received"
        assert site.metric("farfill_transfers_total", direction=direction, outcome="transfer_cancelled") == 1
        await pair.front.release(pair.producer, spec)
        await asyncio.gather(prefill, decode, return_exceptions=True)
        await pair.nothing_kept()
        if leg == "prefill":
            assert pair.producer.engine.stats().aborted_total == 1


class Refusing(TinyEngine):
    """Has no room for imported caches."""

    def generate(self, request: GenerationRequest, on_event: OnEvent) -> None:
        self.refused = request.imported
        raise OverloadError("queue_full", "the engine's queue is full")


async def test_a_verified_cache_that_the_engine_refuses_is_released() -> None:
    engine = Refusing()
    async with pair_of(consumer=engine) as pair:
        spec = await pair.front.reserve(pair.producer, PROMPT)
        (prefill_status, _), (status, answer, _) = await asyncio.gather(
            pair.front.prefill(spec, PROMPT), pair.front.decode(spec, GREEDY)
        )
        assert (prefill_status, status, answer["error"]["code"]) == (200, 503, "queue_full")
        assert engine.refused is not None
        with pytest.raises(KeyError):
            engine.refused.payload(engine.refused.plan[0].index)


async def test_hanging_up_while_decoding_frees_the_imported_cache() -> None:
    hold = Hold("decode")
    async with pair_of(consumer=TinyEngine(before_step=hold)) as pair:
        spec = await pair.front.reserve(pair.producer, PROMPT)
        decode = asyncio.create_task(pair.front.decode(spec, GREEDY))
        assert (await pair.front.prefill(spec, PROMPT))[0] == 200
        await hold.until_reached()
        decode.cancel()
        async with asyncio.timeout(WAIT_S):
            await pair.consumer.running.worker.admission.idle()
        hold.go.set()
        await pair.nothing_kept()
        assert pair.consumer.engine.stats().aborted_total == 1


async def test_a_prefill_that_never_comes_is_a_clear_error_and_keeps_nothing() -> None:
    clocks = Clocks(stall_s=0.2, transfer_s=0.4, setup_s=0.2)
    async with pair_of(clocks=clocks) as pair:
        spec = await pair.front.reserve(pair.consumer, PROMPT)
        status, answer, _ = await pair.front.decode(spec, GREEDY)
        assert status == 504
        assert answer["error"]["code"] in ("transfer_stalled", "transfer_timeout")
        await pair.front.release(pair.consumer, spec)


async def test_the_queue_has_its_clock(hold: Hold) -> None:
    engine = TinyEngine(max_running=1, before_step=hold)
    async with pair_of(producer=engine, clocks=Clocks(queue_s=0.1)) as pair:
        first = await pair.front.reserve(pair.producer, PROMPT, clocks=Clocks())
        second = await pair.front.reserve(pair.producer, PROMPT)
        running = asyncio.create_task(pair.front.prefill(first, PROMPT))
        await hold.until_reached()
        status, answer = await pair.front.prefill(second, PROMPT)
        assert (status, answer["error"]["code"]) == (504, "queue_timeout")
        hold.go.set()
        assert (await running)[0] == 200
        for spec in (first, second):
            await pair.front.release(pair.producer, spec)


ENGINE_ENDPOINTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/completions", GREEDY),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [97]}),
]


async def test_only_gateways_make_an_engine_work(tmp_path: Path) -> None:
    """A worker's or a relay's certificate, lost or misused, generates nothing elsewhere; it may look and fetch."""
    files = certificates(tmp_path, "west", "gateway", "relay", "other-worker")
    files["no-role"] = tls.write_certificate(tmp_path, "no-role", role=cast(tls.PeerRole, SimpleNamespace(value="it")))
    assert tls.check_files(files["no-role"]).role is None
    async with worker_site(name="west", tls=files["west"]) as site:
        for name, status in (("other-worker", 403), ("relay", 403), ("gateway", 200), ("no-role", 200)):
            async with http_session(tls.client_context(files[name])) as session:
                for method, path, body in ENGINE_ENDPOINTS:
                    async with session.request(method, f"{site.url}{path}", json=body) as response:
                        answer = await response.json()
                        assert response.status == status, (name, path, answer)
                        if status == 403:
                            assert answer["error"]["code"] == "forbidden"
                            assert name in answer["error"]["message"]
                for path in ("/health", "/version", "/metrics", "/farfill/v1/info"):
                    async with session.get(f"{site.url}{path}") as response:
                        assert response.status == 200, (name, path)


def recorded_ends(site: Site, method: str) -> list[Any]:
    """The transfers that this site begins from now on with the node's `send` or `receive`."""
    node, ends = site.running.worker.node, []
    begin = getattr(node, method)

    def begin_and_record(*arguments: Any) -> Any:
        ends.append(begin(*arguments))
        return ends[-1]

    setattr(node, method, begin_and_record)
    return ends


def certificates(folder: Path, *names: str) -> dict[str, tls.TlsFiles]:
    tls.write_development_ca(folder)
    roles = {"gateway": tls.PeerRole.GATEWAY, "relay": tls.PeerRole.RELAY}
    return {name: tls.write_certificate(folder, name, role=roles.get(name, tls.PeerRole.WORKER)) for name in names}
