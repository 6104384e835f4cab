"""A worker's Prometheus metrics. Not the gateway's (`gateway_metrics`), and not how numbers come to be.

| name | labels | what |
|---|---|---|
| `farfill_build_info` | version, engine, model, role, site | always 1 |
| `farfill_worker_requests_total` | endpoint, outcome | answered requests; outcome is `ok` or an error code |
| `farfill_worker_request_seconds` | endpoint | histogram: from a request's head to the end of its response |
| `farfill_worker_first_token_seconds` | source | histogram: from a request's head to its first token |
| `farfill_worker_prompt_tokens_total` | source | prompt prefix by where its KV came from: computed, cached, imported |
| `farfill_transfers_total` | direction, outcome | transfers sent and received; outcome is `ok` or an error code |
| `farfill_transfer_bytes_total` | direction | sealed bytes of finished transfers |
| `farfill_transfer_seconds` | direction | histogram: from the start to the end (sent) or VERIFIED (received) |
| `farfill_prefill_seconds` | | histogram: a prefill leg's computing, queue left out |
| `farfill_engine_requests` | state | gauge: running, waiting |
| `farfill_engine_tokens_total` | kind | prefill, decode, imported, cached |
| `farfill_engine_ended_total` | outcome | finished, failed, aborted |
| `farfill_engine_cache_bytes` | kind | gauge: requests, prefix_cache |
| `farfill_store_bytes` | state | gauge: free, held, quarantined, total; the first three add up to the last |
| `farfill_store_leases` | | gauge: live leases |
| `farfill_worker_draining` | | gauge: 1 while the worker accepts nothing more |

Engine and store values are read when somebody scrapes; nothing is sampled in between.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from farfill.engines.api import EngineStats

Direction = Literal["sent", "received"]
OK: Final = "ok"
# From a few milliseconds (a short prompt on loopback) to minutes (a long one over a slow link).
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class LedgerReading(Protocol):
    """A store's ledger at one moment, in bytes (`farfill.store` has it)."""

    @property
    def total_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def quarantined_bytes(self) -> int: ...
    @property
    def leases(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WorkerLabels:
    """What `farfill_build_info` says."""

    version: str
    engine: str
    model: str
    role: str
    site: str


class WorkerMetrics:
    """One worker's registry. Counters are written here; the engine's and the store's values are read at each scrape."""

    def __init__(
        self,
        labels: WorkerLabels,
        *,
        engine_stats: Callable[[], EngineStats],
        ledger: Callable[[], LedgerReading] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_Readings(engine_stats, ledger))
        build = Gauge(
            "farfill_build_info",
            "always 1",
            ("version", "engine", "model", "role", "site"),
            registry=self.registry,
        )
        build.labels(labels.version, labels.engine, labels.model, labels.role, labels.site).set(1)
        self._requests = Counter(
            "farfill_worker_requests_total",
            "answered requests; outcome is ok or an error code",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self._request_s = self._histogram(
            "farfill_worker_request_seconds", "from a request's head to the end of its response", "endpoint"
        )
        self._first_token_s = self._histogram(
            "farfill_worker_first_token_seconds", "from a request's head to its first token", "source"
        )
        self._prompt_tokens = Counter(
            "farfill_worker_prompt_tokens_total",
            "prompt prefix tokens by where their KV came from",
            ("source",),
            registry=self.registry,
        )
        self._transfers = Counter(
            "farfill_transfers_total",
            "transfers; outcome is ok or an error code",
            ("direction", "outcome"),
            registry=self.registry,
        )
        self._transfer_bytes = Counter(
            "farfill_transfer_bytes_total", "sealed bytes of finished transfers", ("direction",), registry=self.registry
        )
        self._transfer_s = self._histogram(
            "farfill_transfer_seconds", "from a transfer's start to its end or VERIFIED", "direction"
        )
        self._prefill_s = self._histogram("farfill_prefill_seconds", "a prefill leg's computing, queue left out")
        self._draining = Gauge(
            "farfill_worker_draining", "1 while the worker accepts nothing more", registry=self.registry
        )

    def exposition(self) -> bytes:
        """The text format, version 0.0.4."""
        return generate_latest(self.registry)

    def request_ended(self, endpoint: str, outcome: str, seconds: float) -> None:
        self._requests.labels(endpoint, outcome).inc()
        self._request_s.labels(endpoint).observe(seconds)

    def first_token(self, source: Literal["local", "imported"], seconds: float) -> None:
        self._first_token_s.labels(source).observe(seconds)

    def prompt_ready(self, *, computed_tokens: int, cached_tokens: int, imported_tokens: int) -> None:
        """A prompt's prefix is there. `cached_tokens` are those of this engine's own prefix cache."""
        self._prompt_tokens.labels("computed").inc(computed_tokens)
        self._prompt_tokens.labels("cached").inc(cached_tokens)
        self._prompt_tokens.labels("imported").inc(imported_tokens)

    def transfer_ended(self, direction: Direction, outcome: str, *, transfer_bytes: int, seconds: float) -> None:
        self._transfers.labels(direction, outcome).inc()
        if outcome == OK:
            self._transfer_bytes.labels(direction).inc(transfer_bytes)
            self._transfer_s.labels(direction).observe(seconds)

    def prefilled(self, seconds: float) -> None:
        self._prefill_s.observe(seconds)

    def draining(self) -> None:
        self._draining.set(1)

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(name, what, labels, buckets=_SECONDS, registry=self.registry)


class _Readings(Collector):
    """The engine's and the store's values at the moment of a scrape."""

    def __init__(self, engine_stats: Callable[[], EngineStats], ledger: Callable[[], LedgerReading] | None) -> None:
        self._engine_stats = engine_stats
        self._ledger = ledger

    def collect(self) -> Iterable[Metric]:
        stats = self._engine_stats()
        yield _gauge(
            "farfill_engine_requests", "requests in the engine", "state", running=stats.running, waiting=stats.waiting
        )
        yield _counter(
            "farfill_engine_tokens",
            "tokens by what the engine did for them",
            "kind",
            prefill=stats.prefill_tokens_total,
            decode=stats.decode_tokens_total,
            imported=stats.imported_tokens_total,
            cached=stats.cached_tokens_total,
        )
        yield _counter(
            "farfill_engine_ended",
            "requests that the engine has ended",
            "outcome",
            finished=stats.finished_total,
            failed=stats.failed_total,
            aborted=stats.aborted_total,
        )
        yield _gauge(
            "farfill_engine_cache_bytes",
            "cache memory",
            "kind",
            requests=stats.cache_bytes,
            prefix_cache=stats.prefix_cache_bytes,
        )
        if self._ledger is not None:
            ledger = self._ledger()
            yield _gauge(
                "farfill_store_bytes",
                "staging memory",
                "state",
                free=ledger.free_bytes,
                held=ledger.held_bytes,
                quarantined=ledger.quarantined_bytes,
                total=ledger.total_bytes,
            )
            leases = GaugeMetricFamily("farfill_store_leases", "live leases")
            leases.add_metric((), ledger.leases)
            yield leases

    def describe(self) -> Iterable[Metric]:
        """Names are not checked against an engine that is not there yet."""
        return ()


def _gauge(name: str, what: str, label: str, **values: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _counter(name: str, what: str, label: str, **values: float) -> CounterMetricFamily:
    family = CounterMetricFamily(name, what, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family
