"""The one shell of transfers: a process's links to stores, its timer, and the transfers under way.

Not here: any decision about a transfer (`sender`, `receiver`), any byte of one (`outgoing`, `incoming`).
"""

import random
import ssl
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from farfill.errors import ClientError, LocalProtocolError
from farfill.kv.fingerprint import Fingerprint
from farfill.kv.manifest import encode_manifest, manifest_for
from farfill.kv.plan import plan_chunks
from farfill.kv.spec import CacheLayout
from farfill.store.local import LocalStore
from farfill.transfer.connections import TcpLink
from farfill.transfer.events import LinkSettings
from farfill.transfer.incoming import Incoming
from farfill.transfer.lanes import LaneLink
from farfill.transfer.link import Link
from farfill.transfer.outgoing import Outgoing
from farfill.transfer.room import Room
from farfill.transfer.spec import StoreAddress, TransferSpec
from farfill.transfer.timer import DeadlineTimer

# A worker talks to the stores of its peers and a few relays; each costs two threads a connection.
LINKS_MAX: Final = 256
BUFFERED_BYTES_MAX: Final = 2 * 1024**3


class TransferNode:
    """Sends and receives transfers for one process. Every method may be called from any thread.

    Args:
        identity: this process's name (its certificate's common name); the store checks it against the reservation.
        local_store: the store in this process, if it has one; transfers through it touch no socket.
        ssl_context: a TLS client context; None where all stores are on loopback.
        connections_per_peer: data connections to each store, shared by all transfers with it.
        buffered_bytes_max: published chunks that no store has yet; `Outgoing.publish` waits beyond it.
        settings: windows, retries and back-off; `slots` and `jitter` in it are replaced.
    """

    def __init__(
        self,
        identity: str,
        local_store: LocalStore | None,
        ssl_context: ssl.SSLContext | None,
        *,
        connections_per_peer: int = 2,
        buffered_bytes_max: int = BUFFERED_BYTES_MAX,
        settings: LinkSettings | None = None,
    ) -> None:
        self.identity = identity
        self._local_store = local_store
        self._ssl_context = ssl_context
        self._settings = replace(settings or LinkSettings(), slots=connections_per_peer)
        self._room = Room(buffered_bytes_max)
        self._timer = DeadlineTimer(f"farfill-transfer-timer-{identity}")
        self._lock = threading.Lock()
        self._links: dict[StoreAddress | None, LaneLink | TcpLink] = {}
        self._ends: set[Outgoing | Incoming] = set()
        self._is_closed = False

    @property
    def buffered_bytes(self) -> int:
        """Of published chunks that no store has yet."""
        return self._room.taken_bytes

    def send(
        self, spec: TransferSpec, layout: CacheLayout, fingerprint: Fingerprint, prefix_token_ids: Sequence[int]
    ) -> Outgoing:
        """Begins to send: the manifest goes out at once, data as it is published.

        Args:
            prefix_token_ids: the prompt's token ids but the last.

        Raises:
            ClientError: `invalid_request` where the spec's prefix_tokens is not their number.
            ConfigurationError: `config_invalid`, from `plan_chunks`.
        """
        self._check(spec, prefix_token_ids)
        manifest = manifest_for(
            transfer_id=spec.transfer_id,
            epoch=spec.epoch,
            fingerprint=fingerprint,
            layout=layout,
            prefix_token_ids=prefix_token_ids,
            chunk_tokens=spec.chunk_tokens,
        )
        link = self._link_to(spec.store)
        end = Outgoing(
            spec,
            manifest.chunks,
            encode_manifest(manifest),
            link=link,
            timer=self._timer,
            room=self._room,
            settings=self._new_settings(),
        )
        self._watch(end)
        return end

    def receive(
        self,
        spec: TransferSpec,
        layout: CacheLayout,
        fingerprint: Fingerprint,
        prefix_token_ids: Sequence[int],
        *,
        held_tokens: int = 0,
    ) -> Incoming:
        """Begins to receive. Arguments and errors as `send`.

        Args:
            held_tokens: this side has the rows of so many tokens already; chunks of none but those are not fetched.
        """
        self._check(spec, prefix_token_ids)
        end = Incoming(
            spec,
            plan_chunks(layout, spec.prefix_tokens, spec.chunk_tokens),
            layout=layout,
            fingerprint=fingerprint,
            prefix_token_ids=prefix_token_ids,
            link=self._link_to(spec.store),
            timer=self._timer,
            settings=self._new_settings(),
            held_tokens=held_tokens,
        )
        self._watch(end)
        return end

    def close(self) -> None:
        """Cancels what is under way and ends every connection and thread. Idempotent.

        Not to be called from a future's callback: it waits for the threads that run those.
        """
        with self._lock:
            self._is_closed = True
            ends, links = list(self._ends), list(self._links.values())
        for end in ends:
            end.cancel("this process stops")
        for link in links:
            link.close()
        self._timer.stop()

    def _check(self, spec: TransferSpec, prefix_token_ids: Sequence[int]) -> None:
        if len(prefix_token_ids) != spec.prefix_tokens:
            raise ClientError(
                "invalid_request",
                f"the transfer is of {spec.prefix_tokens} tokens; the prompt has {len(prefix_token_ids)} but its last",
                field="kv_transfer_params.farfill.prefix_tokens",
            )

    def _new_settings(self) -> LinkSettings:
        return replace(self._settings, jitter=random.random())

    def _watch(self, end: Outgoing | Incoming) -> None:
        with self._lock:
            self._ends.add(end)
            is_closed = self._is_closed
        end.future.add_done_callback(lambda _: self._unwatch(end))
        if is_closed:
            end.cancel("this process stops")

    def _unwatch(self, end: Outgoing | Incoming) -> None:
        with self._lock:
            self._ends.discard(end)

    def _link_to(self, store: StoreAddress) -> Link:
        local = self._local_store
        is_local = local is not None and local.instance == store.instance
        name = None if is_local else store
        unused: list[TcpLink] = []
        with self._lock:
            if self._is_closed:
                raise LocalProtocolError("the transfer node is closed")
            link = self._links.get(name)
            if link is None:
                if len(self._links) >= LINKS_MAX:
                    unused = self._drop_unused()
                if is_local:
                    assert local is not None
                    link = LaneLink(local)
                else:
                    link = TcpLink(store, self._ssl_context)
                self._links[name] = link
        for one in unused:
            one.close()
        return link

    def _drop_unused(self) -> list[TcpLink]:
        """Links to stores that are gone, or that nobody has used for a while."""
        unused = {name: link for name, link in self._links.items() if isinstance(link, TcpLink) and link.is_unused}
        for name in unused:
            del self._links[name]
        return list(unused.values())
