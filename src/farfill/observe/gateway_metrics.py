"""The gateway's Prometheus metrics. Not a worker's (`metrics`), and not how numbers come to be.

| name | labels | what |
|---|---|---|
| `farfill_gateway_build_info` | version | always 1 |
| `farfill_gateway_requests_total` | path, reason, outcome | ended requests; outcome: done, or an error's code |
| `farfill_gateway_refused_total` | code | requests that were not let in |
| `farfill_gateway_fallbacks_total` | class | remote requests, or workers, given up before the first token |
| `farfill_gateway_first_byte_seconds` | path | histogram: from a request's acceptance to its response's head |
| `farfill_gateway_request_seconds` | path | histogram: from a request's acceptance to its end |
| `farfill_gateway_prompt_tokens_total` | source | prompt tokens by where their KV came from: local, remote |
| `farfill_gateway_kv_bytes_total` | | bytes of KV that came over a link into an answer |
| `farfill_gateway_active_requests` | | gauge |
| `farfill_gateway_draining` | | gauge: 1 while nothing more is accepted |
| `farfill_gateway_worker_up` | worker, role, site | gauge: it answered the last look |
| `farfill_gateway_worker_outstanding_tokens` | worker | gauge: what it still has to do for this gateway |
| `farfill_gateway_worker_compatible` | prefill, decode | gauge: the one may read what the other writes |
| `farfill_gateway_relay_up` | | gauge: it answered the last look; only with `placement: relay` |

A path is `none` where a request ended before one was chosen. Reasons are the router's own words: a bounded set.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from farfill.router.messages import RecordOutcome
from farfill.router.policy import Path

# From a few milliseconds (a short prompt on loopback) to minutes (a long one over a slow link).
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One worker at the moment of a scrape."""

    name: str
    role: str
    site: str
    up: bool
    outstanding_tokens: int


@dataclass(frozen=True, slots=True)
class FleetReading:
    """`pairs`: (prefill worker, decode worker, compatible), for pairs of one model. `relay_up`: None without one."""

    workers: tuple[WorkerReading, ...]
    pairs: tuple[tuple[str, str, bool], ...]
    relay_up: bool | None = None


class GatewayMetrics:
    """One gateway's registry. Counters are written here; the fleet's state is read at each scrape."""

    def __init__(self, version: str, fleet: Callable[[], FleetReading], active: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_Readings(fleet))
        Gauge("farfill_gateway_build_info", "always 1", ("version",), registry=self.registry).labels(version).set(1)
        self._requests = self._counter(
            "requests_total",
            "ended requests; outcome is done or an error's code",
            "path",
            "reason",
            "outcome",
        )
        self._refused = self._counter("refused_total", "requests that were not let in", "code")
        self._fallbacks = self._counter("fallbacks_total", "attempts given up before the first token", "class")
        self._tokens = self._counter("prompt_tokens_total", "prompt tokens by where their KV came from", "source")
        self._kv_bytes = self._counter("kv_bytes_total", "bytes of KV that came over a link into an answer")
        self._first_byte_s = self._histogram("first_byte_seconds", "from acceptance to the response's head")
        self._request_s = self._histogram("request_seconds", "from acceptance to the end")
        self._draining = Gauge("farfill_gateway_draining", "1 while nothing more is accepted", registry=self.registry)
        Gauge("farfill_gateway_active_requests", "requests in flight", registry=self.registry).set_function(active)

    def exposition(self) -> bytes:
        """The text format, version 0.0.4."""
        return generate_latest(self.registry)

    def head_sent(self, path: Path, seconds: float, *, remote_tokens: int, local_tokens: int) -> None:
        self._first_byte_s.labels(path.value).observe(seconds)
        self._tokens.labels("remote").inc(remote_tokens)
        self._tokens.labels("local").inc(local_tokens)

    def ended(self, outcome: RecordOutcome, tenant: str) -> None:
        path = "none" if outcome.path is None else outcome.path.value
        self._requests.labels(path, outcome.reason, outcome.code or outcome.state).inc()
        self._request_s.labels(path).observe(outcome.duration_s)
        for failure_class in outcome.fallbacks:
            self._fallbacks.labels(failure_class.value).inc()
        if outcome.started:
            self._kv_bytes.inc(outcome.kv_bytes)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def draining(self) -> None:
        self._draining.set(1)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"farfill_gateway_{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"farfill_gateway_{name}", what, ("path",), buckets=_SECONDS, registry=self.registry)


class _Readings(Collector):
    def __init__(self, fleet: Callable[[], FleetReading]) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        reading = self._fleet()
        up = GaugeMetricFamily(
            "farfill_gateway_worker_up", "it answered the last look", labels=("worker", "role", "site")
        )
        tokens = GaugeMetricFamily(
            "farfill_gateway_worker_outstanding_tokens", "what it still has to do for this gateway", labels=("worker",)
        )
        for worker in reading.workers:
            up.add_metric((worker.name, worker.role, worker.site), float(worker.up))
            tokens.add_metric((worker.name,), worker.outstanding_tokens)
        compatible = GaugeMetricFamily(
            "farfill_gateway_worker_compatible", "the one may read what the other writes", labels=("prefill", "decode")
        )
        for prefill, decode, fits in reading.pairs:
            compatible.add_metric((prefill, decode), float(fits))
        if reading.relay_up is None:
            return (up, tokens, compatible)
        relay = GaugeMetricFamily("farfill_gateway_relay_up", "it answered the last look", value=reading.relay_up)
        return (up, tokens, compatible, relay)

    def describe(self) -> Iterable[Metric]:
        """Names are not checked against a fleet that is not there yet."""
        return ()
