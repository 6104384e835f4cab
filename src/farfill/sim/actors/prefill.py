"""The prefill worker's simulated driver: an engine that takes time, sealing, and the real `SenderMachine`.

It computes nothing: the bytes are `sim.engine`'s. What is put again after it was acknowledged is caught here.
"""

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from farfill.kv.fingerprint import Fingerprint
from farfill.kv.manifest import ClosingRecord, encode_closing, encode_manifest, manifest_for
from farfill.kv.plan import closing_index, plan_chunks
from farfill.kv.sealing import MANIFEST_IDENTITY, Sealer, closing_identity, data_identity, tag_of
from farfill.kv.spec import ChunkSpec
from farfill.sim.actors.driver import Driver, StoreLink
from farfill.sim.actors.wire import LegAccepted, LegDone, LegFailed, Payload, PrefillLeg
from farfill.sim.checkers import Checkers
from farfill.sim.engine import LAYOUT, chunk_bytes
from farfill.sim.network import End, Network, Node
from farfill.store.protocol import Have, Present, Put, Refused, Stored, indices_in
from farfill.transfer import events as t
from farfill.transfer import sender as s


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """`queue_s` before the engine looks at a request; then tokens a second, one request after the other."""

    queue_s: float
    tokens_per_s: float


class PrefillActor:
    """One prefill worker on one node.

    Args:
        fingerprint: what its manifests say.
        weights: 0 as everybody's; another number: other bytes come out (a worker with the wrong weights).
    """

    def __init__(
        self,
        network: Network,
        node: Node,
        stores: Mapping[str, Node],
        speed: PrefillSpeed,
        settings: t.LinkSettings,
        fingerprint: Fingerprint,
        weights: int,
        checkers: Checkers,
    ) -> None:
        self.node = node
        self.network = network
        self.stores = stores
        self.speed = speed
        self.settings = settings
        self.fingerprint = fingerprint
        self.weights = weights
        self.checkers = checkers
        self.dice = network.world.dice(f"prefill {node.name}")
        self.engine_free_at = 0.0
        self._session_count = 0
        self.restart()

    def restart(self) -> None:
        self.engine_free_at = 0.0
        self.node.services["prefill"] = self._accept

    def _accept(self, end: End) -> None:
        def asked(leg: PrefillLeg) -> None:
            self._session_count += 1
            PrefillSession(self, leg, end, self._session_count)

        end.on_message = asked


