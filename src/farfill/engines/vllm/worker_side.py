"""The connector in vLLM's worker: its transfers, its store, its control API, and vLLM's paged cache between them.

Not here: any decision about a request (`scheduler_side`), any byte's place in memory (`kv_views`).
"""

import uuid
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from farfill.engines.api import EngineStats
from farfill.engines.serving.listen import write_ready_file
from farfill.engines.serving.settings import WorkerSettings
from farfill.engines.vllm.control import ControlServer
from farfill.engines.vllm.identity import ServedModel
from farfill.engines.vllm.kv_views import CacheViews
from farfill.engines.vllm.ledger import Ledger
from farfill.engines.vllm.ranks import own_ranks
from farfill.engines.vllm.receiving import Loads, LoadsEnded
from farfill.engines.vllm.results import Results
from farfill.engines.vllm.sending import Sends
from farfill.engines.vllm.stats import FarfillStats
from farfill.engines.vllm.step import LoadNews, StepPlan
from farfill.errors import OperationError
from farfill.kv.layout import layout_to_builtins
from farfill.kv.spec import WIRE_VERSION
from farfill.observe.metrics import WorkerLabels, WorkerMetrics
from farfill.tls import client_context
from farfill.transfer.node import TransferNode

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

VERSION: Final = version("farfill")
# In a step without a forward vLLM would ask again at once, and spend a core on asking; a load that ends wakes us.
_IDLE_WAIT_S: Final = 0.02


class WorkerSide:
    """Listens from `register` on, for only then is there a cache to serve. Called on vLLM's worker thread only."""

    def __init__(self, settings: WorkerSettings, model: ServedModel) -> None:
        self._settings = settings
        self._model = model
        self._instance = uuid.uuid4().hex
        self._control: ControlServer | None = None
        self._node: TransferNode | None = None
        self._ledger: Ledger | None = None
        self._sends: Sends | None = None
        self._loads: Loads | None = None

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], vllm_config: "VllmConfig", config: "KVCacheConfig"
    ) -> None:
        """Raises ConfigurationError: see `CacheViews` and `ControlServer`."""
        settings, model = self._settings, self._model
        layers = vllm_config.compilation_config.static_forward_context
        ranks = own_ranks()
        views = CacheViews(model.layout, config, kv_caches, layers, ranks)
        results = Results()
        labels = WorkerLabels(VERSION, "vllm", model.name, settings.role.value, settings.site)
        metrics = WorkerMetrics(labels, engine_stats=EngineStats)
        self._ledger = Ledger(results, metrics)
        if ranks.is_first:
            self._control = ControlServer(settings, results, metrics.registry, self._describe)
            tls = None if settings.tls is None else client_context(settings.tls)
            self._node = TransferNode(
                settings.name, self._control.store.local(settings.name), tls, connections_per_peer=settings.connections
            )
        self._sends = Sends(self._node, model, views, self._instance, self._ledger)
        self._loads = Loads(self._node, model, views, self._instance, self._ledger, ranks)
        if self._control is not None and settings.ready_file is not None:
            write_ready_file(
                settings.ready_file,
                {
                    "name": settings.name,
                    "url": self._control.url,
                    "data_port": self._control.store.address.data_port,
                    "instance": self._instance,
                },
            )

    def begin(self, plan: StepPlan) -> None:
        """Before the step's forward: transfers begin, and those of ended requests stop."""
        if self._sends is None or self._loads is None or self._ledger is None:
            return  # vLLM's own dummy runs, before there is a cache
        for refusal in plan.refused_sends:
            self._ledger.failed(refusal.transfer_id, "sent", OperationError(refusal.code, refusal.message))
        for transfer_id in plan.unneeded:
            self._ledger.unneeded(transfer_id)
        for request_id in plan.ended:
            self._sends.end(request_id)
            self._loads.end(request_id)
        for send in plan.sends:
            self._sends.begin(send)
        for load in plan.loads:
            self._loads.begin(load)
        for refused in plan.refused_loads:
            self._loads.refuse(refused)
        for verdict in plan.verdicts:
            self._loads.conclude(verdict)

    def save(self, plan: StepPlan) -> None:
        """After the step's forward."""
        if self._sends is not None:
            for order in plan.saves:
                self._sends.save(order)

    def collect(self, plan: StepPlan) -> LoadsEnded:
        """See `Loads.collect`."""
        if self._loads is None:
            return LoadsEnded(frozenset(), frozenset())
        return self._loads.collect(_IDLE_WAIT_S if plan.idle else 0.0)

    def take_news(self) -> LoadNews | None:
        """See `Loads.take_news`."""
        return None if self._loads is None else self._loads.take_news()

    def take_stats(self) -> FarfillStats | None:
        """Rank 0's: the others would count the same requests again."""
        return None if self._ledger is None or self._control is None else self._ledger.take_stats()

    def stop(self) -> None:
        """Idempotent."""
        if self._control is not None and self._settings.ready_file is not None:
            self._settings.ready_file.unlink(missing_ok=True)
        if self._node is not None:
            self._node.close()
        if self._control is not None:
            self._control.stop()

    def _describe(self) -> dict[str, Any]:
        settings, model = self._settings, self._model
        return {
            "name": settings.name,
            "instance": self._instance,
            "role": settings.role.value,
            "site": settings.site,
            "version": VERSION,
            "wire_version": WIRE_VERSION,
            "engine": "vllm",
            "connector": True,
            "model": model.name,
            "max_model_len": model.max_model_len,
            "fingerprint": msgspec.to_builtins(model.fingerprint),
            "layout": layout_to_builtins(model.layout),
            "draining": False,
        }
