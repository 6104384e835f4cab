"""The connector's settings, its scheduler side and its results, each by itself: no server, no model."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from farfill.config.tree import Role
from farfill.engines.vllm.results import Results, TransferResult
from farfill.engines.vllm.scheduler_side import SchedulerSide
from farfill.engines.vllm.settings import read_settings
from farfill.engines.vllm.step import StepPlan
from farfill.errors import ConfigurationError
from farfill.kv.spec import TransferId
from farfill.transfer.spec import StoreAddress, TransferSpec, to_kv_transfer_params

pytestmark = pytest.mark.vllm

PROMPT = list(range(100, 400))
STORE = StoreAddress("store", "http://127.0.0.1:1", "127.0.0.1", 2)
SPEC = TransferSpec(TransferId("t1"), 1, STORE, "east", "west", len(PROMPT) - 1, 64, b"k" * 32)


def request(leg: str, prompt: Sequence[int], params: Any = None, **changes: Any) -> Any:
    # As it comes: through JSON.
    sent = msgspec.json.decode(msgspec.json.encode(to_kv_transfer_params(SPEC, leg=leg)))
    fields = {
        "request_id": f"r-{leg}",
        "prompt_token_ids": list(prompt),
        "num_prompt_tokens": len(prompt),
        "kv_transfer_params": sent if params is None else params,
        "lora_request": None,
        "has_encoder_inputs": False,
    }
    return SimpleNamespace(**(fields | changes))


class Engine:
    """What vLLM's scheduler tells of steps: tokens of each request before it and in it, and block tables."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self._tables: dict[str, tuple[list[int], ...]] = {}

    def step(
        self, new: dict[str, tuple[int, int]] | None = None, old: dict[str, tuple[int, int]] | None = None
    ) -> StepPlan:
        new, old = new or {}, old or {}
        counts = {name: count for name, (_, count) in (new | old).items()}
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=at) for name, (at, _) in new.items()],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(old), num_computed_tokens=[at for at, _ in old.values()]
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
        )
        cache: Any = SimpleNamespace(get_block_ids=lambda name: ([7, 8, 9],))
        return self._side.plan(output, cache)


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def test_a_prefill_leg_is_saved_step_by_step_and_told_of_once() -> None:
    side = SchedulerSide(Role.PREFILL)
    engine, leg = Engine(side), request("prefill", PROMPT[:-1])
    side.on_new_request(leg)
    assert side.matched_tokens(leg, 0) == (0, False)
    first = engine.step(new={"r-prefill": (128, 100)})
    assert [(send.spec, send.cached_tokens, send.token_ids) for send in first.sends] == [
        (SPEC, 128, tuple(PROMPT[:-1]))
    ]
    assert [(save.computed_tokens, save.blocks) for save in first.saves] == [(228, ((7, 8, 9),))]
    second = engine.step(old={"r-prefill": (228, 71)})
    assert (second.sends, [save.computed_tokens for save in second.saves]) == ((), [299])
    # It has all been planned, so its end cancels nothing.
    told = side.finished(leg)
    assert told is not None
    assert told["farfill"] == {"transfer_id": "t1", "epoch": 1, "prefix_tokens": 299}
    assert engine.step() == StepPlan(idle=True)


def test_a_prefill_leg_that_ends_early_is_cancelled() -> None:
    side = SchedulerSide(Role.PREFILL)
    engine, leg = Engine(side), request("prefill", PROMPT[:-1])
    side.on_new_request(leg)
    engine.step(new={"r-prefill": (0, 100)})
    side.finished(leg)
    assert engine.step().ended == ("r-prefill",)


def test_a_preempted_prefill_leg_goes_on_without_a_second_transfer() -> None:
    side = SchedulerSide(Role.PREFILL)
    engine, leg = Engine(side), request("prefill", PROMPT[:-1])
    side.on_new_request(leg)
    engine.step(new={"r-prefill": (0, 100)})
    again = engine.step(old={"r-prefill": (0, 299)})
    assert (again.sends, [save.computed_tokens for save in again.saves]) == ((), [299])


