"""Killed processes and clients that leave, at each state of a request: never a wrong token, never a block that is kept.

A relay that is stopped (SIGSTOP) holds a request in the state TRANSFERRING for as long as a test needs.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
from vllm_kit import Answer, Gateway, Pair, Process, VllmServer, complete, gateway, relay, token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LONG = 1500  # three steps of prefill, seconds each
SETTLE_S = 120.0


async def until(condition: Callable[[], bool], what: str, seconds: float = SETTLE_S) -> None:
    """Asks again and again; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.05)
    assert what


def is_idle(server: VllmServer) -> bool:
    """No request, no block in use, no staging held."""
    ledger = httpx.get(f"{server.control_url}/farfill/v1/store/status", trust_env=False).json()["ledger"]
    return (
        server.metric("vllm:num_requests_running") == 0
        and server.metric("vllm:num_requests_waiting") == 0
        and server.metric("vllm:kv_cache_usage_perc") == 0
        and ledger["free_bytes"] == ledger["total_bytes"]
    )


async def settled(*servers: VllmServer) -> None:
    for server in servers:
        await until(lambda server=server: is_idle(server), f"{server.name} is idle")


def is_prefilling(pair: Pair) -> bool:
    return pair.prefill.metric("vllm:num_requests_running") == 1 and pair.prefill.metric("vllm:kv_cache_usage_perc") > 0


def is_waiting_for_cache(pair: Pair) -> bool:
    """The decode side has blocks for the request, and runs nothing."""
    return pair.decode.metric("vllm:kv_cache_usage_perc") > 0 and pair.decode.metric("vllm:num_requests_running") == 0


@contextmanager
def through_relay(pair: Pair, **clocks: float) -> Iterator[tuple[Gateway, Process]]:
    with (
        relay(pair.folder) as (url, process),
        gateway(pair.folder, pair.workers, placement="relay", relay_url=url, clocks=clocks) as front,
    ):
        try:
            yield front, process
        finally:
            if process.child.poll() is None:
                os.kill(process.child.pid, signal.SIGCONT)


@asynccontextmanager
async def asked(front: Gateway, prompt: list[int], tokens: int = 16) -> AsyncIterator["asyncio.Task[Answer]"]:
    task = asyncio.create_task(asyncio.to_thread(complete, front.url, prompt, tokens=tokens))
    try:
        yield task
    finally:
        await asyncio.gather(task, return_exceptions=True)


async def stop_while_prefilling(pair: Pair, process: Process) -> None:
    """Stops the relay in the middle of a prefill, and waits until all has been computed."""
    legs = pair.prefill.metric("vllm:generation_tokens_total")
    await until(lambda: is_prefilling(pair), "prefill has begun")
    os.kill(process.child.pid, signal.SIGSTOP)
    await until(lambda: pair.prefill.metric("vllm:generation_tokens_total") == legs + 1, "prefill is done")


def check(pair: Pair, prompt: list[int], answer: Answer, reason: str) -> None:
    assert (answer.headers["x-farfill-path"], answer.headers["x-farfill-reason"]) == ("local", reason)
    assert answer.token_ids == complete(pair.decode.url, prompt).token_ids


async def test_relay_killed_while_transferring(pair: Pair) -> None:
    prompt = token_ids(LONG, 1001)
    with through_relay(pair) as (front, process):
        async with asked(front, prompt) as task:
            await stop_while_prefilling(pair, process)
            process.kill()
            answer = await task
    check(pair, prompt, answer, "fallback:transport")
    await settled(pair.prefill, pair.decode)


async def test_link_that_stalls(pair: Pair) -> None:
    prompt = token_ids(LONG, 1002)
    with through_relay(pair, stall_s=15.0) as (front, process):
        async with asked(front, prompt) as task:
            await stop_while_prefilling(pair, process)
            answer = await task
    check(pair, prompt, answer, "fallback:timeout")
    await settled(pair.prefill, pair.decode)


@pytest.mark.parametrize("state", ["prefilling", "transferring", "decoding"])
async def test_client_that_leaves(pair: Pair, state: str) -> None:
    body: dict[str, Any] = {
        "model": "m",
        "prompt": token_ids(LONG, len(state)),
        "max_tokens": 1000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with through_relay(pair) as (front, process):
        async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
            if state == "decoding":
                async with client.stream("POST", f"{front.url}/v1/completions", json=body) as response:
                    assert response.headers["x-farfill-path"] == "remote"
                    async for _ in response.aiter_lines():
                        break
            else:
                task = asyncio.create_task(client.post(f"{front.url}/v1/completions", json=body))
                if state == "prefilling":
                    await until(lambda: is_prefilling(pair) and is_waiting_for_cache(pair), "both legs are under way")
                else:
                    await stop_while_prefilling(pair, process)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await settled(pair.prefill, pair.decode)


async def test_prefill_server_killed_while_prefilling(pair: Pair) -> None:
    prompt = token_ids(LONG, 1003)
    with gateway(pair.folder, pair.workers) as front:
        async with asked(front, prompt) as task:
            await until(lambda: is_prefilling(pair) and is_waiting_for_cache(pair), "both legs are under way")
            assert pair.prefill.process is not None
            pair.prefill.process.kill()
            answer = await task
        check(pair, prompt, answer, "fallback:transport")
        await settled(pair.decode)
    pair.prefill.start()
    pair.prefill.wait()


@pytest.mark.parametrize("state", ["waiting for the cache", "decoding"])
async def test_decode_server_killed(pair: Pair, state: str) -> None:
    prompt = token_ids(LONG, 1004)
    assert pair.decode.process is not None
    with gateway(pair.folder, pair.workers) as front:
        if state == "decoding":
            expected = complete(pair.decode.url, prompt, tokens=400).token_ids
            await until(lambda: is_idle(pair.decode), "idle again")
            pair.decode.forget_prefixes()
        async with asked(front, prompt, 400) as task:
            if state == "decoding":
                await until(lambda: pair.decode.metric("vllm:num_requests_running") == 1, "it decodes")
            else:
                await until(lambda: is_prefilling(pair) and is_waiting_for_cache(pair), "both legs are under way")
            pair.decode.process.kill()
            with pytest.raises((AssertionError, httpx.HTTPError)) as ended:
                await task
        if state == "decoding":
            told = ended.value.args[0]
            assert told["error"]["code"] == "connection_lost", told
            partial = told["received"]
            assert partial == list(expected[: len(partial)]), "a wrong token was sent before the end"
        else:
            assert str(ended.value).startswith("502"), ended.value
        await settled(pair.prefill)
    pair.decode.start()
    pair.decode.wait()
