"""The decode worker's simulated driver: a cache that real chunks are opened into, and the real `ReceiverMachine`.

It decides nothing about a transfer. Its tokens come from the bytes it holds (`sim.engine`), so that it cannot be right
by accident.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from farfill.errors import PeerError
from farfill.kv.fingerprint import Fingerprint
from farfill.kv.manifest import check_closing, check_manifest, decode_closing, decode_manifest
from farfill.kv.plan import closing_index, plan_chunks, sealed_bytes_max
from farfill.kv.sealing import MANIFEST_IDENTITY, Sealer, closing_identity, data_identity
from farfill.sim.actors.driver import Driver, StoreLink
from farfill.sim.actors.wire import ChunkFrame, DecodeLeg, LegDone, LegFailed, LegOutput, LegStarted
from farfill.sim.checkers import Checkers
from farfill.sim.engine import LAYOUT, DecodeCache, chunk_bytes
from farfill.sim.network import End, Network, Node
from farfill.store.protocol import Get, Have, Present, Refused, Verified, indices_in
from farfill.transfer import events as t
from farfill.transfer import receiver as r
from farfill.transfer.spec import TransferSpec


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """`open_s`: the most that opening a chunk takes; `prefill_tokens_per_s`: on the local path; `token_s`: a token."""

    open_s: float
    prefill_tokens_per_s: float
    token_s: float


class DecodeActor:
    """One decode worker on one node."""

    def __init__(
        self,
        network: Network,
        node: Node,
        stores: Mapping[str, Node],
        speed: DecodeSpeed,
        settings: t.LinkSettings,
        fingerprint: Fingerprint,
        chunk_tokens: int,
        checkers: Checkers,
    ) -> None:
        self.node = node
        self.network = network
        self.stores = stores
        self.speed = speed
        self.settings = settings
        self.fingerprint = fingerprint
        self.chunk_tokens = chunk_tokens
        self.checkers = checkers
        self.dice = network.world.dice(f"decode {node.name}")
        self.restart()

    def restart(self) -> None:
        self.node.services["decode"] = self._accept

    def _accept(self, end: End) -> None:
        def asked(leg: DecodeLeg) -> None:
            if leg.spec is None:
                LocalSession(self, leg, end)
            else:
                assert leg.store is not None
                RemoteSession(self, leg, leg.spec, self.stores[leg.store], end)

        end.on_message = asked


def _decode(worker: DecodeActor, leg: DecodeLeg, end: End, cache: DecodeCache, kv_bytes: int) -> None:
    """The engine's part after its cache is filled: the head, then a token at a time, then the end."""
    world = worker.network.world
    tokens = cache.decode(leg.prompt[-1], leg.output_tokens)
    end.on_lost = None  # nothing to free: what is still said is said to nobody
    if not leg.streaming:

        def answer() -> None:
            end.send(LegStarted(kv_bytes))
            for token in tokens:
                end.send(LegOutput(token))
            end.send(LegDone())

        world.after(len(tokens) * worker.speed.token_s, answer)
        return
    end.send(LegStarted(kv_bytes))
    for step, token in enumerate(tokens):
        world.after((step + 1) * worker.speed.token_s, lambda token=token: end.send(LegOutput(token)))  # type: ignore[misc]
    world.after((len(tokens) + 0.5) * worker.speed.token_s, lambda: end.send(LegDone()))


class LocalSession:
    """A leg that prefills by itself."""

    def __init__(self, worker: DecodeActor, leg: DecodeLeg, end: End) -> None:
        life = worker.node.life

        def computed() -> None:
            if not (worker.node.up and worker.node.life == life):
                return
            prefix_tokens = len(leg.prompt) - 1
            plan = plan_chunks(LAYOUT, prefix_tokens, worker.chunk_tokens) if prefix_tokens else ()
            cache = DecodeCache(plan)
            for chunk in plan:
                cache.buffer(chunk.index)[:] = chunk_bytes(leg.prompt, chunk)
            _decode(worker, leg, end, cache, 0)

        worker.network.world.after(len(leg.prompt) / worker.speed.prefill_tokens_per_s, computed)


