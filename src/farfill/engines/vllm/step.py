"""What the connector's scheduler side tells its worker side in each engine step. Plain data; vLLM pickles it.

A block table is, for each of vLLM's KV cache groups, the request's block ids in token order at this step.
"""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from farfill.transfer.spec import TransferSpec

BlockTable = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request's transfer that cannot be: why, in an error's code and message."""

    transfer_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class BeginSend:
    """A prefill leg has been scheduled for the first time.

    `cached_tokens` of its prompt were found in vLLM's own prefix cache.
    """

    request_id: str
    spec: TransferSpec
    token_ids: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SaveRows:
    """After this step's forward the cache of the first `computed_tokens` tokens is in these blocks."""

    request_id: str
    computed_tokens: int
    blocks: BlockTable


@dataclass(frozen=True, slots=True)
class BeginLoad:
    """Blocks stand ready for a decode leg's cache; its first `local_tokens` tokens are there already."""

    request_id: str
    spec: TransferSpec
    token_ids: tuple[int, ...]
    local_tokens: int
    blocks: BlockTable


@dataclass(frozen=True, slots=True)
class RefuseLoad:
    """A decode leg that waits for a load which cannot be: vLLM must be told that it failed."""

    request_id: str
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """Rank 0's word on a load: VERIFIED, so that all ranks install it in the same step, or not to be."""

    request_id: str
    is_verified: bool


@dataclass(frozen=True)
class LoadNews(KVConnectorWorkerMetadata):
    """What rank 0 tells the scheduler side, where there are several ranks."""

    verdicts: tuple[LoadVerdict, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LoadNews":
        assert isinstance(other, LoadNews)
        return LoadNews(self.verdicts + other.verdicts)


@dataclass(frozen=True)
class StepPlan(KVConnectorMetadata):
    """One step.

    Attributes:
        verdicts: loads that all ranks conclude in this step; only where there are several ranks.
        unneeded: decode legs whose prefix was in the local cache: transfer ids for which nothing will move.
        ended: requests that vLLM has finished or aborted; what is under way for them is cancelled.
        idle: no forward runs in this step, so nobody is kept waiting by a short wait in it.
    """

    sends: tuple[BeginSend, ...] = ()
    saves: tuple[SaveRows, ...] = ()
    loads: tuple[BeginLoad, ...] = ()
    refused_loads: tuple[RefuseLoad, ...] = ()
    refused_sends: tuple[Refusal, ...] = ()
    unneeded: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    verdicts: tuple[LoadVerdict, ...] = ()
    idle: bool = False
