"""What the two workers counted while one request ran: the demo's evidence that bytes moved.

Not the gateway's word for it: these are the workers' own counters, read over mutual TLS before and after.
"""

import http.client
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from farfill.errors import OperationError

_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.02

Sample = tuple[str, tuple[tuple[str, str], ...]]
Samples = Mapping[Sample, float]


def read_metrics(url: str, context: ssl.SSLContext) -> Samples:
    """Every sample of `url`/metrics by name and labels.

    Raises:
        OperationError: `peer_unreachable`.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise OperationError("peer_unreachable", f"{url}/metrics answered {response.status}: {text[:200]}")
    except (OSError, http.client.HTTPException) as error:
        raise OperationError("peer_unreachable", f"{url}/metrics: {error!r}") from error
    finally:
        connection.close()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@dataclass(frozen=True, slots=True)
class Moved:
    """One request's share of the workers' counters: sealed bytes received, seconds of prefill and of transfer."""

    received_bytes: int
    prefill_s: float
    transfer_s: float


class Meter:
    """Reads both workers' counters. The demo sends one request at a time, so what they grow by is that request's."""

    def __init__(self, prefill_url: str, decode_url: str, context: ssl.SSLContext) -> None:
        self._urls = (prefill_url, decode_url)
        self._context = context
        self._before = self._read()

    def since_last(self, *, prefilled: bool) -> Moved:
        """The counters' growth since the last call.

        Args:
            prefilled: whether the prefill worker worked on the request; its leg may end just after the client's stream.
        """
        give_up_at = time.monotonic() + _TIMEOUT_S
        after = self._read()
        while (
            prefilled and self._grown(after, 0, "farfill_prefill_seconds_count") < 1 and time.monotonic() < give_up_at
        ):
            time.sleep(_POLL_S)
            after = self._read()
        moved = Moved(
            received_bytes=int(self._grown(after, 1, "farfill_transfer_bytes_total", direction="received")),
            prefill_s=self._grown(after, 0, "farfill_prefill_seconds_sum"),
            transfer_s=self._grown(after, 1, "farfill_transfer_seconds_sum", direction="received"),
        )
        self._before = after
        return moved

    def _read(self) -> tuple[Samples, Samples]:
        prefill, decode = (read_metrics(url, self._context) for url in self._urls)
        return prefill, decode

    def _grown(self, after: tuple[Samples, Samples], side: int, name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[side].get(key, 0.0) - self._before[side].get(key, 0.0)