class RemoteSession:
    """A leg that consumes a transfer."""

    def __init__(self, worker: DecodeActor, leg: DecodeLeg, spec: TransferSpec, store: Node, end: End) -> None:
        self._worker = worker
        self._leg = leg
        self._spec = spec
        self._end = end
        self._checkers = worker.checkers
        self._plan = plan_chunks(LAYOUT, spec.prefix_tokens, spec.chunk_tokens)
        self._sealer = Sealer(spec.key, spec.transfer_id, spec.epoch)
        self._cache = DecodeCache(self._plan)
        self._opened: dict[int, bytes] = {}  # the tag of each data chunk
        self._closing_tags: tuple[bytes, ...] = ()
        self._kv_bytes = 0
        self._is_verified = False
        sealed_bytes = [sealed_bytes_max(self._plan, chunk.index) for chunk in self._plan]
        self._machine = r.ReceiverMachine(sealed_bytes, spec.clocks, worker.settings)
        self._driver = Driver[r.ReceiverEvent, r.ReceiverEffect](
            worker.network.world, worker.node, worker.dice, self._machine, t.Tick(), self._perform
        )
        self._link = StoreLink(worker.network, worker.node, store, worker.dice, self._driver.feed, self._on_message)
        end.on_lost = lambda: self._driver.feed(t.Cancelled("the gateway has gone"))
        self._driver.feed(t.Started())

    # --- chunks -----------------------------------------------------------------------------------------------------

    def _on_message(self, connection: t.ConnectionId, message: Any) -> None:
        match message:
            case ChunkFrame():
                self._arrived(connection, message)
            case Present():
                self._checkers.count("stores asked by a receiver")
                self._driver.feed(
                    t.PresentReceived(connection, frozenset(indices_in(message.bitmap)), message.verified)
                )
            case Refused():
                self._driver.feed(t.RefusedReceived(connection, message.index, message.code, message.detail))
            case _:
                raise AssertionError(f"a store says {message!r} to a receiver")

    def _arrived(self, connection: t.ConnectionId, frame: ChunkFrame) -> None:
        """As in the real shell, a chunk of a connection that was given up meanwhile is opened, and not taken."""
        index = frame.message.index
        if not self._machine.is_expected(connection, index):
            self._checkers.count("chunks that came late")
        self._driver.feed(r.ChunkArrived(connection, index))
        delay_s = self._worker.dice.between(0.0, self._worker.speed.open_s)
        self._driver.later(delay_s, lambda: self._driver.feed(self._open(connection, frame)))

    def _open(self, connection: t.ConnectionId, frame: ChunkFrame) -> r.ReceiverEvent:
        """What the shell does with sealed bytes: checksum, size, AEAD, and reading of manifest and closing record."""
        index, data, last = frame.message.index, frame.data, len(self._plan) + 1
        if zlib.crc32(data) != frame.message.checksum or len(data) > sealed_bytes_max(self._plan, index):
            self._checkers.count("chunks damaged on the wire")
            return r.ChunkBad(connection, index, "its checksum does not hold")
        try:
            if index == 0:
                return self._open_manifest(connection, data)
            if index == last:
                return self._open_closing(connection, data)
            chunk = self._plan[index - 1]
            plaintext = bytearray(chunk.payload_bytes)
            tag = self._sealer.open_into(data_identity(chunk), data, plaintext)
        except PeerError as error:
            self._checkers.count("chunks that did not open")
            return r.ChunkBad(connection, index, error.message)
        if self._machine.is_awaited(connection, index):
            self._cache.buffer(index)[:] = plaintext
            self._opened[index] = tag
            self._kv_bytes += chunk.payload_bytes
            self._checkers.moved_bytes[self._spec.transfer_id] += chunk.payload_bytes
        return r.ChunkOpened(connection, index, tag)

    def _open_manifest(self, connection: t.ConnectionId, data: bytes) -> r.ReceiverEvent:
        plaintext, _ = self._sealer.open(MANIFEST_IDENTITY, data)
        try:
            check_manifest(
                decode_manifest(plaintext),
                layout=LAYOUT,
                fingerprint=self._worker.fingerprint,
                prefix_token_ids=self._leg.prompt[:-1],
                transfer_id=self._spec.transfer_id,
                epoch=self._spec.epoch,
                chunk_tokens=self._spec.chunk_tokens,
            )
        except PeerError as error:
            self._checkers.count(f"manifests refused {error.code}")
            return r.ManifestRefused(connection, error.code, error.message)
        return r.ManifestChecked(connection)

    def _open_closing(self, connection: t.ConnectionId, data: bytes) -> r.ReceiverEvent:
        plaintext, _ = self._sealer.open(closing_identity(closing_index(self._plan)), data)
        try:
            record = decode_closing(plaintext)
            check_closing(  # all but the tags, which the machine compares with those it was told of
                record,
                plan=self._plan,
                tags=record.tags if len(record.tags) == len(self._plan) else [b""] * len(self._plan),
                prefix_tokens=self._spec.prefix_tokens,
                transfer_id=self._spec.transfer_id,
                epoch=self._spec.epoch,
            )
        except PeerError as error:
            return r.ClosingRefused(connection, error.code, error.message)
        self._closing_tags = record.tags
        return r.ClosingOpened(connection, record.tags)

    # --- effects ----------------------------------------------------------------------------------------------------

    def _perform(self, effect: r.ReceiverEffect) -> None:
        spec = self._spec
        match effect:
            case t.OpenConnection():
                self._link.open(effect)
            case t.CloseConnection():
                self._link.close(effect)
            case t.AskHave():
                self._link.send(effect.connection, Have(spec.transfer_id, spec.epoch))
            case r.SendGet():
                self._link.send(effect.connection, Get(spec.transfer_id, spec.epoch, effect.index))
            case r.SendVerified():
                self._link.send(effect.connection, Verified(spec.transfer_id, spec.epoch))
            case r.Verify():
                self._verified()
            case t.Fail():
                self._checkers.count(f"receive failed {effect.code}")
                self._stop()
                self._end.send(LegFailed(effect.code, effect.detail))
            case _:
                assert_never(effect)

    def _verified(self) -> None:
        self._is_verified = True
        prompt = self._leg.prompt
        differing = [c.index for c in self._plan if bytes(self._cache.buffer(c.index)) != chunk_bytes(prompt, c)]
        opened = sorted(self._opened)
        is_closed = self._closing_tags == tuple(self._opened[index] for index in opened)
        self._checkers.verified(self._spec.transfer_id, opened, len(self._plan), differing, is_closed)
        self._stop()
        self._begin()

    def _begin(self) -> None:
        self._checkers.decode_began(self._spec.transfer_id, self._is_verified)
        _decode(self._worker, self._leg, self._end, self._cache, self._kv_bytes)

    def _stop(self) -> None:
        self._driver.stop()
        self._link.close_all()
