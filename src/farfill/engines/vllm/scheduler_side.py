"""The connector in vLLM's scheduler: which request is a leg of a transfer, what of it is computed, into which blocks.

Not here: any byte and any connection (`worker_side`), nor whether a transfer is any good. Each step it hands what it
has learnt to the worker side as one `StepPlan`; it learns nothing back, for vLLM itself is told when a load has ended.

Rules: a prefill leg's prompt is exactly the prefix (the gateway leaves the last token away), so that recurrent state
after it is the state that travels. A decode leg loads once: after a preemption vLLM computes what it lost.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farfill.config.tree import Role
from farfill.engines.vllm.step import (
    BeginLoad,
    BeginSend,
    BlockTable,
    LoadNews,
    LoadVerdict,
    Refusal,
    RefuseLoad,
    SaveRows,
    StepPlan,
)
from farfill.errors import ClientError, FarfillError, PeerError
from farfill.transfer.spec import TransferSpec, from_kv_transfer_params

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Send:
    """A prefill leg. `complete`: the step that computes its last token has been planned."""

    spec: TransferSpec
    token_ids: tuple[int, ...]
    begun: bool = False
    complete: bool = False


@dataclass(slots=True)
class _Load:
    """A decode leg; `spec` is None where `refusal` says why there is no transfer."""

    spec: TransferSpec | None
    refusal: Refusal | None = None


@dataclass(slots=True)
class _News:
    """What the next step's plan will say beside saves."""

    loads: list[BeginLoad]
    refused_loads: list[RefuseLoad]
    refused_sends: list[Refusal]
    unneeded: list[str]
    ended: list[str]
    verdicts: list[LoadVerdict]


def _no_news() -> _News:
    return _News([], [], [], [], [], [])


