"""Which HTTP server and client should carry the gateway: one streaming reverse proxy, written for each candidate.

Not a load test of farfill, and not imported by it: the candidates that lose do not become dependencies. Their packages
(uvloop, uvicorn, httptools, starlette, httpx, granian) must be installed by hand to repeat it; a candidate whose
packages are missing is left out of the table and named.

    python benchmarks/http_stack.py [--rounds 2]

Three processes on loopback: the load (raw asyncio streams), the proxy under test, and an upstream that answers from
prepared bytes (raw asyncio), so that the proxy is the dearest of the three. Measured for each candidate in each round:

* small: POSTs of a small JSON body, answered by a small JSON body, 32 kept-alive connections, as fast as they go;
* streams: 32 and then 256 clients, each of which opens an SSE stream (20 events, 50 ms apart), reads it to its end and
  opens the next; the added first byte is the median (and the 99th percentile) over streams from request to first event,
  less the same figure without a proxy, in the same round; CPU is the proxy's own, for each event passed.

Candidates take turns inside a round, so that noise from the machine meets all of them; ratios are taken inside a round
against the first candidate, and the table gives the median over the rounds.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

EVENTS: Final = 20
EVENT_INTERVAL_S: Final = 0.05
SMALL_CONNECTIONS: Final = 32
STREAMS: Final = (32, 256)
SMALL_S: Final = 1.0
STREAM_S: Final = 2.2  # each client's stream lasts 1 s, so that each is opened at least twice
SSE_EVENT: Final = b'data: {"id":"cmpl-0123456789","object":"text_completion","choices":[{"text":" word"}]}\n\n'
SMALL_RESPONSE: Final = json.dumps({"id": "cmpl-0123456789", "choices": [{"text": " word" * 40}]}).encode()
REQUEST: Final = json.dumps({"model": "m", "prompt": "word " * 60, "max_tokens": 20, "stream": True}).encode()


# The upstream: parses as little as it can, answers from prepared bytes.


async def upstream_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    chunk = b"%x\r\n%s\r\n" % (len(SSE_EVENT), SSE_EVENT)
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lowered = head.lower()
            if b"transfer-encoding: chunked" in lowered:
                while True:
                    size = int(await reader.readuntil(b"\r\n"), 16)
                    await reader.readexactly(size + 2)
                    if size == 0:
                        break
            else:
                start = lowered.index(b"content-length:") + 15
                await reader.readexactly(int(lowered[start : lowered.index(b"\r\n", start)]))
            if head.startswith(b"POST /stream"):
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                for _ in range(EVENTS - 1):
                    writer.write(chunk)
                    await asyncio.sleep(EVENT_INTERVAL_S)
                writer.write(chunk + b"0\r\n\r\n")
            else:
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                    % (len(SMALL_RESPONSE), SMALL_RESPONSE)
                )
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve_upstream(port: int) -> None:
    server = await asyncio.start_server(upstream_connection, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


# The candidates: the same proxy, once for each server and client.


def aiohttp_session() -> Any:
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
    )


async def serve_aiohttp(port: int, upstream: str) -> None:
    from aiohttp import web

    session = aiohttp_session()

    async def proxy(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with session.post(
            upstream + request.path, data=body, headers={"content-type": "application/json"}
        ) as answer:
            if answer.content_type != "text/event-stream":
                return web.Response(
                    body=await answer.read(), status=answer.status, headers={"content-type": "application/json"}
                )
            response = web.StreamResponse(status=answer.status, headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    app = web.Application()
    app.router.add_post("/{path}", proxy)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await asyncio.Event().wait()


def starlette_app(client: str, upstream: str) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    shared: dict[str, Any] = {}

    async def proxy_httpx(request: Request) -> Response:
        import httpx

        if "client" not in shared:
            shared["client"] = httpx.AsyncClient(
                timeout=None, limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
            )
        outgoing = shared["client"].build_request(
            "POST",
            upstream + request.url.path,
            content=await request.body(),
            headers={"content-type": "application/json"},
        )
        answer = await shared["client"].send(outgoing, stream=True)
        if answer.headers["content-type"] != "text/event-stream":
            body = await answer.aread()
            return Response(body, answer.status_code, media_type="application/json")

        async def events() -> AsyncIterator[bytes]:
            try:
                async for data in answer.aiter_raw():
                    yield data
            finally:
                await answer.aclose()

        return StreamingResponse(events(), answer.status_code, media_type="text/event-stream")

    async def proxy_aiohttp(request: Request) -> Response:
        if "client" not in shared:
            shared["client"] = aiohttp_session()
        answer = await shared["client"].post(
            upstream + request.url.path, data=await request.body(), headers={"content-type": "application/json"}
        )
        if answer.content_type != "text/event-stream":
            body = await answer.read()
            answer.release()
            return Response(body, answer.status, media_type="application/json")

        async def events() -> AsyncIterator[bytes]:
            try:
                async for data in answer.content.iter_any():
                    yield data
            finally:
                answer.release()

        return StreamingResponse(events(), answer.status, media_type="text/event-stream")

    endpoint = proxy_httpx if client == "httpx" else proxy_aiohttp
    return Starlette(routes=[Route("/{path}", endpoint, methods=["POST"])])


def serve_uvicorn(client: str, loop: str, port: int, upstream: str) -> None:
    import uvicorn

    uvicorn.run(
        starlette_app(client, upstream),
        host="127.0.0.1",
        port=port,
        loop=loop,
        http="httptools",
        log_level="error",
        access_log=False,
        backlog=1024,
    )


def granian_app() -> Any:
    """Imported by granian's worker process, which gets the upstream's address by environment."""
    return starlette_app("aiohttp", os.environ["HTTP_STACK_UPSTREAM"])


def serve_granian(port: int, upstream: str) -> None:
    from granian import Granian

    os.environ["HTTP_STACK_UPSTREAM"] = upstream
    Granian(
        "http_stack:granian_app",
        address="127.0.0.1",
        port=port,
        interface="asgi",
        factory=True,
        workers=1,
        loop="uvloop",
        log_enabled=False,
        websockets=False,
    ).serve()


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    packages: tuple[str, ...]
    serve: Callable[[int, str], None]


def run_uvloop(main: Any) -> None:
    import uvloop

    uvloop.run(main)


_UVICORN: Final = ("uvicorn", "httptools", "starlette")
CANDIDATES: Final = (
    Candidate("aiohttp + aiohttp", ("aiohttp",), lambda p, u: asyncio.run(serve_aiohttp(p, u))),
    Candidate("aiohttp + aiohttp, uvloop", ("aiohttp", "uvloop"), lambda p, u: run_uvloop(serve_aiohttp(p, u))),
    Candidate("uvicorn + aiohttp", (*_UVICORN, "aiohttp"), lambda p, u: serve_uvicorn("aiohttp", "asyncio", p, u)),
    Candidate(
        "uvicorn + aiohttp, uvloop",
        (*_UVICORN, "aiohttp", "uvloop"),
        lambda p, u: serve_uvicorn("aiohttp", "uvloop", p, u),
    ),
    Candidate("uvicorn + httpx", (*_UVICORN, "httpx"), lambda p, u: serve_uvicorn("httpx", "asyncio", p, u)),
    Candidate(
        "uvicorn + httpx, uvloop",
        (*_UVICORN, "httpx", "uvloop"),
        lambda p, u: serve_uvicorn("httpx", "uvloop", p, u),
    ),
    Candidate("granian + aiohttp, uvloop", ("granian", "starlette", "aiohttp", "uvloop"), serve_granian),
)


# The load.


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: bytes) -> tuple[float, int]:
    """One request; returns seconds to the first byte of the body, and the number of events (0: not a stream)."""
    start = time.perf_counter()
    writer.write(
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        % (path, len(REQUEST), REQUEST)
    )
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    if b"transfer-encoding: chunked" in head:
        first_s, body = 0.0, bytearray()
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
            first_s = first_s or time.perf_counter() - start
        await reader.readexactly(2)
        assert body == SSE_EVENT * EVENTS, "the proxy changed the stream"
        return first_s, EVENTS
    at = head.index(b"content-length:") + 15
    body = bytearray(await reader.readexactly(int(head[at : head.index(b"\r\n", at)])))
    assert body == SMALL_RESPONSE, "the proxy changed the body"
    return time.perf_counter() - start, 0


async def load_small(port: int, seconds: float) -> float:
    """Requests a second."""
    count = 0
    start = time.perf_counter()

    async def client() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() - start < seconds:
            await post(reader, writer, b"/small")
            count += 1
        writer.close()

    await asyncio.gather(*(client() for _ in range(SMALL_CONNECTIONS)))
    return count / (time.perf_counter() - start)


async def load_streams(port: int, streams: int, seconds: float) -> tuple[list[float], int]:
    """Seconds to the first event of each stream, and the events passed."""
    first, events = [], 0
    start = time.perf_counter()

    async def client(offset_s: float) -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(offset_s)  # spread over one stream's length: a steady state, not a burst
        while time.perf_counter() - start < seconds:
            first_s, count = await post(reader, writer, b"/stream")
            first.append(first_s)
            events += count
        writer.close()

    spread = random.Random(streams)
    await asyncio.gather(*(client(spread.random() * EVENTS * EVENT_INTERVAL_S) for _ in range(streams)))
    return first, events


# The measurement.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def child(*arguments: str, port: int) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, __file__, *arguments], env=environment, start_new_session=True)
    try:
        give_up = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, f"{arguments} ended with {process.returncode}"
            assert time.monotonic() < give_up, f"{arguments} does not listen"
            time.sleep(0.02)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children so far (granian works in a child)."""
    import psutil

    process = psutil.Process(pid)
    return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))


