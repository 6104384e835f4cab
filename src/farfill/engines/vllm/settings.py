"""What an operator tells the connector: `kv_connector_extra_config` in vLLM's `--kv-transfer-config`, read and checked.

Not here: vLLM's own settings, of which `identity` reads those that matter to a peer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from farfill.config.schema import nearest
from farfill.config.tree import Role
from farfill.engines.serving.settings import WorkerSettings
from farfill.errors import ConfigurationError
from farfill.tls import NAME_PATTERN, TlsFiles

ROLES: Final = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}
_SECTION: Final = "kv_connector_extra_config"


class _Tls(Struct, frozen=True, forbid_unknown_fields=True):
    ca: str
    certificate: str
    key: str


_Port = Annotated[int, Meta(ge=0, le=65535)]


class _Extra(Struct, frozen=True, kw_only=True):
    """The fields, as in the `worker` section of farfill's own configuration. `port` is the control API's."""

    name: Annotated[str, Meta(pattern=f"^{NAME_PATTERN.pattern}$")] = "worker"
    site: Annotated[str, Meta(min_length=1, max_length=64)] = "local"
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: _Port = 8101
    data_port: _Port = 8102
    advertise_host: str = ""
    store_bytes: Annotated[int, Meta(ge=1024**2, le=64 * 1024**4)] = 1024**3
    connections: Annotated[int, Meta(ge=1, le=64)] = 4
    tls: _Tls | None = None
    ready_file: str | None = None


def read_settings(kv_role: str | None, extra: Mapping[str, Any]) -> WorkerSettings:
    """The connector's settings.

    Raises:
        ConfigurationError: `config_unknown_field` (with the nearest right name), `config_invalid`,
            `insecure_listener`; each names the field.
    """
    known = _Extra.__struct_fields__
    for name in extra:
        if name not in known:
            raise ConfigurationError(
                "config_unknown_field",
                f"{_SECTION}.{name} is unknown{nearest(str(name), known)}",
                field=f"{_SECTION}.{name}",
            )
    if kv_role not in ROLES:
        raise ConfigurationError(
            "config_invalid", f"kv_role must be one of {', '.join(ROLES)}, not {kv_role!r}", field="kv_role"
        )
    try:
        read = msgspec.convert(dict(extra), _Extra)
    except msgspec.ValidationError as error:
        raise ConfigurationError("config_invalid", f"{_SECTION}: {error}", field=_SECTION) from error
    tls = None if read.tls is None else TlsFiles(Path(read.tls.ca), Path(read.tls.certificate), Path(read.tls.key))
    settings = WorkerSettings(
        name=read.name,
        role=ROLES[kv_role],
        site=read.site,
        host=read.host,
        port=read.port,
        data_port=read.data_port,
        advertise_host=read.advertise_host,
        store_bytes=read.store_bytes,
        connections=read.connections,
        tls=tls,
        ready_file=None if read.ready_file is None else Path(read.ready_file),
    )
    settings.check()
    return settings
