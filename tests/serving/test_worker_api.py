"""Rules: OpenAI's own client reads every answer; a bad input is one JSON error with a stable code, wherever it comes;
an error after a stream's head is an event and no `[DONE]`; a client that goes away frees its request.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_engine import TinyEngine
from worker_kit import WAIT_S, Site, http_session, worker_site

from farfill.config.tree import Role
from farfill.engines.api import GenerationRequest, OnEvent, PrefillCompleted, RequestFailed, RequestStarted
from farfill.engines.api import TokensGenerated as Tokens
from farfill.engines.serving.worker import BODY_BYTES_MAX
from farfill.errors import OperationError
from farfill.kv.fingerprint import fingerprint_from_builtins
from farfill.kv.layout import layout_from_builtins

PROMPT = "Chunks are sent, verified, resumed and stored."
GREEDY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with worker_site() as site:
        yield site


@pytest.fixture
async def client(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=site.url, timeout=WAIT_S) as client:
        yield client


# ------------------------------------------------------------------------------------------------- OpenAI's own client


async def test_a_completion_and_its_stream_say_the_same(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(**GREEDY, logprobs=2)
    text, tokens, offsets, reasons, usage = "", [], [], [], None
    stream = await client.completions.create(**GREEDY, logprobs=2, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        assert chunk.object == "text_completion"
        assert chunk.id.startswith("cmpl-")
        usage = usage or chunk.usage
        for choice in chunk.choices:
            text += choice.text
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens or []
                offsets += choice.logprobs.text_offset or []
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert text == whole.choices[0].text
    assert len(text) > 5
    assert reasons == [whole.choices[0].finish_reason]
    assert usage == whole.usage
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert (tokens, offsets) == (logprobs.tokens, logprobs.text_offset)
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    for token, logprob, top in zip(tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == len(PROMPT) + 1
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_chat_and_its_stream_say_the_same(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 20,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = await client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert (message.role, message.refusal, message.tool_calls) == ("assistant", None, None)
    assert whole.id.startswith("chatcmpl-")
    assert whole.object == "chat.completion"
    stream = await client.chat.completions.create(**asked, stream=True)
    roles, text, reasons, logprobs = [], "", [], []
    async for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        assert chunk.usage is None
        (choice,) = chunk.choices
        roles += [choice.delta.role] if choice.delta.role else []
        text += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        logprobs += (choice.logprobs.content or []) if choice.logprobs else []
    assert (roles, text, reasons) == (["assistant"], message.content, [whole.choices[0].finish_reason])
    assert whole.choices[0].logprobs is not None
    assert logprobs == whole.choices[0].logprobs.content
    assert all(bytes(entry.bytes or []).decode() == entry.token for entry in logprobs)
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


async def test_tools_reach_the_chat_template(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    tools: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    without = await client.chat.completions.create(**asked)
    with_tools = await client.chat.completions.create(**asked, tools=tools)
    assert without.usage is not None
    assert with_tools.usage is not None
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens + len("look_up")


async def test_several_prompts_and_choices_have_their_numbers(client: openai.AsyncOpenAI) -> None:
    prompts = ["first", "second"]
    asked: dict[str, Any] = {"model": "tiny", "temperature": 1, "seed": 5, "max_tokens": 6, "n": 3}
    alone = [await client.completions.create(prompt=prompt, **asked) for prompt in prompts]
    both = await client.completions.create(prompt=prompts, **asked)
    assert [choice.index for choice in both.choices] == list(range(6))
    assert [choice.text for choice in both.choices] == [choice.text for one in alone for choice in one.choices]
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)

    texts = dict.fromkeys(range(6), "")
    async for chunk in await client.completions.create(prompt=prompts, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in both.choices]


async def test_seed_stop_and_token_ids(client: openai.AsyncOpenAI, site: Site) -> None:
    whole = await client.completions.create(**GREEDY)
    ids = site.engine.tokenizer.encode(PROMPT)
    assert (await client.completions.create(**{**GREEDY, "prompt": ids})).choices[0].text == whole.choices[0].text
    text = whole.choices[0].text
    stopped = await client.completions.create(**GREEDY, stop=[text[4:6]])
    assert stopped.choices[0].text == text[: text.index(text[4:6])]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].model_extra == {"stop_reason": text[4:6]}


async def test_completions_have_16_tokens_unless_asked(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "farfill"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")


async def test_the_client_sees_typed_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="gpt-9", prompt="a")
    assert unknown.value.code == "unknown_model"
    with pytest.raises(openai.BadRequestError) as negative:
        await client.completions.create(model="tiny", prompt="a", max_tokens=-1)
    assert (negative.value.code, negative.value.param) == ("invalid_request", "max_tokens")


# ----------------------------------------------------------------------------------------------------------- bad input

LONG = "a" * 5000
BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/v1/completions", b"{", 400, "invalid_json"),
    ("POST", "/v1/completions", b'{"prompt": "\xff"}', 400, "invalid_encoding"),
    ("POST", "/v1/completions", {"model": "other", "prompt": "a"}, 404, "unknown_model"),
    ("POST", "/v1/completions", {"prompt": ""}, 400, "empty_prompt"),
    ("POST", "/v1/completions", {"prompt": "", "add_special_tokens": False}, 400, "empty_prompt"),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": -5}, 400, "invalid_request"),
    ("POST", "/v1/completions", {"prompt": LONG}, 400, "context_length_exceeded"),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 5000}, 400, "context_length_exceeded"),
    ("POST", "/v1/completions", {"prompt": ["a", LONG]}, 400, "context_length_exceeded"),
    ("POST", "/v1/completions", {"prompt": [999]}, 400, "invalid_request"),
    ("POST", "/v1/completions", {"prompt": "a", "echo": True}, 400, "unsupported_parameter"),
    ("POST", "/v1/chat/completions", {"messages": []}, 400, "empty_prompt"),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "pope", "content": "a"}]}, 400, "invalid_request"),
    ("POST", "/tokenize", {}, 400, "invalid_request"),
    ("POST", "/tokenize", {"prompt": "a", "model": "other"}, 404, "unknown_model"),
    ("POST", "/detokenize", {"tokens": [1000]}, 400, "invalid_request"),
    ("POST", "/detokenize", {"tokens": "a"}, 400, "invalid_request"),
    ("POST", "/v1/nothing", {}, 404, "unknown_endpoint"),
    ("GET", "/", None, 404, "unknown_endpoint"),
    ("GET", "/v1/completions", None, 405, "method_not_allowed"),
    ("DELETE", "/health", None, 405, "method_not_allowed"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"), BAD, ids=[f"{i}-{b[4]}" for i, b in enumerate(BAD)]
)
async def test_bad_input_is_one_json_error(
    http: httpx.AsyncClient, site: Site, method: str, path: str, body: Any, status: int, code: str
) -> None:
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    response = await http.request(method, path, content=content, headers={"X-Request-Id": "bad-1"})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == code
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.headers["X-Request-Id"] == "bad-1"
    if status == 405:
        assert response.headers["Allow"]
    good = await http.post("/v1/completions", json=GREEDY)
    assert good.status_code == 200


async def test_a_body_over_the_limit_is_refused_by_its_promise_and_by_its_size(
    http: httpx.AsyncClient, site: Site
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(BODY_BYTES_MAX // 2**20 + 1):
            yield b"a" * 2**20

    response = await http.post("/v1/completions", content=endless())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    reader, writer = await asyncio.open_connection(*site.url.removeprefix("http://").split(":"))
    promise = BODY_BYTES_MAX + 1
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {promise}\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
    assert b" 413 " in head
    writer.close()
    await writer.wait_closed()


async def test_a_compressed_body_is_refused(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=b"x", headers={"Content-Encoding": "gzip"})
    assert response.status_code == 400


async def test_request_ids_are_echoed_where_they_are_sane(http: httpx.AsyncClient) -> None:
    for given, kept in (("abc-1/2:3", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ('"', False)):
        response = await http.post("/v1/completions", json=GREEDY, headers={"X-Request-Id": given})
        answered = response.headers["X-Request-Id"]
        assert (answered == given) is kept
        assert response.json()["id"] == f"cmpl-{answered}"
    twice = [http.post("/v1/completions", json=GREEDY, headers={"X-Request-Id": "same"}) for _ in range(4)]
    assert [response.status_code for response in await asyncio.gather(*twice)] == [200] * 4
    async with http.stream("POST", "/v1/completions", json={**GREEDY, "stream": True}) as response:
        assert response.headers["X-Request-Id"]


# --------------------------------------------------------------------------------------------------- other endpoints


async def test_tokenize_and_detokenize_are_inverse(http: httpx.AsyncClient, site: Site) -> None:
    asked = {"prompt": "Grüße, 日本", "return_token_strs": True}
    answer = (await http.post("/tokenize", json=asked)).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    assert answer["tokens"] == site.engine.tokenizer.encode("Grüße, 日本")
    text = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"]
    assert text == "<bos>Grüße, 日本"
    bare = (await http.post("/tokenize", json={"prompt": "a", "add_special_tokens": False})).json()
    assert (bare["tokens"], bare["token_strs"]) == ([97], None)


async def test_tokenize_of_messages_is_what_a_chat_computes(http: httpx.AsyncClient) -> None:
    chat = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"thinking": False},
    }
    count = (await http.post("/tokenize", json=chat)).json()["count"]
    answer = (await http.post("/v1/chat/completions", json={**chat, "max_tokens": 1})).json()
    assert answer["usage"]["prompt_tokens"] == count
    shorter = (await http.post("/tokenize", json={**chat, "add_generation_prompt": False})).json()["count"]
    assert shorter < count


async def test_info_says_what_peers_need(http: httpx.AsyncClient, site: Site) -> None:
    info = (await http.get("/farfill/v1/info")).json()
    assert fingerprint_from_builtins(info["fingerprint"]) == site.engine.info.fingerprint
    assert layout_from_builtins(info["layout"]) == site.engine.info.layout
    assert (info["name"], info["instance"], info["role"]) == ("worker", site.instance, "both")
    assert (info["engine"], info["model"], info["max_model_len"], info["chunk_tokens"]) == ("tiny", "tiny", 4096, 16)
    assert info["store"]["control_url"] == site.url
    assert info["store"]["data_port"] == site.running.data_port
    assert (await http.get("/farfill/v1/store/status")).json()["ledger"]["held_bytes"] == 0


async def test_health_version_and_metrics(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok", "requests": 0}
    assert (await http.get("/version")).json()["version"]
    await http.post("/v1/completions", json=GREEDY)
    await http.post("/v1/completions", json={"prompt": ""})
    await http.get("/somewhere")
    text = (await http.get("/metrics")).text
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    requests = "farfill_worker_requests_total"
    assert samples[(requests, ("endpoint", "/v1/completions"), ("outcome", "ok"))] == 1
    assert samples[(requests, ("endpoint", "/v1/completions"), ("outcome", "empty_prompt"))] == 1
    assert samples[(requests, ("endpoint", "unknown"), ("outcome", "unknown_endpoint"))] == 1
    assert samples[("farfill_worker_prompt_tokens_total", ("source", "computed"))] == len(PROMPT)
    assert samples[("farfill_engine_tokens_total", ("kind", "prefill"))] == len(PROMPT)
    assert samples[("farfill_engine_requests", ("state", "running"))] == 0
    states = {state: samples[("farfill_store_bytes", ("state", state))] for state in ("free", "held", "quarantined")}
    assert sum(states.values()) == samples[("farfill_store_bytes", ("state", "total"))] > 0
    assert samples[("farfill_worker_first_token_seconds_count", ("source", "local"))] == 1


# ------------------------------------------------------------------------------------- failures, and clients that leave


class Failing(TinyEngine):
    """Fails each generation where it is told to: before or after the prefix is there."""

    def __init__(self, after_prefix: bool) -> None:
        super().__init__()
        self._after_prefix = after_prefix

    def generate(self, request: GenerationRequest, on_event: OnEvent) -> None:
        def fail() -> None:
            on_event(RequestStarted())
            if self._after_prefix:
                on_event(PrefillCompleted(len(request.prompt_token_ids) - 1, 0, 0))
                on_event(Tokens(0, (65,), "A"))
            on_event(RequestFailed(OperationError("engine_failed", "the accelerator fell off the bus")))

        threading.Thread(target=fail).start()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_head_is_a_plain_error(stream: bool) -> None:
    async with (
        worker_site(engine=Failing(after_prefix=False)) as site,
        http_session() as session,
        session.post(f"{site.url}/v1/completions", json={**GREEDY, "stream": stream}) as response,
    ):
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "engine_failed"


async def test_a_failure_after_the_head_is_an_event_and_no_done() -> None:
    async with worker_site(engine=Failing(after_prefix=True)) as site, http_session() as session:
        async with session.post(f"{site.url}/v1/completions", json={**GREEDY, "stream": True}) as response:
            assert response.status == 200
            events = (await response.text()).strip().split("\n\n")
        assert [json.loads(event.removeprefix("data: ")).keys() >= {"error"} for event in events] == [False, True]
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("engine_failed", "server_error")
        assert site.metric("farfill_worker_requests_total", endpoint="/v1/completions", outcome="engine_failed") == 1


async def test_openais_client_raises_the_error_event() -> None:
    async with (
        worker_site(engine=Failing(after_prefix=True)) as site,
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.completions.create(**GREEDY, stream=True)
        with pytest.raises(openai.APIError, match="fell off the bus"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_request(stream: bool) -> None:
    reached, go = threading.Event(), threading.Event()

    def hold(request_id: str, phase: str) -> None:
        if phase == "decode":
            reached.set()
            assert go.wait(WAIT_S)

    async with worker_site(engine=TinyEngine(before_step=hold)) as site, http_session() as session:
        body = {**GREEDY, "prompt": ["a", "b"], "stream": stream, "max_tokens": 3000, "ignore_eos": True}
        asking = asyncio.create_task(session.post(f"{site.url}/v1/completions", json=body))
        assert await asyncio.to_thread(reached.wait, WAIT_S)
        if stream:
            (await asyncio.wait_for(asking, WAIT_S)).close()
        else:
            asking.cancel()
        async with asyncio.timeout(WAIT_S):
            await site.running.worker.admission.idle()
        go.set()
        await site.nothing_kept()
        assert site.engine.stats().aborted_total == 2
        assert site.metric("farfill_worker_requests_total", endpoint="/v1/completions", outcome="client_gone") == 1


async def test_more_requests_than_allowed_are_told_to_come_back() -> None:
    reached, go = threading.Event(), threading.Event()

    def hold(request_id: str, phase: str) -> None:
        reached.set()
        assert go.wait(WAIT_S)

    async with worker_site(engine=TinyEngine(before_step=hold), requests=1) as site, http_session() as session:
        first = asyncio.create_task(session.post(f"{site.url}/v1/completions", json=GREEDY))
        assert await asyncio.to_thread(reached.wait, WAIT_S)
        async with session.post(f"{site.url}/v1/completions", json=GREEDY) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "queue_full"
            assert response.headers["Retry-After"] == "1"
        go.set()
        async with await first as response:
            assert response.status == 200


async def test_draining_lets_the_present_finish_and_refuses_the_next() -> None:
    reached, go = threading.Event(), threading.Event()

    def hold(request_id: str, phase: str) -> None:
        reached.set()
        assert go.wait(WAIT_S)

    async with worker_site(engine=TinyEngine(before_step=hold)) as site, http_session() as session:
        first = asyncio.create_task(session.post(f"{site.url}/v1/completions", json=GREEDY))
        assert await asyncio.to_thread(reached.wait, WAIT_S)
        draining = asyncio.create_task(site.running.drain(WAIT_S))
        await asyncio.sleep(0)
        for path, method in (("/v1/completions", "POST"), ("/health", "GET")):
            async with session.request(method, f"{site.url}{path}", json=GREEDY) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "draining"
        assert not draining.done()
        go.set()
        async with await first as response:
            assert response.status == 200
        assert await draining is True


async def test_a_prefill_worker_still_tokenises() -> None:
    async with (
        worker_site(role=Role.PREFILL) as site,
        http_session() as session,
        session.post(f"{site.url}/tokenize", json={"prompt": "a"}) as response,
    ):
        assert response.status == 200


async def test_a_half_sent_request_does_not_hold_the_worker() -> None:
    async with worker_site() as site:
        host, port = site.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with http_session() as session, session.get(f"{site.url}/health") as response:
            assert response.status == 200
