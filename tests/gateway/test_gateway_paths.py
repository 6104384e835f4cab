"""What a client sees on each path: the same answer, and headers that say where it came from."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fake_site import MODEL, Cluster, cluster, completion_text

from farfill.router.policy import Placement

LONG = "a long prompt that is well over the threshold of the gateway"
SHORT = "a short prompt"


@pytest.fixture
async def fleet() -> AsyncIterator[Cluster]:
    async with cluster() as made:
        yield made


@pytest.fixture
async def client(fleet: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as made:
        yield made


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 3, **more}


async def test_a_short_prompt_stays_local(fleet: Cluster, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=body(SHORT))
    assert answer.status_code == 200
    assert answer.headers["x-farfill-path"] == "local"
    assert answer.headers["x-farfill-reason"] == "below_threshold"
    assert "x-farfill-transfer" not in answer.headers
    assert answer.headers["x-engine"] == "fake"
    assert answer.json()["choices"][0]["text"] == completion_text(SHORT, 3)
    assert not fleet.site.leases


async def test_a_long_prompt_is_prefilled_remotely_and_says_so(fleet: Cluster, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=body(LONG), headers={"X-Request-Id": "abc-1"})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == completion_text(LONG, 3)
    headers = answer.headers
    assert (headers["x-farfill-path"], headers["x-farfill-reason"]) == ("remote", "above_threshold")
    (transfer_id,) = fleet.site.leases
    assert headers["x-farfill-transfer"] == transfer_id
    assert headers["x-farfill-kv-bytes"] == str((len(LONG) - 1) * 32)
    assert headers["x-farfill-transfer-seconds"] == "0.125"
    assert float(headers["x-farfill-prefill-seconds"]) == 0.25
    assert headers["x-request-id"] == "abc-1"
    lease = fleet.site.leases[transfer_id]
    assert lease.request.producer == "east-1"
    assert lease.request.consumer == "west-1"
    assert lease.request.bytes > (len(LONG) - 1) * 32
    await fleet.site.until(lambda: lease.released)


async def test_the_prefill_leg_gets_a_whitelist_and_both_legs_the_request_id(
    fleet: Cluster, client: httpx.AsyncClient
) -> None:
    sent = body(LONG, min_tokens=3, stop=["zzz"], logprobs=1, n=2, seed=7, temperature=0)
    await client.post("/v1/completions", json=sent, headers={"X-Request-Id": "abc-2"})
    ((_, headers, leg),) = [one for one in fleet.prefill.seen if one[0] == "/v1/completions"]
    assert set(leg) == {"model", "prompt", "max_tokens", "stream", "kv_transfer_params"}
    assert leg["prompt"] == list(LONG.encode())
    assert leg["max_tokens"] == 1
    assert headers["X-Request-Id"] == "abc-2"
    ((_, headers, leg),) = [one for one in fleet.decode.seen if one[0] == "/v1/completions"]
    assert {name: leg[name] for name in sent} == sent
    assert headers["X-Request-Id"] == "abc-2"
    assert leg["kv_transfer_params"]["do_remote_prefill"] is True


async def test_the_prompt_is_tokenised_once(fleet: Cluster, client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json=body(LONG))
    assert [one[0] for one in fleet.decode.seen] == ["tokenize", "/v1/completions"]
    await client.post("/v1/completions", json=body(list(LONG.encode()), max_tokens=2))
    assert [one[0] for one in fleet.decode.seen].count("tokenize") == 1, "token ids need no tokeniser"


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_stream_is_the_same_bytes_on_both_paths(fleet: Cluster, choices: int) -> None:
    streams = []
    for threshold in (0, 10_000):
        async with cluster(threshold=threshold) as made, httpx.AsyncClient(base_url=made.url) as client:
            answer = await client.post("/v1/completions", json=body(LONG, stream=True, n=choices))
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-farfill-path"] == ("remote" if threshold == 0 else "local")
            streams.append(answer.content)
    assert streams[0] == streams[1]
    assert streams[0].endswith(b"data: [DONE]\n\n")
    assert streams[0].count(b"data: ") == 3 * choices + 1


async def test_a_chat_goes_remote_too(fleet: Cluster, client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": LONG}]
    answer = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 2})
    assert answer.headers["x-farfill-path"] == "remote"
    assert answer.json()["choices"][0]["text"] == completion_text(f"user:{LONG}\n", 2)


@pytest.mark.parametrize("placement", [Placement.PRODUCER, Placement.CONSUMER])
async def test_the_placement_says_whose_store_is_asked(placement: Placement) -> None:
    async with cluster(placement=placement) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        await client.post("/v1/completions", json=body(LONG))
        asked = fleet.prefill if placement is Placement.PRODUCER else fleet.decode
        (leg,) = [one[2] for one in fleet.decode.seen if one[0] == "/v1/completions"]
        assert leg["kv_transfer_params"]["farfill"]["store"]["instance"] == f"store-{asked.name}"


async def test_near_is_a_prefill_worker_in_the_same_site() -> None:
    async with (
        cluster(prefill=False, more=(("west-2", "prefill", "west"),)) as fleet,
        httpx.AsyncClient(base_url=fleet.url) as client,
    ):
        answer = await client.post("/v1/completions", json=body(LONG))
        assert answer.headers["x-farfill-path"] == "near"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"echo": True}, "not_splittable:echo"),
        ({"prompt_logprobs": 0}, "not_splittable:prompt_logprobs"),
        ({"best_of": 4, "n": 2}, "not_splittable:best_of"),
        ({"use_beam_search": True}, "not_splittable:use_beam_search"),
        ({"prompt": [LONG, LONG]}, "several_prompts"),
        ({"prompt": "x"}, "prompt_too_short"),
    ],
)
async def test_what_cannot_be_split_takes_the_local_path_and_says_why(
    fleet: Cluster, client: httpx.AsyncClient, more: dict[str, object], reason: str
) -> None:
    answer = await client.post("/v1/completions", json={**body(LONG), **more})
    assert answer.status_code == 200
    assert (answer.headers["x-farfill-path"], answer.headers["x-farfill-reason"]) == ("local", reason)


async def test_without_a_prefill_worker_and_with_an_incompatible_one_the_reasons_differ() -> None:
    async with cluster(prefill=False) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        answer = await client.post("/v1/completions", json=body(LONG))
        assert answer.headers["x-farfill-reason"] == "no_prefill_worker"
    async with cluster(weights="others") as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        answer = await client.post("/v1/completions", json=body(LONG))
        assert answer.headers["x-farfill-reason"] == "incompatible:weights_digest"
        metrics = (await client.get("/metrics")).text
        assert 'farfill_gateway_worker_compatible{decode="west-1",prefill="east-1"} 0.0' in metrics


async def test_a_prefill_worker_that_is_down_is_another_reason_than_none(
    fleet: Cluster, client: httpx.AsyncClient
) -> None:
    await fleet.prefill.stop()
    await fleet.gateway.fleet.look("east-1")
    answer = await client.post("/v1/completions", json=body(LONG))
    assert answer.headers["x-farfill-reason"] == "prefill_unavailable"


async def test_a_prefix_that_the_decode_worker_has_seen_stays_local() -> None:
    async with cluster(threshold=100) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        prompt = "".join(f"{number:04d}" for number in range(64))  # 256 tokens: four blocks
        first = await client.post("/v1/completions", json=body(prompt))
        assert first.headers["x-farfill-path"] == "remote"
        again = await client.post("/v1/completions", json=body(prompt + "and a little more"))
        assert again.headers["x-farfill-reason"] == "below_threshold"
        other = await client.post("/v1/completions", json=body("x" + prompt))
        assert other.headers["x-farfill-path"] == "remote"


async def test_eight_at_once_get_their_own_answers(fleet: Cluster, client: httpx.AsyncClient) -> None:
    prompts = [f"{LONG} number {number}" for number in range(8)]
    answers = await asyncio.gather(
        *(client.post("/v1/completions", json=body(prompt, stream=bool(i % 2))) for i, prompt in enumerate(prompts))
    )
    assert len({answer.headers["x-farfill-transfer"] for answer in answers}) == 8
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if index % 2 == 0:
            assert answer.json()["choices"][0]["text"] == completion_text(prompt, 3)
        else:
            assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_leg_that_moved_nothing_is_not_called_remote(fleet: Cluster, client: httpx.AsyncClient) -> None:
    fleet.decode.says_nothing_moved = True
    answer = await client.post("/v1/completions", json=body(LONG))
    assert (answer.headers["x-farfill-path"], answer.headers["x-farfill-reason"]) == ("local", "nothing_moved")
    assert "x-farfill-transfer" not in answer.headers


async def test_models_health_version_and_metrics(fleet: Cluster, client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert listed["data"][0]["max_model_len"] == 4096
    assert (await client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert (await client.get("/v1/models/other")).status_code == 404
    assert (await client.get("/health")).json()["status"] == "ok"
    assert "version" in (await client.get("/version")).json()
    await client.post("/v1/completions", json=body(LONG))
    await client.post("/v1/completions", json=body(SHORT))
    text = (await client.get("/metrics")).text
    count = 'farfill_gateway_requests_total{outcome="done",path="%s",reason="%s"} 1.0'
    assert count % ("remote", "above_threshold") in text
    assert count % ("local", "below_threshold") in text
    assert f'farfill_gateway_prompt_tokens_total{{source="remote"}} {len(LONG) - 1}.0' in text
    assert f'farfill_gateway_prompt_tokens_total{{source="local"}} {len(SHORT) + 1}.0' in text
    assert f"farfill_gateway_kv_bytes_total {(len(LONG) - 1) * 32}.0" in text
    assert 'farfill_gateway_worker_up{role="prefill",site="east",worker="east-1"} 1.0' in text
