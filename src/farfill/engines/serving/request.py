"""What a client may ask of a worker: the bodies of the OpenAI endpoints, parsed and checked into frozen values.

Not here: tokenising, the model's length (the engine knows it), or the engine's own request.
"""

import logging
from dataclasses import dataclass
from typing import Any, Final

from farfill.engines.api import CACHE_SALT_CHARS_MAX, CHOICES_MAX, LOGPROBS_MAX, STOP_STRINGS_MAX, SamplingParams
from farfill.engines.serving.fields import Fields, decode_object, invalid, kind
from farfill.errors import ClientError
from farfill.transfer.spec import TransferSpec, from_kv_transfer_params

_log = logging.getLogger(__name__)

# Bounds on what one request may ask for. Each is far over what a sensible client needs and keeps one request's
# memory and response small.
PROMPTS_MAX: Final = 1024
STOP_TOKEN_IDS_MAX: Final = 64
LOGIT_BIASES_MAX: Final = 1024
MESSAGES_MAX: Final = 4096
TOKEN_ID_MAX: Final = 2**31 - 1  # vocabularies are smaller; the engine checks its own
COMPLETION_TOKENS_DEFAULT: Final = 16  # OpenAI's default for /v1/completions

Prompt = str | tuple[int, ...]

# Would change the output, and nothing here can do it: refused instead of ignored. (`echo` and `prompt_logprobs` need
# the prompt's own logits, which a transferred cache does not carry.)
_UNSUPPORTED: Final = (
    "echo",
    "suffix",
    "prompt_logprobs",
    "use_beam_search",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "truncate_prompt_tokens",
    "functions",
    "audio",
    "return_tokens_as_token_ids",
    "return_token_ids",
)
# Accepted and without effect on the text: told apart from unknown fields only so that they are not logged.
_WITHOUT_EFFECT: Final = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "parallel_tool_calls",
    "priority",
    "request_id",
    "safety_identifier",
    "prompt_cache_key",
)


@dataclass(frozen=True, slots=True)
class Streaming:
    """Whether and how a response is streamed."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True)
class Leg:
    """What `kv_transfer_params` ask of this worker. `producing`: prefill and publish; else get and decode."""

    producing: bool
    spec: TransferSpec


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A conversation and what its template is told beside it."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A parsed `/v1/completions` body: one or more prompts, `sampling.n` choices of each."""

    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    streaming: Streaming
    leg: Leg | None
    add_special_tokens: bool = True
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed `/v1/chat/completions` body."""

    model: str | None
    chat: ChatTemplate
    sampling: SamplingParams
    streaming: Streaming
    leg: Leg | None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A parsed `/tokenize` body: exactly one of `prompt` and `chat`."""

    model: str | None
    prompt: Prompt | None
    chat: ChatTemplate | None
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    model: str | None
    tokens: tuple[int, ...]


class UnknownFields:
    """Logs each unknown field name once per process, up to a bound: clients send what other servers know."""

    NAMES_MAX: Final = 200

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: list[str]) -> None:
        for name in names:
            if name not in self._seen and len(self._seen) < self.NAMES_MAX:
                self._seen.add(name)
                _log.warning("ignoring unknown request field %r (logged once)", name[:100])


_unknown = UnknownFields()


def parse_completion(body: bytes) -> CompletionRequest:
    """Reads a `/v1/completions` body.

    Raises:
        ClientError: for any bad value, naming the field.
    """
    fields = Fields(decode_object(body))
    prompts = _prompts(fields)
    leg = _leg(fields)
    n = fields.integer("n", least=1, most=CHOICES_MAX) or 1
    fields.refuse("best_of", unless=(n,))
    fields.refuse("response_format", unless=({"type": "text"},))
    logprobs = fields.raw("logprobs")
    count = fields.integer("logprobs", least=0, most=LOGPROBS_MAX) if logprobs not in (None, False) else None
    sampling = _sampling(fields, n=n, logprobs=count)
    request = CompletionRequest(
        model=fields.text("model"),
        prompts=prompts,
        sampling=sampling,
        streaming=_streaming(fields),
        leg=leg,
        add_special_tokens=fields.boolean("add_special_tokens", True),
        cache_salt=_cache_salt(fields),
    )
    _check_leg(leg, choices=n * len(prompts), prompts=len(prompts), streaming=request.streaming)
    _finish(fields)
    return request


