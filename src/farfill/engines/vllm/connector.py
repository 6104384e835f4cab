"""What vLLM loads: `FarfillConnector`, which hands each of vLLM's hooks to the side whose business it is.

Not here: anything that a hook does (`scheduler_side`, `worker_side`). vLLM makes one instance in its scheduler and one
in each worker; an instance has one of the two sides.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from farfill.engines.vllm.identity import check_vllm, served_model
from farfill.engines.vllm.scheduler_side import SchedulerSide
from farfill.engines.vllm.settings import read_settings
from farfill.engines.vllm.stats import FarfillPromMetrics, FarfillStats
from farfill.engines.vllm.step import LoadNews, StepPlan
from farfill.engines.vllm.versions import require_supported, vllm_version
from farfill.engines.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class FarfillConnector(KVConnectorBase_V1, SupportsHMA):
    """Raises ConfigurationError from its constructor, which ends vLLM's start with the reason."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        found = vllm_version()
        require_supported(found)
        super().__init__(vllm_config, role, kv_cache_config)
        check_vllm(vllm_config)
        transfer = self._kv_transfer_config
        settings = read_settings(transfer.kv_role, transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(settings.role)
        else:
            self._worker = WorkerSide(settings, served_model(vllm_config, kv_cache_config, found))

    # --- in the scheduler ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        self._in_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._in_scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """None, for vLLM does not zero the blocks of those named here, and trusts them to be written as a whole.

        A load writes the prompt's rows. What is left of its last block may be another layer's old state, of another
        dtype, which as keys and values may read as not-a-number; kernels multiply that by zero, which does not help.
        """
        return ()

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._in_scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self._kv_cache_manager is not None, "vLLM binds it before the first step"
        return self._in_scheduler.plan(scheduler_output, self._kv_cache_manager)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, LoadNews):
            self._in_scheduler.heard(news)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._in_scheduler.finished(request)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._in_scheduler.finished(request)

    # --- in a worker --------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._in_worker.register(kv_caches, self._vllm_config, self._kv_cache_config)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Transfers begin here, not in `start_load_kv`, which vLLM may call only after the step's forward."""
        super().bind_connector_metadata(connector_metadata)
        self._in_worker.begin(self._plan)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing to do: see `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled only once all of its load is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing to do: a step's layers are read together in `wait_for_save`.

        vLLM skips this hook in captured graphs and for recurrent layers; a step is short beside a transfer.
        """

    def wait_for_save(self) -> None:
        self._in_worker.save(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loads = self._in_worker.collect(self._plan)
        return KVConnectorTransferResults(finished_recving=set(loads.ended), failed_recving=set(loads.failed))

    def build_connector_worker_meta(self) -> LoadNews | None:
        return self._in_worker.take_news()

    def get_kv_connector_stats(self) -> FarfillStats | None:
        return None if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    # --- where vLLM reports -------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FarfillStats:
        return FarfillStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FarfillPromMetrics:
        return FarfillPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is published has been copied, and a preempted request publishes the rest when it runs again."""
        return False

    @property
    def _in_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler's hook was called in a worker"
        return self._scheduler

    @property
    def _in_worker(self) -> WorkerSide:
        assert self._worker is not None, "a worker's hook was called in the scheduler"
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan
