"""A Hugging Face fast tokenizer behind the engine interface, safe to use from several threads at once.

Not here: incremental decoding itself (`detokenize`). Slow (pure Python) tokenizers are refused: they cannot be shared.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase

from farfill.engines.hf.detokenize import Detokenizer
from farfill.errors import ClientError, ConfigurationError

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HfTokenizer:
    """Works on the `tokenizers` backend directly, which does not change after construction."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            raise ConfigurationError(
                "model_unsupported", "the model has no tokenizer.json (fast tokenizer)", field="model"
            )
        backend.no_truncation()  # some tokenizer.json files carry a truncation that would cut prompts, silently
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self._special_ids = frozenset(tokenizer.all_special_ids) | frozenset(backend.get_added_tokens_decoder())
        self._byte_of_char = _byte_of_char() if _is_byte_level(backend) else None

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ClientError("invalid_request", "this model has no chat template", field="messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            # What a template does with messages of another shape than it expects: the client's to change.
            raise ClientError(
                "invalid_request", f"the chat template refuses these messages: {error}", field="messages"
            ) from error
        assert isinstance(text, str)
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # models often have more logits than their tokenizer has tokens
            return b""
        if token_id in self._special_ids:
            return token.encode()
        if self._byte_of_char is not None:
            return b"".join(self._byte_of_char.get(char, char.encode()) for char in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace("\u2581", " ").encode()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))


def _is_byte_level(backend: Backend) -> bool:
    decoder = backend.decoder
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    return "ByteLevel" in {state.get("type"), *(part.get("type") for part in state.get("decoders", ()))}


def _byte_of_char() -> dict[str, bytes]:
    """The byte that each character of a byte-level token stands for (GPT-2's table: printable ones are themselves)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    table.update({chr(0x100 + order): bytes([byte]) for order, byte in enumerate(others)})
    return table
