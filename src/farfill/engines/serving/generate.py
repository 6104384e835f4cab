"""The course of one completions or chat request: parsed, admitted, tokenised, then generated here or through a leg.

Not here: the legs themselves (`legs`), how the answer is told (`answer`).
"""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from farfill.engines.api import GenerationRequest, SamplingParams
from farfill.engines.serving import legs
from farfill.engines.serving.answer import Answer, give
from farfill.engines.serving.call import generation
from farfill.engines.serving.http import BEGAN, REQUEST_ID, read_body
from farfill.engines.serving.request import ChatRequest, CompletionRequest, parse_chat, parse_completion
from farfill.engines.serving.responses import ChatShape, CompletionShape, Head, Shape
from farfill.engines.serving.worker import BODY_BYTES_MAX, Worker

COMPLETION_TOKENS_DEFAULT: Final = 16  # OpenAI's, for /v1/completions alone


async def completions(worker: Worker, request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`.

    Raises:
        FarfillError: before anything was sent.
    """
    parsed = parse_completion(await read_body(request, BODY_BYTES_MAX))
    _check(worker, parsed)
    with worker.admission.enter():
        prompts = [await worker.encode(p, add_special_tokens=parsed.add_special_tokens) for p in parsed.prompts]
        sampling = parsed.sampling
        if sampling.max_tokens is None:
            default = max(COMPLETION_TOKENS_DEFAULT, sampling.min_tokens)
            sampling = dataclasses.replace(sampling, max_tokens=default)
        return await _generate(worker, request, parsed, prompts, sampling, CompletionShape(worker.tokenizer))


async def chat_completions(worker: Worker, request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`.

    Raises:
        FarfillError: before anything was sent.
    """
    parsed = parse_chat(await read_body(request, BODY_BYTES_MAX))
    _check(worker, parsed)
    with worker.admission.enter():
        prompt = await worker.encode_chat(parsed.chat)
        return await _generate(worker, request, parsed, [prompt], parsed.sampling, ChatShape(worker.tokenizer))


def _check(worker: Worker, parsed: CompletionRequest | ChatRequest) -> None:
    worker.check_model(parsed.model)
    worker.check_role(parsed.leg)


async def _generate(
    worker: Worker,
    request: web.Request,
    parsed: CompletionRequest | ChatRequest,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    shape: Shape,
) -> web.StreamResponse:
    head = Head(f"{shape.id_prefix}{request[REQUEST_ID]}", int(time.time()), worker.engine.info.model)
    answer = Answer(shape, head, sampling.n, parsed.streaming, request[BEGAN])
    if parsed.leg is not None and parsed.leg.producing:
        return await legs.prefill_leg(worker, parsed.leg.spec, prompts[0], parsed.cache_salt, answer)
    if parsed.leg is not None:
        return await legs.decode_leg(worker, request, parsed.leg.spec, prompts[0], sampling, parsed.cache_salt, answer)
    with contextlib.ExitStack() as stack:
        calls = [
            stack.enter_context(
                generation(
                    worker.engine,
                    GenerationRequest(
                        worker.engine_id(head.response_id), prompt, sampling, cache_salt=parsed.cache_salt
                    ),
                )
            )
            for prompt in prompts
        ]
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        return await give(request, answer, calls, prompt_tokens=prompt_tokens, metrics=worker.metrics, extra={})
