"""Bad input, who may call, and what is passed through: each wrong thing gets one clear error with a stable code."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator

import aiohttp
import httpx
import pytest
from fake_site import MODEL, Cluster, cluster

from farfill.errors import OperationError
from farfill.gateway.settings import Limits, Tenant

LONG = "a long prompt that is well over the threshold of the gateway"
KEY = "sk-a-key-of-some-length"


@pytest.fixture
async def fleet() -> AsyncIterator[Cluster]:
    async with cluster(limits=Limits(body_bytes=4096)) as made:
        yield made


@pytest.fixture
async def client(fleet: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as made:
        yield made


def encoded(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": LONG, "max_tokens": 2, **fields}).encode()


BAD: list[tuple[str, bytes, int, str]] = [
    ("malformed JSON", b'{"model": ', 400, "invalid_json"),
    ("no body", b"", 400, "invalid_json"),
    ("not a number of JSON", b'{"model": "fake", "prompt": "x", "temperature": NaN}', 400, "invalid_json"),
    ("nested too deeply", b"[" * 3000, 400, "invalid_json"),
    ("not UTF-8", b'{"model": "fake", "prompt": "\xff\xfe"}', 400, "invalid_encoding"),
    ("not an object", b'["fake"]', 400, "invalid_request"),
    ("unknown model", encoded(model="nobody's"), 404, "unknown_model"),
    ("model of a wrong type", encoded(model=7), 400, "invalid_request"),
    ("stream of a wrong type", encoded(stream="yes"), 400, "invalid_request"),
    ("a transfer of the client's own", encoded(kv_transfer_params={"do_remote_prefill": True}), 400,
     "unsupported_parameter"),
    ("a body over the limit", encoded(prompt="x" * 5000), 413, "body_too_large"),
    ("a prompt over the maximum length", encoded(prompt=[65] * 1000), 400, "context_length_exceeded"),
    ("negative max_tokens", encoded(max_tokens=-1), 400, "invalid_request"),
    ("an empty prompt", encoded(prompt=""), 400, "empty_prompt"),
    ("no prompt", encoded(prompt=None), 400, "empty_prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "status", "code"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
async def test_each_bad_body_gets_one_clear_error(
    fleet: Cluster, client: httpx.AsyncClient, content: bytes, status: int, code: str
) -> None:
    if code == "context_length_exceeded":
        fleet.decode.max_model_len = 1000
        await fleet.gateway.fleet.look("west-1")
    answer = await client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert answer.headers["x-request-id"]
    await fleet.site.until(lambda: fleet.site.held == 0)
    assert fleet.gateway.admission.requests == 0


async def test_a_body_over_the_limit_is_refused_without_a_stated_length_too(
    fleet: Cluster, client: httpx.AsyncClient
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 1000

    answer = await client.post("/v1/completions", content=pieces())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_compressed_body_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", content=b"x", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1", True), ("x" * 200, False), ("bad id", False), ("", False)]
)  # fmt: skip
async def test_a_request_id_is_echoed_if_it_is_a_sane_one(client: httpx.AsyncClient, given: str, kept: bool) -> None:
    answer = await client.get("/health", headers={"X-Request-Id": given})
    assert (answer.headers["x-request-id"] == given) == kept
    assert answer.headers["x-request-id"]


async def test_unknown_paths_and_methods(client: httpx.AsyncClient) -> None:
    answer = await client.get("/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_endpoint")
    answer = await client.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in answer.headers["allow"]
    answer = await client.post("/v1/not-there", json={"model": MODEL})
    assert answer.status_code == 404, "the worker says what it has"


async def test_bytes_that_are_no_http_hurt_nobody(fleet: Cluster, client: httpx.AsyncClient) -> None:
    host, port = fleet.url.removeprefix("http://").split(":")
    for garbage in (b"\x16\x03\x01\x02\x00", b"POST /v1/completions HTTP/1.1\r\nContent-Length: nine\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        writer.write_eof()
        async with asyncio.timeout(20):
            answer = await reader.read()
        assert b" 400 " in answer or answer == b""
        writer.close()
    assert (await client.get("/health")).status_code == 200


# --- who may call ---------------------------------------------------------------------------------------------------


async def test_with_tenants_a_key_is_needed_and_never_goes_to_a_worker() -> None:
    tenants = (Tenant("first", KEY), Tenant("second", KEY + "-2"))
    async with cluster(tenants=tenants) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": KEY}, {"Authorization": "Bearer"}):
            for method, path in (
                ("POST", "/v1/completions"), ("POST", "/v1/echo"), ("GET", "/v1/models"), ("POST", "/tokenize"),
            ):  # fmt: skip
                answer = await client.request(method, path, headers=headers, content=encoded())
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
                assert "nope" not in answer.text
        assert not fleet.decode.seen
        good = {"Authorization": f"Bearer {KEY}"}
        for path in ("/v1/completions", "/v1/echo"):
            answer = await client.post(path, headers=good, content=encoded())
            assert answer.status_code == 200
        for worker in fleet.workers:
            assert all("Authorization" not in seen[1] for seen in worker.seen)
        assert (await client.get("/health")).status_code == 200, "open: it tells nothing"


async def test_a_key_with_odd_bytes_is_only_wrong() -> None:
    async with cluster(tenants=(Tenant("first", KEY),)) as fleet:
        host, port = fleet.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n"
        )
        assert b" 401 " in (await reader.read())
        writer.close()


async def test_two_tenants_never_share_what_is_known_to_be_cached() -> None:
    tenants = (Tenant("first", KEY), Tenant("second", KEY + "-2"))
    async with cluster(tenants=tenants, threshold=100) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        prompt = "".join(f"{number:04d}" for number in range(64))
        paths = []
        for key in (KEY, KEY, KEY + "-2"):
            answer = await client.post(
                "/v1/completions", content=encoded(prompt=prompt), headers={"Authorization": f"Bearer {key}"}
            )
            paths.append(answer.headers["x-farfill-path"])
        assert paths == ["remote", "local", "remote"]


# --- pass-through ---------------------------------------------------------------------------------------------------


async def test_other_endpoints_are_passed_through_both_ways(fleet: Cluster, client: httpx.AsyncClient) -> None:
    content = json.dumps({"model": MODEL, "input": "x"}).encode()
    answer = await client.post(
        "/v1/echo?a=1&b=%2F", content=content, headers={"Content-Type": "application/json", "X-Mine": "yes"}
    )
    assert answer.json() == {"method": "POST", "query": "a=1&b=/", "sha256": hashlib.sha256(content).hexdigest()}
    assert (answer.headers["x-farfill-path"], answer.headers["x-farfill-reason"]) == (
        "local", "endpoint_not_splittable",
    )  # fmt: skip
    assert answer.headers["x-engine"] == "fake"
    assert "x-private" not in answer.headers, "named by Connection: of one hop only"
    assert fleet.decode.seen[-1][1]["X-Mine"] == "yes"
    tokens = await client.post("/tokenize", json={"model": MODEL, "prompt": "abc"})
    assert tokens.json()["tokens"] == [97, 98, 99]
    assert tokens.headers["x-farfill-reason"] == "endpoint_not_splittable"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../farfill/v1/info", "/v1/%2e%2e/farfill/v1/info", "/v1/a/..%2f..%2ffarfill/v1/info", "/v1/./x",
        "/v1/..%5cfarfill",
    ],
)  # fmt: skip
async def test_no_path_leads_to_what_is_between_gateway_and_workers(fleet: Cluster, path: str) -> None:
    host, port = fleet.url.removeprefix("http://").split(":")
    for method in ("GET", "POST"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 404 "), answer
        assert b"unknown_endpoint" in answer
        writer.close()
    assert "fingerprint" not in answer.decode()


async def test_a_clients_own_farfill_headers_do_not_reach_a_worker(fleet: Cluster, client: httpx.AsyncClient) -> None:
    await client.post("/v1/echo", json={"model": MODEL}, headers={"X-Farfill-Path": "remote", "Cookie": "a=b"})
    headers = fleet.decode.seen[-1][1]
    assert "X-Farfill-Path" not in headers
    assert "Cookie" not in headers


async def test_a_body_that_is_no_json_is_streamed_and_bounded(fleet: Cluster, client: httpx.AsyncClient) -> None:
    content = bytes(range(256)) * 8
    headers = {"Content-Type": "application/octet-stream"}

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 100):
            yield content[start : start + 100]

    answer = await client.post("/v1/echo", content=pieces(), headers=headers)
    assert answer.json()["sha256"] == hashlib.sha256(content).hexdigest()
    answer = await client.post("/v1/echo", content=content * 4, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    async def too_many() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield content

    answer = await client.post("/v1/echo", content=too_many(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert (await client.delete("/v1/echo")).status_code == 204
    assert (await client.head("/v1/echo")).status_code == 200


async def test_an_error_of_a_passed_endpoint_is_an_openai_error(fleet: Cluster, client: httpx.AsyncClient) -> None:
    fleet.decode.fail["echo"] = OperationError("engine_failed", "crashed")
    answer = await client.post("/v1/echo", json={"model": MODEL})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")


async def test_a_passed_answer_that_breaks_off_does_not_look_complete(fleet: Cluster) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(fleet.url + "/v1/endless") as answer,
    ):
        await answer.content.readexactly(1000)
        await fleet.decode.stop()
        with pytest.raises(aiohttp.ClientError):
            while await answer.content.readany():
                pass
