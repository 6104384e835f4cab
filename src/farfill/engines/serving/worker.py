"""A worker: an engine, the transfers it takes part in, its store, and what it tells about itself.

Not here: HTTP (`app`), a request's course (`generate`, `legs`), or sockets and signals (`serve`).
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import msgspec

from farfill.config.tree import Role
from farfill.engines.api import Engine, Tokenizer
from farfill.engines.serving.admission import Admission
from farfill.engines.serving.request import ChatTemplate, Leg, Prompt
from farfill.errors import ClientError
from farfill.kv.layout import layout_to_builtins
from farfill.kv.spec import WIRE_VERSION
from farfill.observe.metrics import WorkerLabels, WorkerMetrics
from farfill.store.server import StoreServer
from farfill.transfer.node import TransferNode

VERSION: Final = version("farfill")
# Texts from this size on are tokenised on a thread: at some 1 to 10 MB/s they would hold up the event loop.
TOKENISE_INLINE_CHARS: Final = 4096
BODY_BYTES_MAX: Final = 32 * 1024**2  # a prompt of the longest models, as JSON text or token ids


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is. `instance` is a uuid of this process's life; `name` is what its certificate says."""

    name: str
    instance: str
    role: Role
    site: str


class Worker:
    """The parts of one worker, and the checks that need only them.

    Args:
        engine: ready to work; the worker's owner stops it, and closes `node` and `store`.
        node: this process's transfers.
        store: the store in this process.
        requests_max: in flight at once, beyond which they get `queue_full`.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: Engine,
        *,
        node: TransferNode,
        store: StoreServer,
        requests_max: int = 64,
    ) -> None:
        self.identity = identity
        self.engine = engine
        self.node = node
        self.store = store
        self.admission = Admission(requests_max)
        info = engine.info
        self.metrics = WorkerMetrics(
            WorkerLabels(VERSION, info.engine, info.model, identity.role.value, identity.site),
            engine_stats=engine.stats,
            ledger=store.memory.ledger,
        )
        self.began_unix_s = int(time.time())
        self._sequence = itertools.count(1)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def engine_id(self, response_id: str) -> str:
        """An id for the engine, unique even where clients call two requests the same."""
        return f"{response_id}-{next(self._sequence)}"

    def check_model(self, model: str | None) -> None:
        """A request may leave the model out: there is only one.

        Raises:
            ClientError: `unknown_model`.
        """
        served = self.engine.info.model
        if model is not None and model != served:
            raise ClientError("unknown_model", f"the model {model[:200]!r} is not here; {served!r} is", field="model")

    def check_role(self, leg: Leg | None) -> None:
        """Raises ClientError: `prefill_only`, `unsupported_parameter`: this worker's role does not do what is asked."""
        role = self.identity.role
        if role is Role.PREFILL and (leg is None or not leg.producing):
            raise ClientError(
                "prefill_only", f"worker {self.identity.name} only prefills for others and answers no client"
            )
        if role is Role.DECODE and leg is not None and leg.producing:
            raise ClientError(
                "unsupported_parameter",
                f"worker {self.identity.name} has the role decode and prefills for nobody",
                field="kv_transfer_params.do_remote_decode",
            )

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) < TOKENISE_INLINE_CHARS:
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens=add_special_tokens)

    async def encode_chat(self, chat: ChatTemplate) -> Sequence[int]:
        """Applies the chat template, on a thread: a template is a program, of the model's maker.

        Raises:
            ClientError: `invalid_request` where the template refuses the messages.
        """
        return await asyncio.to_thread(
            self.tokenizer.apply_chat_template,
            chat.messages,
            tools=chat.tools or None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            template_kwargs=chat.template_arguments,
        )

    def describe(self) -> dict[str, Any]:
        """`GET /farfill/v1/info`: what peers and the gateway must know."""
        identity, info = self.identity, self.engine.info
        return {
            "name": identity.name,
            "instance": identity.instance,
            "role": identity.role.value,
            "site": identity.site,
            "version": VERSION,
            "wire_version": WIRE_VERSION,
            "engine": info.engine,
            "model": info.model,
            "max_model_len": info.max_model_len,
            "chunk_tokens": info.chunk_tokens,
            "fingerprint": msgspec.to_builtins(info.fingerprint),
            "layout": layout_to_builtins(info.layout),
            "store": msgspec.to_builtins(self.store.address),
            "draining": self.admission.is_closed,
            "requests": self.admission.requests,
        }