def parse_chat(body: bytes) -> ChatRequest:
    """Reads a `/v1/chat/completions` body.

    Raises:
        ClientError: for any bad value, naming the field.
    """
    fields = Fields(decode_object(body))
    chat = _chat(fields, required=True)
    assert chat is not None
    leg = _leg(fields)
    n = fields.integer("n", least=1, most=CHOICES_MAX) or 1
    fields.refuse("response_format", unless=({"type": "text"},))
    fields.refuse("tool_choice", unless=("auto", "none"))
    fields.refuse("modalities", unless=(["text"],))
    if fields.raw("tool_choice") == "none":
        chat = ChatTemplate(
            chat.messages, (), chat.add_generation_prompt, chat.continue_final_message, chat.template_arguments
        )
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", least=0, most=LOGPROBS_MAX)
    if top is not None and top > 0 and not wanted:
        raise fields.invalid("top_logprobs", "needs logprobs to be true")
    request = ChatRequest(
        model=fields.text("model"),
        chat=chat,
        sampling=_sampling(fields, n=n, logprobs=(top or 0) if wanted else None),
        streaming=_streaming(fields),
        leg=leg,
        cache_salt=_cache_salt(fields),
    )
    _check_leg(leg, choices=n, prompts=1, streaming=request.streaming)
    _finish(fields)
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Reads a `/tokenize` body (vLLM's shape): `prompt`, or `messages` with what the chat template takes."""
    fields = Fields(decode_object(body))
    chat = _chat(fields, required=False)
    prompt = fields.text("prompt")
    if (prompt is None) == (chat is None):
        raise invalid("prompt", "or messages must be given, and not both")
    request = TokenizeRequest(
        model=fields.text("model"),
        prompt=prompt,
        chat=chat,
        # A chat template writes the special tokens itself.
        add_special_tokens=fields.boolean("add_special_tokens", chat is None),
        return_token_strs=fields.boolean("return_token_strs"),
    )
    _finish(fields)
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Reads a `/detokenize` body (vLLM's shape)."""
    fields = Fields(decode_object(body))
    if not isinstance(fields.raw("tokens"), list):
        raise fields.invalid("tokens", "must be an array of token ids")
    tokens = fields.integers("tokens", least=0, most=TOKEN_ID_MAX, count_max=TOKEN_ID_MAX)
    request = DetokenizeRequest(fields.text("model"), tokens)
    _finish(fields)
    return request


def _prompts(fields: Fields) -> tuple[Prompt, ...]:
    value = fields.raw("prompt")
    if value is None:
        raise fields.invalid("prompt", "is required")
    several = isinstance(value, list) and (not value or isinstance(value[0], str | list))
    entries = value if several else [value]
    if not entries:
        raise ClientError("empty_prompt", "prompt must not be empty", field="prompt")
    if len(entries) > PROMPTS_MAX:
        raise fields.invalid("prompt", f"may hold at most {PROMPTS_MAX} prompts, not {len(entries)}")
    return tuple(_prompt(entry) for entry in entries)


def _prompt(entry: object) -> Prompt:
    if isinstance(entry, str):
        prompt: Prompt = entry
    elif isinstance(entry, list):
        prompt = Fields({"prompt": entry}).integers("prompt", least=0, most=TOKEN_ID_MAX, count_max=TOKEN_ID_MAX)
    else:
        raise invalid("prompt", f"must be a string, an array of token ids, or an array of those, not {kind(entry)}")
    if not prompt:
        raise ClientError("empty_prompt", "prompt must not be empty", field="prompt")
    return prompt


def _chat(fields: Fields, *, required: bool) -> ChatTemplate | None:
    value = fields.raw("messages")
    tools = fields.raw("tools")
    arguments = fields.raw("chat_template_kwargs")
    generation = fields.boolean("add_generation_prompt", True)
    continuing = fields.boolean("continue_final_message")
    fields.refuse("chat_template")  # a template is code; only the model's own is run
    if value is None:
        if required:
            raise fields.invalid("messages", "is required")
        return None
    if not isinstance(value, list):
        raise fields.invalid("messages", f"must be an array, not {kind(value)}")
    if not value:
        raise ClientError("empty_prompt", "messages must not be empty", field="messages")
    if len(value) > MESSAGES_MAX:
        raise fields.invalid("messages", f"may hold at most {MESSAGES_MAX} messages, not {len(value)}")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise fields.invalid("tools", "must be an array of objects")
    if arguments is not None and not isinstance(arguments, dict):
        raise fields.invalid("chat_template_kwargs", f"must be an object, not {kind(arguments)}")
    if continuing and generation and fields.raw("add_generation_prompt") is not None:
        raise fields.invalid("continue_final_message", "cannot be combined with add_generation_prompt")
    return ChatTemplate(
        messages=tuple(_message(index, message) for index, message in enumerate(value)),
        tools=tuple(tools or ()),
        add_generation_prompt=generation and not continuing,
        continue_final_message=continuing,
        template_arguments=arguments,
    )


def _message(index: int, message: object) -> dict[str, Any]:
    """One message with its content as a string: text parts are joined, other parts refused."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise invalid(where, f"must be an object, not {kind(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{where}.role", "must be a non-empty string")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, list):
        raise invalid(f"{where}.content", f"must be a string or an array of parts, not {kind(content)}")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text") or not isinstance(text, str):
            raise ClientError(
                "unsupported_parameter", f"{where}.content: only text parts are supported", field=f"{where}.content"
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _sampling(fields: Fields, *, n: int, logprobs: int | None) -> SamplingParams:
    max_tokens = fields.integer("max_tokens", least=1)
    newer = fields.integer("max_completion_tokens", least=1)
    temperature = fields.number("temperature", least=0.0, most=100.0)
    top_p = fields.number("top_p", least=0.0, most=1.0, above=0.0)
    repetition = fields.number("repetition_penalty", least=0.0, most=100.0, above=0.0)
    return SamplingParams(
        max_tokens=newer if newer is not None else max_tokens,
        min_tokens=fields.integer("min_tokens", least=0) or 0,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=fields.integer("top_k", least=-1) or 0,
        min_p=fields.number("min_p", least=0.0, most=1.0) or 0.0,
        seed=fields.integer("seed"),
        stop=fields.texts("stop", count_max=STOP_STRINGS_MAX),
        stop_token_ids=fields.integers("stop_token_ids", least=0, most=TOKEN_ID_MAX, count_max=STOP_TOKEN_IDS_MAX),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
        n=n,
        presence_penalty=fields.number("presence_penalty", least=-2.0, most=2.0) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", least=-2.0, most=2.0) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(fields),
        include_stop=fields.boolean("include_stop_str_in_output"),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
    )


def _logit_bias(fields: Fields) -> dict[int, float]:
    biases = fields.raw("logit_bias")
    if biases is None:
        return {}
    if not isinstance(biases, dict) or len(biases) > LOGIT_BIASES_MAX:
        raise fields.invalid("logit_bias", f"must be an object of at most {LOGIT_BIASES_MAX} token ids")
    values = Fields(biases, prefix="logit_bias.")
    read: dict[int, float] = {}
    for key in biases:
        bias = values.number(key, least=-100.0, most=100.0)
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= TOKEN_ID_MAX) or bias is None:
            raise fields.invalid("logit_bias", "must map token ids to numbers from -100 to 100")
        read[int(key)] = bias
    return read


def _streaming(fields: Fields) -> Streaming:
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return Streaming(stream)
    if not stream:
        raise fields.invalid("stream_options", "needs stream to be true")
    return Streaming(stream, options.boolean("include_usage"), options.boolean("continuous_usage_stats"))


def _cache_salt(fields: Fields) -> str:
    """vLLM's field: requests share cached prefixes only with those of the same salt. "" where there is none."""
    salt = fields.text("cache_salt")
    if salt is not None and not 1 <= len(salt) <= CACHE_SALT_CHARS_MAX:
        raise fields.invalid("cache_salt", f"must have 1 to {CACHE_SALT_CHARS_MAX} characters, not {len(salt)}")
    return salt or ""


def _leg(fields: Fields) -> Leg | None:
    parsed = from_kv_transfer_params(fields.raw("kv_transfer_params"))
    return None if parsed is None else Leg(producing=parsed[0] == "prefill", spec=parsed[1])


def _check_leg(leg: Leg | None, *, choices: int, prompts: int, streaming: Streaming) -> None:
    """A transfer is of one prompt; its prefill leg has one choice and no stream."""
    if leg is None:
        return
    if prompts != 1:
        raise invalid("kv_transfer_params", f"are for one prompt, not {prompts}")
    if leg.producing and choices != 1:
        raise invalid("n", "must be 1 with do_remote_decode")
    if leg.producing and streaming.stream:
        raise invalid("stream", "must be false with do_remote_decode")


def _finish(fields: Fields) -> None:
    for name in _UNSUPPORTED:
        fields.refuse(name)
    for name in _WITHOUT_EFFECT:
        fields.raw(name)
    _unknown.note(fields.unread())
