"""Rules: each request ends with one terminal event and leaves nothing behind; no request's failure touches another."""

import dataclasses
import threading

import pytest
from hf_kit import GREEDY, MemoryTransfer, Recorder, prompt_of, run, transfer
from tiny_models import CHUNK_TOKENS, MAX_MODEL_LEN

from farfill.engines.api import (
    ChoiceFinished,
    Engine,
    GenerationRequest,
    PrefillCompleted,
    PrefillRequest,
    RequestAborted,
    RequestFinished,
    RequestStarted,
    SamplingParams,
    TokensGenerated,
)
from farfill.engines.hf.engine import HfEngine
from farfill.errors import ClientError, FarfillError, OperationError, OverloadError, PeerError

pytestmark = pytest.mark.torch
PROMPT = prompt_of(21)


@pytest.fixture
def engine(open_tiny) -> HfEngine:
    return open_tiny("llama")


def of_kind(kind):
    return lambda event: isinstance(event, kind)


def test_order_of_events_and_usage(engine):
    protocol: Engine = engine
    assert protocol.info.engine == "hf"
    recorder = run(engine, PROMPT)
    kinds = [type(event) for event in recorder.events]
    assert kinds == [RequestStarted, PrefillCompleted, *[TokensGenerated] * 12, ChoiceFinished, RequestFinished]
    usage = recorder.events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (21, 12, 0)
    assert recorder.end().finish_reason == "length"
    assert recorder.text() == engine.tokenizer.decode(recorder.tokens())


def test_stop_string_wherever_it_lies(engine):
    whole = run(engine, PROMPT).text()
    for start in range(len(whole) - 3):
        stop = whole[start : start + 3]
        recorder = run(engine, PROMPT, dataclasses.replace(GREEDY, stop=("not there at all", stop)))
        assert recorder.text() == whole[: whole.find(stop)]
        assert (recorder.end().finish_reason, recorder.end().stop_reason) == ("stop", stop)
        assert run(engine, PROMPT, dataclasses.replace(GREEDY, stop=(stop,), include_stop=True)).text().endswith(stop)


def test_text_held_back_for_a_stop_string_is_given_at_the_end(engine):
    whole = run(engine, PROMPT).text()
    recorder = run(engine, PROMPT, dataclasses.replace(GREEDY, stop=(whole[-2:] + "never",)))
    assert recorder.text() == whole
    assert recorder.end().text.endswith(whole[-2:])


def test_stop_token_ids_and_end_of_sequence(engine):
    tokens = run(engine, PROMPT).tokens()
    at = next(i for i in range(2, 12) if tokens[i] not in tokens[:i])
    recorder = run(engine, PROMPT, dataclasses.replace(GREEDY, stop_token_ids=(tokens[at],)))
    assert recorder.tokens() == tokens[: at + 1]
    assert (recorder.end().finish_reason, recorder.end().stop_reason) == ("stop", tokens[at])
    # A large bias makes the model end its text at once.
    (eos,) = engine.info.eos_token_ids
    ending = dataclasses.replace(GREEDY, logit_bias={eos: 100.0})
    recorder = run(engine, PROMPT, ending)
    assert recorder.tokens() == [eos]
    assert (recorder.text(), recorder.end().finish_reason, recorder.end().stop_reason) == ("", "stop", None)
    assert run(engine, PROMPT, dataclasses.replace(ending, ignore_eos=True)).tokens() == [eos] * 12
    recorder = run(engine, PROMPT, dataclasses.replace(ending, min_tokens=4))
    assert len(recorder.tokens()) == 5
    assert recorder.tokens().index(eos) == 4


def test_min_tokens_holds_for_stop_strings(engine):
    whole = run(engine, PROMPT)
    stop = whole.text()[0]
    recorder = run(engine, PROMPT, dataclasses.replace(GREEDY, stop=(stop,), min_tokens=12))
    assert len(recorder.tokens()) == 12
    assert len(run(engine, PROMPT, dataclasses.replace(GREEDY, stop=(stop,))).tokens()) < 12