class SchedulerSide:
    """Called on vLLM's scheduler thread only."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._sends: dict[str, _Send] = {}
        self._waiting: dict[str, _Load] = {}  # decode legs whose blocks are not allocated yet
        self._loading: set[str] = set()  # decode legs whose load the worker side has been told of, or will be
        self._news = _no_news()

    def on_new_request(self, request: "Request") -> None:
        """Reads what its `kv_transfer_params` ask for. Never raises: what is wrong becomes the transfer's result."""
        params = request.kv_transfer_params
        try:
            parsed = from_kv_transfer_params(params)
            if parsed is None:
                return
            leg, spec = parsed
            self._check(request, leg, spec)
        except FarfillError as error:
            self._refuse(request, params, error)
            return
        if leg == "prefill":
            assert request.prompt_token_ids is not None, "checked"
            self._sends[request.request_id] = _Send(spec, tuple(request.prompt_token_ids))
        else:
            self._waiting[request.request_id] = _Load(spec)

    def matched_tokens(self, request: "Request", computed_tokens: int) -> tuple[int, bool]:
        """(tokens that a load will bring beyond the local prefix cache's, whether it is asynchronous)."""
        load = self._waiting.get(request.request_id)
        if load is None:
            return 0, False
        prefix_tokens = request.num_prompt_tokens - 1
        if prefix_tokens <= computed_tokens:
            return 0, False
        return prefix_tokens - computed_tokens, True

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """vLLM has allocated blocks; for `external_tokens` of them the load is ours."""
        load = self._waiting.pop(request.request_id, None)
        if load is None:
            return
        if external_tokens == 0:
            if load.spec is not None:
                self._news.unneeded.append(load.spec.transfer_id)
            return
        self._loading.add(request.request_id)
        if load.spec is None:
            assert load.refusal is not None
            self._news.refused_loads.append(RefuseLoad(request.request_id, load.refusal))
            return
        prompt = request.prompt_token_ids
        assert prompt is not None, "checked when it came"
        self._news.loads.append(
            BeginLoad(
                request.request_id,
                load.spec,
                tuple(prompt[:-1]),
                len(prompt) - 1 - external_tokens,
                _table(blocks.get_block_ids()),
            )
        )

    def plan(self, output: "SchedulerOutput", kv_cache_manager: "KVCacheManager") -> StepPlan:
        """The step's plan. Forgets what it has told."""
        sends: list[BeginSend] = []
        saves: list[SaveRows] = []
        if self._sends:
            for request_id, before in _computed_before(output).items():
                send = self._sends.get(request_id)
                if send is None or send.complete:
                    continue
                if not send.begun:
                    send.begun = True
                    sends.append(BeginSend(request_id, send.spec, send.token_ids, before))
                computed = before + output.num_scheduled_tokens[request_id]
                send.complete = computed >= send.spec.prefix_tokens
                saves.append(SaveRows(request_id, computed, _table(kv_cache_manager.get_block_ids(request_id))))
        news, self._news = self._news, _no_news()
        return StepPlan(
            sends=tuple(sends),
            saves=tuple(saves),
            loads=tuple(news.loads),
            refused_loads=tuple(news.refused_loads),
            refused_sends=tuple(news.refused_sends),
            unneeded=tuple(news.unneeded),
            ended=tuple(news.ended),
            verdicts=tuple(news.verdicts),
            idle=output.total_num_scheduled_tokens == 0,
        )

    def heard(self, news: LoadNews) -> None:
        """Rank 0's verdicts, for all ranks to carry out in the next step."""
        self._news.verdicts.extend(news.verdicts)

    def finished(self, request: "Request") -> dict[str, Any] | None:
        """vLLM is done with a request, whatever the reason. Returns what its response says of a prefill leg.

        Blocks need not be kept for us: their bytes are copied out within the step that computed them.
        """
        request_id = request.request_id
        self._waiting.pop(request_id, None)
        if request_id in self._loading:
            self._loading.discard(request_id)
            self._news.ended.append(request_id)
        send = self._sends.pop(request_id, None)
        if send is None:
            return None
        if not send.complete:
            self._news.ended.append(request_id)
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "farfill": {
                "transfer_id": send.spec.transfer_id,
                "epoch": send.spec.epoch,
                "prefix_tokens": send.spec.prefix_tokens,
            },
        }

    def _check(self, request: "Request", leg: str, spec: TransferSpec) -> None:
        refused = {"prefill": Role.DECODE, "decode": Role.PREFILL}[leg]
        if self._role is refused:
            raise ClientError("forbidden", f"this vLLM has the role {refused.value} and runs no {leg} leg")
        if request.prompt_token_ids is None:
            raise ClientError("invalid_request", "a transfer needs token ids, not prompt embeddings", field="prompt")
        if request.lora_request is not None:
            raise ClientError("unsupported_parameter", "a request with an adapter cannot be split", field="model")
        if request.has_encoder_inputs:
            raise ClientError("unsupported_parameter", "a request with images or audio cannot be split", field="prompt")
        expected = spec.prefix_tokens if leg == "prefill" else spec.prefix_tokens + 1
        if request.num_prompt_tokens != expected:
            raise PeerError(
                "prompt_mismatch",
                f"the {leg} leg's prompt has {request.num_prompt_tokens} tokens here; the transfer is of "
                f"{spec.prefix_tokens}, so it must have {expected}",
                field="kv_transfer_params.farfill.prefix_tokens",
            )

    def _refuse(self, request: "Request", params: Any, error: FarfillError) -> None:
        named = params.get("farfill") if isinstance(params, dict) else None
        transfer_id = named.get("transfer_id", "") if isinstance(named, dict) else ""
        refusal = Refusal(str(transfer_id)[:64], error.code, error.message)
        if isinstance(params, dict) and params.get("do_remote_prefill"):
            # It must not quietly compute what it was told to fetch.
            self._waiting[request.request_id] = _Load(None, refusal)
        else:
            self._news.refused_sends.append(refusal)


def _computed_before(output: "SchedulerOutput") -> dict[str, int]:
    """Tokens that each scheduled request had computed before this step."""
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return before


def _table(block_ids: tuple[list[int], ...]) -> BlockTable:
    return tuple(tuple(group) for group in block_ids)
