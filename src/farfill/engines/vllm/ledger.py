"""What the transfers of this worker came to, told to all who count: results, farfill's metrics, vLLM's statistics.

Not here: a transfer's course (`sending`, `receiving`).
"""

from farfill.engines.vllm.results import Direction, Results, TransferResult, failed
from farfill.engines.vllm.stats import FarfillStats
from farfill.errors import FarfillError
from farfill.observe.metrics import OK, WorkerMetrics


class Ledger:
    """Every method may be called from any thread."""

    def __init__(self, results: Results, metrics: WorkerMetrics) -> None:
        self.results = results
        self._metrics = metrics
        self._stats = FarfillStats()

    def began(self, transfer_id: str, direction: Direction) -> None:
        self.results.put(TransferResult(transfer_id, direction, "running"))

    def done(self, result: TransferResult) -> None:
        assert result.state == "done"
        if not self.results.put(result):
            return
        self._metrics.transfer_ended(result.direction, OK, transfer_bytes=result.transfer_bytes, seconds=result.seconds)
        self._stats.record(result.direction, result.transfer_bytes, result.seconds)

    def failed(self, transfer_id: str, direction: Direction, error: FarfillError) -> None:
        """Told by whoever sees it first: the step that could not publish, or the transfer's end; counted once."""
        if not self.results.put(failed(transfer_id, direction, error)):
            return
        self._metrics.transfer_ended(direction, error.code, transfer_bytes=0, seconds=0.0)
        self._stats.record_failure(direction, error.code)

    def unneeded(self, transfer_id: str) -> None:
        """A decode leg whose whole prefix was in the local cache: nothing moves, and that is no failure."""
        self.results.put(TransferResult(transfer_id, "received", "done"))

    def computed(self, *, computed_tokens: int, cached_tokens: int) -> None:
        self._metrics.prompt_ready(computed_tokens=computed_tokens, cached_tokens=cached_tokens, imported_tokens=0)

    def imported(self, tokens: int) -> None:
        self._metrics.prompt_ready(computed_tokens=0, cached_tokens=0, imported_tokens=tokens)

    def take_stats(self) -> FarfillStats | None:
        """What has been recorded since the last call, for vLLM; None: nothing."""
        taken = self._stats.take()
        return None if taken.is_empty() else taken