def test_choices_seeds_and_their_absence(engine):
    sampling = SamplingParams(max_tokens=8, temperature=1.5, seed=11, n=4)
    first, second = run(engine, PROMPT, sampling), run(engine, PROMPT, sampling)
    texts = [first.text(i) for i in range(4)]
    assert texts == [second.text(i) for i in range(4)]
    assert len(set(texts)) == 4
    assert first.events[-1].usage.completion_tokens == sum(len(first.tokens(i)) for i in range(4))
    unseeded = dataclasses.replace(sampling, seed=None)
    assert run(engine, PROMPT, unseeded).tokens() != run(engine, PROMPT, unseeded).tokens()


def test_logprobs(engine):
    recorder = run(engine, PROMPT, dataclasses.replace(GREEDY, logprobs=3))
    entries = recorder.logprobs()
    assert [entry.token_id for entry in entries] == recorder.tokens()
    for entry in entries:
        assert entry.top[0] == (entry.token_id, entry.logprob)  # greedy: the chosen one is the most likely
        assert len(entry.top) == 3
        assert sorted(entry.top, key=lambda pair: -pair[1]) == list(entry.top)
    assert run(engine, PROMPT).logprobs() == []


def test_generation_ends_at_the_models_maximum_length(engine):
    prompt = prompt_of(MAX_MODEL_LEN - 5)
    recorder = run(engine, prompt, SamplingParams(temperature=0.0, ignore_eos=True))
    assert (len(recorder.tokens()), recorder.end().finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"),
    [
        ([], 1, "empty_prompt"),
        (prompt_of(MAX_MODEL_LEN), None, "context_length_exceeded"),
        (prompt_of(MAX_MODEL_LEN - 5), 6, "context_length_exceeded"),
        ([1, 384], 1, "invalid_request"),
        ([1, -1], 1, "invalid_request"),
    ],
)
def test_prompts_that_are_refused(engine, prompt, max_tokens, code):
    with pytest.raises(ClientError) as caught:
        engine.generate(GenerationRequest("r", prompt, SamplingParams(max_tokens=max_tokens)), Recorder())
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("prompt", "chunk_tokens", "code"),
    [
        ([], 8, "empty_prompt"),
        ([5], 8, "invalid_request"),
        ([5] * (MAX_MODEL_LEN + 1), 8, "context_length_exceeded"),
        ([5] * 3, 0, "config_invalid"),
    ],
)
def test_prefills_that_are_refused(engine, prompt, chunk_tokens, code):
    with pytest.raises(FarfillError) as caught:
        engine.prefill(PrefillRequest("r", prompt, chunk_tokens, MemoryTransfer()), Recorder())
    assert caught.value.code == code


def test_the_queue_is_bounded_and_an_id_is_taken_once(open_tiny):
    engine = open_tiny("llama", running_max=1, waiting_max=1)
    first, second = Recorder(hold_at=of_kind(RequestStarted)), Recorder()
    engine.generate(GenerationRequest("first", PROMPT, GREEDY), first)
    assert first.held.wait(60)
    with pytest.raises(ClientError):
        engine.generate(GenerationRequest("first", PROMPT, GREEDY), Recorder())
    engine.generate(GenerationRequest("second", PROMPT, GREEDY), second)
    with pytest.raises(OverloadError) as caught:
        engine.generate(GenerationRequest("third", PROMPT, GREEDY), Recorder())
    assert caught.value.code == "queue_full"
    assert caught.value.retry_after_s
    assert (engine.stats().running, engine.stats().waiting) == (1, 1)
    first.go.set()
    assert first.finished().tokens() == second.finished().tokens()
    run(engine, PROMPT)  # there is room again


# --------------------------------------------------------------------------------------------------------------- abort


class HoldingTransfer(MemoryTransfer):
    """Stands still at one publish, or at one payload, until told to go on."""

    def __init__(self, hold_at: int) -> None:
        super().__init__()
        self.hold_at, self.held, self.go = hold_at, threading.Event(), threading.Event()

    def publish(self, spec, payload):
        super().publish(spec, payload)
        self._stand(spec.index)

    def payload(self, index):
        self._stand(index)
        return super().payload(index)

    def _stand(self, index):
        if index == self.hold_at and not self.held.is_set():
            self.held.set()
            assert self.go.wait(60)