class PrefillSession:
    """One prefill leg: its chunks, as they come to exist, and their way to the store."""

    def __init__(self, worker: PrefillActor, leg: PrefillLeg, end: End, number: int) -> None:
        self._worker = worker
        self._leg = leg
        self._end = end
        self._checkers = worker.checkers
        spec = leg.spec
        self._plan = plan_chunks(LAYOUT, spec.prefix_tokens, spec.chunk_tokens)
        self._sealer = Sealer(spec.key, spec.transfer_id, spec.epoch, salts=_salts(worker, number))
        self._sealed: dict[int, bytes] = {}
        self._tags: list[bytes] = []
        self._acknowledged: set[int] = set()
        self._put_before: set[int] = set()
        self._is_verified = False  # so the store said
        self._doubtful: dict[int, bool] = {}  # in flight when its connection broke -> whether the store was asked since
        self._flying: dict[t.ConnectionId, set[int]] = {}
        world = worker.network.world
        machine = s.SenderMachine(len(self._plan) + 2, spec.clocks, worker.settings)
        self._driver = Driver[s.SenderEvent, s.SenderEffect](
            world, worker.node, worker.dice, machine, t.Tick(), self._perform
        )
        self._link = StoreLink(
            worker.network, worker.node, worker.stores[leg.store], worker.dice, self._event, self._on_message
        )
        end.on_lost = lambda: self._event(t.Cancelled("the gateway has gone"))
        end.send(LegAccepted())
        self._compute()
        self._event(t.Started())

    def _event(self, event: s.SenderEvent) -> None:
        if isinstance(event, t.ConnectionLost):
            for index in self._flying.pop(event.connection, ()):
                self._doubtful[index] = False
        self._driver.feed(event)

    def _compute(self) -> None:
        """The engine: each token range takes its time; a chunk is published when its last token is computed."""
        worker, world = self._worker, self._worker.network.world
        begin = max(world.now + worker.speed.queue_s, worker.engine_free_at)
        worker.engine_free_at = begin + self._leg.spec.prefix_tokens / worker.speed.tokens_per_s
        self._driver.later(0.0, self._publish_manifest)
        for chunk in self._plan:
            at = begin + chunk.token_stop / worker.speed.tokens_per_s
            self._driver.later(at - world.now, lambda chunk=chunk: self._publish(chunk))  # type: ignore[misc]

    def _publish_manifest(self) -> None:
        spec = self._leg.spec
        manifest = manifest_for(
            transfer_id=spec.transfer_id,
            epoch=spec.epoch,
            fingerprint=self._worker.fingerprint,
            layout=LAYOUT,
            prefix_token_ids=self._leg.prompt[:-1],
            chunk_tokens=spec.chunk_tokens,
        )
        self._ready(0, bytes(self._sealer.seal(MANIFEST_IDENTITY, encode_manifest(manifest))))

    def _publish(self, chunk: ChunkSpec) -> None:
        plaintext = chunk_bytes(tuple(token + self._worker.weights for token in self._leg.prompt), chunk)
        sealed = bytes(self._sealer.seal(data_identity(chunk), plaintext))
        self._tags.append(tag_of(sealed))
        self._ready(chunk.index, sealed)
        if chunk.index == len(self._plan):
            spec, index = self._leg.spec, closing_index(self._plan)
            record = ClosingRecord(spec.transfer_id, spec.epoch, tuple(self._tags), 0)
            self._ready(index, bytes(self._sealer.seal(closing_identity(index), encode_closing(record))))

    def _ready(self, index: int, sealed: bytes) -> None:
        self._sealed[index] = sealed
        self._event(s.ChunkReady(index, len(sealed)))

    # --- messages and effects ---------------------------------------------------------------------------------------

    def _on_message(self, connection: t.ConnectionId, message: Any) -> None:
        match message:
            case Stored():
                self._acknowledged.add(message.index)
                self._flying.get(connection, set()).discard(message.index)
                self._event(s.StoredReceived(connection, message.index))
            case Present():
                present = frozenset(indices_in(message.bitmap))
                for index in self._doubtful:
                    self._doubtful[index] = True
                self._acknowledged |= present & self._put_before  # others are a repeated leg's, sealed otherwise
                self._is_verified = message.verified
                self._checkers.count("resumes")
                self._checkers.count("chunks not resent", len(present.intersection(self._doubtful)))
                self._event(t.PresentReceived(connection, present, message.verified))
            case Refused():
                if message.code == "chunk_corrupt" and message.index is not None:
                    self._flying.get(connection, set()).discard(message.index)
                self._event(t.RefusedReceived(connection, message.index, message.code, message.detail))
            case _:
                raise AssertionError(f"a store says {message!r} to a sender")

    def _perform(self, effect: s.SenderEffect) -> None:
        spec = self._leg.spec
        match effect:
            case t.OpenConnection():
                self._link.open(effect)
            case t.CloseConnection():
                for index in self._flying.pop(effect.connection, ()):
                    self._doubtful[index] = False
                self._link.close(effect)
            case t.AskHave():
                self._link.send(effect.connection, Have(spec.transfer_id, spec.epoch))
            case s.SendPut():
                self._put(effect)
            case s.ReleaseChunk():
                self._checkers.require(
                    effect.index in self._acknowledged, "re-put", f"chunk {effect.index} was released unacknowledged"
                )
                del self._sealed[effect.index]
            case s.Complete():
                self._checkers.count("sends completed")
                stored = len(self._acknowledged)
                self._checkers.require(
                    self._is_verified or stored == len(self._plan) + 2,
                    "complete",
                    f"{spec.transfer_id}: the leg is done, the store has {stored} of {len(self._plan) + 2} chunks",
                )
                self._finish(LegDone())
            case t.Fail():
                self._checkers.count(f"send failed {effect.code}")
                self._finish(LegFailed(effect.code, effect.detail))
            case _:
                assert_never(effect)

    def _put(self, effect: s.SendPut) -> None:
        spec, index = self._leg.spec, effect.index
        name = f"{spec.transfer_id}: chunk {index}"
        self._checkers.require(index not in self._acknowledged, "re-put", f"{name} is put again, the store has it")
        asked = self._doubtful.pop(index, True)
        self._checkers.require(asked, "re-put", f"{name} is put again after a cut, the store was not asked")
        self._put_before.add(index)
        self._flying.setdefault(effect.connection, set()).add(index)
        data = self._sealed[index]
        put = Put(spec.transfer_id, spec.epoch, index, len(data), zlib.crc32(data))
        self._link.send(effect.connection, put)
        self._link.send(effect.connection, Payload(data), len(data))

    def _finish(self, answer: LegDone | LegFailed) -> None:
        self._driver.stop()
        self._link.close_all()
        self._end.send(answer)


def _salts(worker: PrefillActor, number: int) -> Any:
    """A fresh salt at each call, the same in each run: no two sessions of the world share one."""
    count = 0

    def salt(size_bytes: int) -> bytes:
        nonlocal count
        count += 1
        name = f"{worker.network.world.seed}/{worker.node.name}/{worker.node.life}/{number}/{count}"
        return hashlib.shake_128(name.encode()).digest(size_bytes)

    return salt