def test_a_decode_leg_loads_what_the_local_cache_lacks_and_once() -> None:
    side = SchedulerSide(Role.DECODE)
    engine, leg = Engine(side), request("decode", PROMPT)
    side.on_new_request(leg)
    assert side.matched_tokens(leg, 128) == (299 - 128, True)
    side.allocated(leg, blocks(4, 5, 6), 299 - 128)
    (load,) = engine.step().loads
    assert (load.spec, load.local_tokens, load.blocks, load.token_ids) == (SPEC, 128, ((4, 5, 6),), tuple(PROMPT[:-1]))
    # After the load vLLM allocates once more, and after a preemption it asks again: it computes that itself.
    side.allocated(leg, blocks(4, 5, 6, 7), 0)
    assert side.matched_tokens(leg, 0) == (0, False)
    assert engine.step() == StepPlan(idle=True)
    side.finished(leg)
    assert engine.step().ended == ("r-decode",)


def test_a_decode_leg_whose_prefix_is_there_moves_nothing() -> None:
    side = SchedulerSide(Role.DECODE)
    engine, leg = Engine(side), request("decode", PROMPT)
    side.on_new_request(leg)
    assert side.matched_tokens(leg, 299) == (0, False)
    side.allocated(leg, blocks(4), 0)
    plan = engine.step()
    assert (plan.loads, plan.unneeded) == ((), ("t1",))


@pytest.mark.parametrize(
    ("role", "leg", "changes", "code"),
    [
        (Role.DECODE, "decode", {"num_prompt_tokens": 299}, "prompt_mismatch"),
        (Role.DECODE, "decode", {"lora_request": object()}, "unsupported_parameter"),
        (Role.DECODE, "decode", {"prompt_token_ids": None}, "invalid_request"),
        (Role.DECODE, "decode", {"kv_transfer_params": {"do_remote_prefill": True}}, "invalid_request"),
        (Role.PREFILL, "decode", {}, "forbidden"),
        (Role.DECODE, "prefill", {}, "forbidden"),
        (Role.PREFILL, "prefill", {}, "prompt_mismatch"),  # the whole prompt instead of its prefix
    ],
)
def test_what_cannot_be_transferred_fails_and_is_not_computed_quietly(
    role: Role, leg: str, changes: dict[str, Any], code: str
) -> None:
    side = SchedulerSide(role)
    engine, asked = Engine(side), request(leg, PROMPT, **changes)
    side.on_new_request(asked)
    if leg == "decode":
        assert side.matched_tokens(asked, 0) == (asked.num_prompt_tokens - 1, True)
        side.allocated(asked, blocks(4), 299)
        (refused,) = engine.step().refused_loads
        assert (refused.request_id, refused.refusal.code) == ("r-decode", code)
    else:
        (refusal,) = engine.step(new={"r-prefill": (0, 300)}).refused_sends
        assert (refusal.transfer_id, refusal.code) == ("t1", code)


def test_other_requests_are_none_of_our_business() -> None:
    side = SchedulerSide(Role.BOTH)
    engine, other = Engine(side), request("decode", PROMPT, params={"do_remote_prefill": False})
    side.on_new_request(other)
    assert side.matched_tokens(other, 0) == (0, False)
    side.allocated(other, blocks(4), 0)
    assert engine.step(new={"r-decode": (0, 300)}) == StepPlan()
    assert side.finished(other) is None


@pytest.mark.parametrize(
    ("kv_role", "extra", "code", "message"),
    [
        ("kv_producer", {"data_prot": 1}, "config_unknown_field", "did you mean data_port"),
        ("kv_producer", {"port": 70_000}, "config_invalid", "port"),
        ("kv_boss", {}, "config_invalid", "kv_producer, kv_consumer, kv_both"),
        ("kv_both", {"host": "10.0.0.1"}, "insecure_listener", "tls"),
        ("kv_both", {"tls": {"ca": "a"}}, "config_invalid", "certificate"),
    ],
)
def test_settings_that_are_wrong_name_the_field(kv_role: str, extra: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        read_settings(kv_role, extra)
    assert refused.value.code == code


async def test_a_result_is_waited_for_and_the_first_end_stays() -> None:
    results = Results()
    results.serve_on(asyncio.get_running_loop())
    assert await results.ended("t1", "received", 0.0) is None
    waiting = asyncio.create_task(results.ended("t1", "received", 60.0))
    results.put(TransferResult("t1", "received", "running"))
    await asyncio.to_thread(results.put, TransferResult("t1", "received", "failed", code="chunk_corrupt"))
    results.put(TransferResult("t1", "received", "done"))
    ended = await waiting
    assert ended is not None
    assert (ended.state, ended.code) == ("failed", "chunk_corrupt")
    assert results.get("t1", "sent") is None