def assert_nothing_left(engine):
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cache_bytes) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["llama", "granite_hybrid"])
def test_abort_while_waiting(kind, open_tiny):
    engine = open_tiny(kind, running_max=1)
    sent = transfer(engine, PROMPT, CHUNK_TOKENS)
    first, second = Recorder(hold_at=of_kind(RequestStarted)), Recorder()
    engine.generate(GenerationRequest("first", PROMPT, GREEDY), first)
    engine.generate(GenerationRequest("second", PROMPT, GREEDY, imported=sent), second)
    assert first.held.wait(60)
    engine.abort("second")
    first.go.set()
    assert second.wait().events == [RequestAborted()]
    assert sent.releases == 1
    assert first.finished().tokens()
    assert_nothing_left(engine)


@pytest.mark.parametrize("kind", ["llama", "granite_hybrid"])
def test_abort_while_prefilling(kind, open_tiny):
    engine = open_tiny(kind)
    sink, recorder = HoldingTransfer(hold_at=2), Recorder()
    engine.prefill(PrefillRequest("p", prompt_of(61), CHUNK_TOKENS, sink), recorder)
    assert sink.held.wait(60)
    engine.abort("p")
    sink.go.set()
    assert recorder.wait().events == [RequestStarted(), RequestAborted()]
    assert sink.cached_tokens == -1  # never finished
    assert max(sink.payloads) < len(transfer(engine, prompt_of(61), CHUNK_TOKENS).specs)
    assert_nothing_left(engine)


@pytest.mark.parametrize("hold_at", [PrefillCompleted, TokensGenerated])
@pytest.mark.parametrize("n", [1, 3])
def test_abort_while_generating(hold_at, n, open_tiny):
    engine = open_tiny("qwen3_next")
    recorder = Recorder(hold_at=of_kind(hold_at))
    sampling = SamplingParams(max_tokens=100, temperature=1.0, n=n, ignore_eos=True)
    engine.generate(GenerationRequest("g", PROMPT, sampling), recorder)
    assert recorder.held.wait(60)
    engine.abort("g")
    recorder.go.set()
    assert recorder.wait().events[-1] == RequestAborted()
    assert not recorder.of(ChoiceFinished)
    assert_nothing_left(engine)


def test_abort_while_importing(open_tiny, monkeypatch):
    monkeypatch.setattr("farfill.engines.hf.work.IMPORT_SLICE_BYTES", 1)  # a turn for others after each chunk
    engine = open_tiny("gemma3")
    sent, holding = transfer(engine, PROMPT, CHUNK_TOKENS), HoldingTransfer(hold_at=3)
    holding.specs, holding.payloads, holding.prefix_tokens = sent.specs, sent.payloads, sent.prefix_tokens
    recorder = Recorder()
    engine.generate(GenerationRequest("g", PROMPT, GREEDY, imported=holding), recorder)
    assert holding.held.wait(60)
    assert engine.stats().cache_bytes > 0
    engine.abort("g")
    holding.go.set()
    assert recorder.wait().events == [RequestStarted(), RequestAborted()]
    assert holding.releases == 1
    assert_nothing_left(engine)


def test_abort_of_nothing(engine):
    engine.abort("unknown")
    run(engine, PROMPT)
    engine.abort("generate")
    assert engine.stats().aborted_total == 0


def test_the_callback_may_abort(engine):
    recorder = Recorder(hold_at=lambda event: isinstance(event, TokensGenerated) and engine.abort("g") is not None)
    engine.generate(GenerationRequest("g", PROMPT, SamplingParams(max_tokens=200, ignore_eos=True)), recorder)
    assert recorder.wait().events[-1] == RequestAborted()
    assert len(recorder.tokens()) < 5


# ------------------------------------------------------------------------------------------------------------- failures


