"""Transfers as vLLM's own connector statistics: logged by vLLM, and on its /metrics. Not farfill's metrics.

| name | labels | what |
|---|---|---|
| `vllm:farfill_transfer_bytes` | direction | sealed bytes of transfers that ended well |
| `vllm:farfill_transfers` | direction | transfers that ended well |
| `vllm:farfill_transfer_failures` | direction | those that did not |
| `vllm:farfill_transfer_seconds` | direction | histogram: from the beginning to the end, or to VERIFIED |
"""

import threading
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_DIRECTIONS: Final = ("sent", "received")
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class FarfillStats(KVConnectorStats):
    """`data[direction]` is {"seconds": [...], "bytes": [...], "failures": [codes]}; plain, for vLLM sends it about."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        if not self.data:
            self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data = state["data"]
        self._lock = threading.Lock()

    def reset(self) -> None:
        self.data = {direction: {"seconds": [], "bytes": [], "failures": []} for direction in _DIRECTIONS}

    def record(self, direction: str, transfer_bytes: int, seconds: float) -> None:
        with self._lock:
            self.data[direction]["seconds"].append(seconds)
            self.data[direction]["bytes"].append(transfer_bytes)

    def record_failure(self, direction: str, code: str) -> None:
        with self._lock:
            self.data[direction]["failures"].append(code)

    def take(self) -> "FarfillStats":
        with self._lock:
            taken = FarfillStats(data=self.data)
            self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for direction in _DIRECTIONS:
            for key, values in other.data[direction].items():
                self.data[direction][key].extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {}
        for direction in _DIRECTIONS:
            data = self.data[direction]
            reduced[f"farfill {direction}"] = len(data["seconds"])
            reduced[f"farfill {direction} MB"] = round(sum(data["bytes"]) / 1e6, 3)
            reduced[f"farfill {direction} failures"] = len(data["failures"])
        return reduced

    def is_empty(self) -> bool:
        return not any(values for data in self.data.values() for values in data.values())


class FarfillPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics above with vLLM's labels and fills them from `FarfillStats.data`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = [*labelnames, "direction"]
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._bytes = counter("vllm:farfill_transfer_bytes", "sealed bytes of transfers that ended well", labels)
        self._transfers = counter("vllm:farfill_transfers", "transfers that ended well", labels)
        self._failures = counter("vllm:farfill_transfer_failures", "transfers that failed", labels)
        self._seconds = histogram(
            "vllm:farfill_transfer_seconds", "from the beginning to the end or VERIFIED", labels, buckets=_SECONDS
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for direction in _DIRECTIONS:
            data = transfer_stats_data[direction]
            values = [*self.per_engine_labelvalues[engine_idx], direction]
            self._bytes.labels(*values).inc(sum(data["bytes"]))
            self._transfers.labels(*values).inc(len(data["seconds"]))
            self._failures.labels(*values).inc(len(data["failures"]))
            for seconds in data["seconds"]:
                self._seconds.labels(*values).observe(seconds)