@dataclass(slots=True)
class Sample:
    small_per_s: float
    first_ms: dict[int, float]  # median, by streams
    first_p99_ms: dict[int, float]
    cpu_us: dict[int, float]  # for each event


def measure(port: int, pid: int | None) -> Sample:
    run = asyncio.run
    run(load_small(port, 0.3))  # warm up: imports, connection pools
    sample = Sample(run(load_small(port, SMALL_S)), {}, {}, {})
    for streams in STREAMS:
        before = cpu_s(pid) if pid else 0.0
        first, events = run(load_streams(port, streams, STREAM_S))
        spent = (cpu_s(pid) if pid else 0.0) - before
        first.sort()
        sample.first_ms[streams] = statistics.median(first) * 1e3
        sample.first_p99_ms[streams] = first[int(len(first) * 0.99)] * 1e3
        sample.cpu_us[streams] = spent / events * 1e6
    return sample


def installed(candidate: Candidate) -> bool:
    try:
        for package in candidate.packages:
            importlib.import_module(package)
    except ImportError:
        return False
    return True


def report(direct: list[Sample], samples: dict[str, list[Sample]]) -> str:
    """A Markdown table: medians over the rounds; `x` columns are ratios to the first row, taken inside a round."""
    first_name = next(iter(samples))
    lines = [
        "| server + client | small requests/s | x | "
        + " | ".join(f"added first byte, {n} streams, ms (p99) | CPU us/event | x" for n in STREAMS)
        + " |",
        "|---|--:|--:|" + "--:|--:|--:|" * len(STREAMS),
    ]
    median = statistics.median
    for name, rounds in samples.items():
        base = samples[first_name]
        cells = [
            f"{median(s.small_per_s for s in rounds):,.0f}",
            f"{median(s.small_per_s / b.small_per_s for s, b in zip(rounds, base, strict=True)):.2f}",
        ]
        for n in STREAMS:
            added = median(s.first_ms[n] - d.first_ms[n] for s, d in zip(rounds, direct, strict=True))
            p99 = median(s.first_p99_ms[n] - d.first_p99_ms[n] for s, d in zip(rounds, direct, strict=True))
            ratio = median(s.cpu_us[n] / b.cpu_us[n] for s, b in zip(rounds, base, strict=True))
            cells += [f"{added:.2f} ({p99:.1f})", f"{median(s.cpu_us[n] for s in rounds):.0f}", f"{ratio:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    bare = ", ".join(f"{median(d.first_ms[n] for d in direct):.2f} ms at {n} streams" for n in STREAMS)
    lines.append(
        f"\nWithout a proxy: {median(d.small_per_s for d in direct):,.0f} small requests/s; first byte {bare}."
    )
    return "\n".join(lines)


def versions() -> str:
    found = []
    for package in ("aiohttp", "uvloop", "starlette", "uvicorn", "httptools", "httpx", "granian"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return f"Python {platform.python_version()}, {os.cpu_count()} cores; " + ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--upstream", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve == "upstream":
        asyncio.run(serve_upstream(arguments.port))
        return
    if arguments.serve:
        next(c for c in CANDIDATES if c.name == arguments.serve).serve(arguments.port, arguments.upstream)
        return
    start = time.monotonic()
    chosen = [c for c in CANDIDATES if installed(c)]
    for candidate in CANDIDATES:
        if candidate not in chosen:
            print(f"left out, not installed: {candidate.name} ({', '.join(candidate.packages)})")
    direct: list[Sample] = []
    samples: dict[str, list[Sample]] = {c.name: [] for c in chosen}
    upstream_port = free_port()
    with child("--serve", "upstream", "--port", str(upstream_port), port=upstream_port):
        for _ in range(arguments.rounds):
            direct.append(measure(upstream_port, None))
            for candidate in chosen:
                port = free_port()
                with child(
                    *("--serve", candidate.name, "--port", str(port)),
                    *("--upstream", f"http://127.0.0.1:{upstream_port}"),
                    port=port,
                ) as pid:
                    samples[candidate.name].append(measure(port, pid))
                print(f"{time.monotonic() - start:5.0f} s  {candidate.name}", file=sys.stderr)
    print(f"{versions()}; medians of {arguments.rounds} rounds; {time.monotonic() - start:.0f} s in all\n")
    print(report(direct, samples))


if __name__ == "__main__":
    main()