class RefusingTransfer(MemoryTransfer):
    def __init__(self, error: Exception, at_finish: bool = False) -> None:
        super().__init__()
        self.error, self.at_finish = error, at_finish

    def publish(self, spec, payload):
        super().publish(spec, payload)
        if len(self.payloads) == 2 and not self.at_finish:
            raise self.error

    def finish(self, cached_tokens):
        raise self.error


@pytest.mark.parametrize("at_finish", [False, True])
@pytest.mark.parametrize(
    ("error", "code"), [(OperationError("store_full", "no room"), "store_full"), (KeyError("x"), "internal_error")]
)
def test_a_sink_that_raises_fails_its_prefill_only(engine, error, code, at_finish):
    other, recorder = Recorder(hold_at=of_kind(RequestStarted)), Recorder()
    engine.generate(GenerationRequest("other", PROMPT, GREEDY), other)
    engine.prefill(PrefillRequest("p", PROMPT, CHUNK_TOKENS, RefusingTransfer(error, at_finish)), recorder)
    other.go.set()
    assert recorder.failed() == code
    assert other.finished().tokens() == run(engine, PROMPT).tokens()
    assert engine.stats().failed_total == 1
    assert_nothing_left(engine)


def damaged(sent: MemoryTransfer, **changes) -> MemoryTransfer:
    copy = MemoryTransfer()
    copy.specs, copy.payloads = list(sent.specs), dict(sent.payloads)
    copy.cached_tokens, copy.prefix_tokens = 0, sent.prefix_tokens
    for name, value in changes.items():
        setattr(copy, name, value)
    return copy


@pytest.mark.parametrize("kind", ["llama", "gemma3", "granite_hybrid"])
def test_a_bad_import_fails_its_request_only(kind, open_tiny):
    engine = open_tiny(kind)
    sent = transfer(engine, PROMPT, CHUNK_TOKENS)
    bad = {
        "manifest_incomplete": damaged(sent, specs=sent.specs[:-1]),
        "manifest_invalid": damaged(sent, payloads=sent.payloads | {2: sent.payloads[2][:-1]}),
        "internal_error": damaged(sent, payloads={}),
    }
    other = Recorder(hold_at=of_kind(RequestStarted))
    engine.generate(GenerationRequest("other", PROMPT, GREEDY), other)
    recorders = {code: Recorder() for code in bad}
    for code, imported in bad.items():
        engine.generate(GenerationRequest(code, PROMPT, GREEDY, imported=imported), recorders[code])
    other.go.set()
    for code, recorder in recorders.items():
        assert recorder.failed() == code
        assert not recorder.of(TokensGenerated)
        assert bad[code].releases == 1
    assert other.finished().tokens() == run(engine, PROMPT, imported=sent).tokens()
    assert_nothing_left(engine)


def test_an_import_is_released_before_the_first_token(engine):
    sent = transfer(engine, PROMPT, CHUNK_TOKENS)
    recorder = Recorder(hold_at=of_kind(PrefillCompleted))
    engine.generate(GenerationRequest("r", PROMPT, GREEDY, imported=sent), recorder)
    assert recorder.held.wait(60)
    assert sent.releases == 1
    recorder.go.set()
    recorder.finished()
    assert sent.releases == 1


def test_a_cache_of_another_prompt_length_is_refused_at_the_door(engine):
    sent = transfer(engine, PROMPT, CHUNK_TOKENS)
    with pytest.raises(PeerError) as caught:
        engine.generate(GenerationRequest("r", PROMPT[:-1], GREEDY, imported=sent), Recorder())
    assert caught.value.code == "prompt_mismatch"
    assert sent.releases == 0  # not accepted, so still the caller's


def test_a_model_that_raises_fails_its_request_loudly(engine, monkeypatch, caplog):
    run(engine, PROMPT)
    original = engine._work._forward.extend

    def explode(cache, token_ids, start):
        if start == CHUNK_TOKENS:
            raise RuntimeError("planted")
        original(cache, token_ids, start)

    monkeypatch.setattr(engine._work._forward, "extend", explode)
    recorder = Recorder()
    engine.generate(GenerationRequest("r", PROMPT, GREEDY), recorder)
    assert recorder.failed() == "internal_error"
    assert "planted" in recorder.events[-1].error.message
    assert "planted" in caplog.text
    assert_nothing_left(engine)
    assert run(engine, PROMPT[:CHUNK_TOKENS]).tokens()  # the engine goes on


