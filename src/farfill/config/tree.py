"""Everything an operator can set, as one typed, frozen tree: sections, fields, defaults, ranges and what they mean.

Not here: where values come from (`load`), and constants that nobody should have to tune (they stand beside their use).
Every field says in its `Meta` what it is, in words that errors and the example file print;
`extra` marks secrets (never shown) and paths (relative ones are taken from the configuration file's folder).
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from farfill.router.policy import Placement
from farfill.tls import NAME_PATTERN, TlsFiles

_SECRET = {"secret": True}
_PATH = {"path": True}
_NAME = f"^{NAME_PATTERN.pattern}$"

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Answer = Literal["local", "fail"]
# Larger than any machine's memory is a typing error, not a wish.
Bytes = Annotated[int, Meta(ge=1024**2, le=64 * 1024**4)]


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class WorkerPeer(Struct, frozen=True, kw_only=True):
    """A worker that the gateway may use."""

    name: Annotated[str, Meta(pattern=_NAME, description="the common name of the worker's certificate")]
    url: Annotated[str, Meta(pattern="^https?://", description="base URL of its API: https://host:port")]
    role: Annotated[Role, Meta(description="what it may be used for")]
    site: Annotated[str, Meta(min_length=1, max_length=64, description="the datacenter or machine room it stands in")]
    control_url: Annotated[
        str,
        Meta(
            pattern="^(https?://.*)?$",
            description="base URL of the connector's control API beside a vLLM; empty: `url` (farfill's own worker)",
        ),
    ] = ""


class RelayPeer(Struct, frozen=True, kw_only=True):
    """The relay that transfers go through with `placement: relay`."""

    name: Annotated[str, Meta(pattern=_NAME, description="the common name of the relay's certificate")]
    url: Annotated[str, Meta(pattern="^https?://", description="base URL of its control API: https://host:port")]


class Tenant(Struct, frozen=True, kw_only=True):
    """Who may call the gateway."""

    name: Annotated[str, Meta(pattern=_NAME, description="shown in metrics and logs")]
    api_key: Annotated[
        str,
        Meta(
            min_length=16,
            max_length=256,
            pattern="^[!-~]+$",
            description="what clients send as 'Authorization: Bearer ...'",
            extra=_SECRET,
        ),
    ]


class FallbackSettings(Struct, frozen=True, kw_only=True):
    """What happens when a remote prefill fails before the first token: for each class of failure, and how often."""

    miss: Annotated[Answer, Meta(description="the cache is gone from the store")] = "local"
    transport: Annotated[Answer, Meta(description="connection refused or lost, a process killed")] = "local"
    timeout: Annotated[Answer, Meta(description="one of the clocks ran out")] = "local"
    compatibility: Annotated[Answer, Meta(description="the two sides' fingerprints differ")] = "local"
    integrity: Annotated[Answer, Meta(description="a chunk or the manifest does not hold")] = "local"
    overload: Annotated[Answer, Meta(description="queue, quota or staging full")] = "local"
    burst: Annotated[float, Meta(ge=0, le=1_000_000, description="fallbacks that may come at once")] = 20.0
    per_s: Annotated[float, Meta(ge=0, le=1_000_000, description="fallbacks regained each second")] = 1.0


class ClockSettings(Struct, frozen=True, kw_only=True):
    """Every wait of a request has its own clock."""

    queue_s: Annotated[Seconds, Meta(description="waiting for an engine's place")] = 30.0
    setup_s: Annotated[Seconds, Meta(description="connecting and reserving staging")] = 5.0
    stall_s: Annotated[Seconds, Meta(description="the store is silent, or owes a chunk that does not come")] = 10.0
    produce_s: Annotated[Seconds, Meta(description="prefill makes no new chunk after its first one")] = 60.0
    transfer_s: Annotated[Seconds, Meta(description="from reservation to a verified cache")] = 300.0
    verify_s: Annotated[Seconds, Meta(description="from the last chunk to a verified cache")] = 10.0
    request_s: Annotated[Seconds, Meta(description="the whole request")] = 600.0
    lease_s: Annotated[Seconds, Meta(description="a store's lease; renewed while the transfer runs")] = 30.0
    poll_s: Annotated[Seconds, Meta(description="between two looks at a worker")] = 2.0
    ready_s: Annotated[Seconds, Meta(description="how long one answer of /ready holds")] = 3.0
    drain_s: Annotated[Seconds, Meta(description="on SIGTERM, for requests in flight to end")] = 30.0


class LimitSettings(Struct, frozen=True, kw_only=True):
    """What a client may send, and how much of it at once."""

    body_bytes: Annotated[int, Meta(ge=1024, le=1024**3, description="largest request body")] = 16 * 1024**2
    requests: Annotated[int, Meta(ge=1, le=1_000_000, description="requests in flight; more get 503 queue_full")] = 1024


class GatewaySettings(Struct, frozen=True, kw_only=True):
    """The OpenAI-compatible front door, and the router behind it."""

    name: Annotated[str, Meta(pattern=_NAME, description="must be the common name of its certificate")] = "gateway"
    host: Annotated[str, Meta(min_length=1, description="address to listen on; off loopback tenants are required")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="0 takes a free port (see --ready-file)")] = 8000
    threshold_tokens: Annotated[
        int, Meta(ge=0, le=100_000_000, description="more uncached prompt tokens than this go to a prefill worker")
    ] = 512
    placement: Annotated[
        Placement,
        Meta(description="which store a transfer goes through: the prefill side's, the decode side's, a relay"),
    ] = Placement.PRODUCER
    chunk_tokens: Annotated[
        int,
        Meta(ge=1, le=65_536, description="token grid of chunks; equal to the workers' own for bit-identical output"),
    ] = 256
    relay: RelayPeer | None = None
    workers: Annotated[tuple[WorkerPeer, ...], Meta(max_length=10_000, description="the workers it may use")] = ()
    tenants: Annotated[
        tuple[Tenant, ...], Meta(max_length=100_000, description="none: anybody may call, on loopback only")
    ] = ()
    fallback: FallbackSettings = FallbackSettings()
    clocks: ClockSettings = ClockSettings()
    limits: LimitSettings = LimitSettings()


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """One engine instance in a role, and the store in it."""

    name: Annotated[str, Meta(pattern=_NAME, description="must be the common name of its certificate")] = "worker"
    role: Annotated[Role, Meta(description="a prefill worker serves no client")] = Role.BOTH
    site: Annotated[str, Meta(min_length=1, max_length=64, description="the datacenter or machine room")] = "local"
    engine: Annotated[
        Literal["hf", "vllm"],
        Meta(description="what computes: Hugging Face Transformers on PyTorch, or vLLM with farfill's connector"),
    ] = "hf"
    model: Annotated[
        str, Meta(description="a local Hugging Face folder; empty: the small model of `farfill model`", extra=_PATH)
    ] = ""
    served_name: Annotated[str, Meta(description="the name clients use; empty: the folder's name")] = ""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Meta(description="of weights, computation and cache; the same on both sides; float32 is fastest on most CPUs"),
    ] = "float32"
    max_model_len: Annotated[
        int, Meta(ge=0, le=100_000_000, description="prompt and output tokens together; 0: the model's own")
    ] = 0
    threads: Annotated[
        int, Meta(ge=1, le=4096, description="CPU threads for one operation; sites that agree bit for bit use the same")
    ] = 1
    chunk_tokens: Annotated[int, Meta(ge=1, le=65_536, description="tokens computed in one step of prefill")] = 256
    running: Annotated[int, Meta(ge=1, le=10_000, description="requests that the engine works on at once")] = 8
    requests: Annotated[int, Meta(ge=1, le=100_000, description="requests in flight; more get 503 queue_full")] = 64
    prefix_cache_bytes: Annotated[
        int, Meta(ge=0, le=64 * 1024**4, description="memory for caches of earlier prompts; 0: none")
    ] = 256 * 1024**2
    host: Annotated[str, Meta(min_length=1, description="address to listen on; off loopback tls is required")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="the API; 0 takes a free port (see --ready-file)")] = 8101
    data_port: Annotated[Port, Meta(description="the store's data plane; 0 takes a free port")] = 8102
    advertise_host: Annotated[str, Meta(description="where peers reach this worker; empty: `host`")] = ""
    store_bytes: Annotated[Bytes, Meta(description="memory for chunks in transit")] = 1024**3
    connections: Annotated[int, Meta(ge=1, le=64, description="data connections for each transfer")] = 4
    drain_s: Annotated[Seconds, Meta(description="on SIGTERM, for requests and leases to end")] = 30.0


class RelaySettings(Struct, frozen=True, kw_only=True):
    """A store alone, between the sites; it cannot read what it holds."""

    name: Annotated[str, Meta(pattern=_NAME, description="must be the common name of its certificate")] = "relay"
    host: Annotated[str, Meta(min_length=1, description="address to listen on; off loopback tls is required")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="the control API; 0 takes a free port (see --ready-file)")] = 8201
    data_port: Annotated[Port, Meta(description="the data plane; 0 takes a free port")] = 8202
    advertise_host: Annotated[str, Meta(description="where peers reach this relay; empty: `host`")] = ""
    store_bytes: Annotated[Bytes, Meta(description="memory for chunks in transit")] = 4 * 1024**3
    drain_s: Annotated[Seconds, Meta(description="on SIGTERM, for leases to end")] = 30.0


class TlsSettings(Struct, frozen=True, kw_only=True):
    """This process's certificate. Without it a process listens on loopback only, and knows no peer's name."""

    ca: Annotated[str, Meta(min_length=1, description="PEM file of the CA whose peers are trusted", extra=_PATH)]
    certificate: Annotated[str, Meta(min_length=1, description="PEM file of the own certificate", extra=_PATH)]
    key: Annotated[str, Meta(min_length=1, description="PEM file of the certificate's key, mode 0600", extra=_PATH)]

    def files(self) -> TlsFiles:
        return TlsFiles(Path(self.ca), Path(self.certificate), Path(self.key))


class Config(Struct, frozen=True, kw_only=True):
    """The whole tree. A process reads the section of its own kind, and `tls`."""

    gateway: GatewaySettings = GatewaySettings()
    worker: WorkerSettings = WorkerSettings()
    relay: RelaySettings = RelaySettings()
    tls: TlsSettings | None = None