def test_a_callback_that_raises_ends_its_request_only(engine, caplog):
    broken, other = Recorder(hold_at=lambda event: 1 / 0 if isinstance(event, TokensGenerated) else False), Recorder()
    engine.generate(GenerationRequest("broken", PROMPT, GREEDY), broken)
    engine.generate(GenerationRequest("other", PROMPT, GREEDY), other)
    assert broken.failed() == "internal_error"
    assert "ZeroDivisionError" in caplog.text
    assert len(other.finished().tokens()) == 12


def test_a_dead_engine_thread_fails_everything_and_says_so(open_tiny, monkeypatch, caplog):
    engine = open_tiny("llama", running_max=1)
    first, second = Recorder(hold_at=of_kind(RequestStarted)), Recorder()
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # the thread's exception is meant
    engine.generate(GenerationRequest("first", PROMPT, GREEDY), first)
    engine.generate(GenerationRequest("second", PROMPT, GREEDY), second)
    assert first.held.wait(60)
    monkeypatch.setattr(engine._scheduler, "_step", None)
    first.go.set()
    assert (first.failed(), second.failed()) == ("internal_error", "internal_error")
    with pytest.raises(FarfillError) as caught:
        engine.generate(GenerationRequest("third", PROMPT, GREEDY), Recorder())
    assert caught.value.code == "internal_error"
    assert "has died" in caplog.text


# ----------------------------------------------------------------------------------------------------------------- stop


def test_stop_lets_requests_end(open_tiny):
    engine = open_tiny("llama", running_max=1)
    recorders = [Recorder(hold_at=of_kind(RequestStarted)), Recorder(), Recorder()]
    for i, recorder in enumerate(recorders):
        engine.generate(GenerationRequest(f"r{i}", PROMPT, GREEDY), recorder)
    assert recorders[0].held.wait(60)
    stopping = threading.Thread(target=engine.stop, args=(60.0,))
    stopping.start()
    refused = threading.Event()
    while not refused.is_set():  # until the stop has begun
        try:
            engine.generate(GenerationRequest("late", PROMPT, GREEDY), Recorder())
            engine.abort("late")
        except ClientError:
            pass  # the id is still in the engine from the try before
        except OverloadError as error:
            assert error.code == "draining"
            refused.set()
    recorders[0].go.set()
    stopping.join(60)
    assert not stopping.is_alive()
    assert all(recorder.finished().tokens() for recorder in recorders)
    engine.stop()  # a second one is harmless


def test_stop_without_patience_aborts_what_is_left(open_tiny):
    engine = open_tiny("qwen3_next", running_max=1)
    sent = transfer(engine, PROMPT, CHUNK_TOKENS)
    running, waiting = Recorder(hold_at=of_kind(TokensGenerated)), Recorder()
    engine.generate(
        GenerationRequest("running", PROMPT, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)), running
    )
    engine.generate(GenerationRequest("waiting", PROMPT, GREEDY, imported=sent), waiting)
    assert running.held.wait(60)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    running.go.set()
    stopping.join(60)
    assert not stopping.is_alive()
    assert running.wait().events[-1] == RequestAborted()
    assert waiting.wait().events == [RequestAborted()]
    assert sent.releases == 1


def test_stats_count_tokens_by_where_they_came_from(open_tiny):
    producer, consumer = open_tiny("llama"), open_tiny("llama")
    sent = transfer(producer, PROMPT, CHUNK_TOKENS)
    run(consumer, PROMPT, imported=sent)
    assert producer.stats().prefill_tokens_total == 20
    assert producer.stats().decode_tokens_total == 0
    stats = consumer.stats()
    assert (stats.prefill_tokens_total, stats.imported_tokens_total, stats.decode_tokens_total) == (1, 20, 12)
    assert (stats.finished_total, stats.failed_total, stats.aborted_total) == (1, 0, 0)
