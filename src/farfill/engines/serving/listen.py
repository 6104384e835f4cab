"""Listening sockets for a worker's API, and the file that says it listens. Not the data plane's sockets."""

import errno
import os
import socket
from pathlib import Path
from typing import Any, Final

import msgspec

from farfill.errors import ConfigurationError

BACKLOG: Final = 1024  # connections that wait to be accepted: a gateway opens many at once after a restart


def bind(host: str, port: int, *, field: str) -> socket.socket:
    """A TCP socket, listening. `port` 0 takes a free one.

    Raises:
        ConfigurationError: `port_in_use`, or `config_invalid` for an address that is not this machine's; both name
            `field`.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigurationError("config_invalid", f"the host {host!r} is no address: {error}", field=field) from error
    made = socket.socket(family, kind, protocol)
    try:
        # A restarted worker gets its port back although old connections linger in TIME_WAIT.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                "port_in_use", f"port {port} on {host} is taken by another process; choose another one", field=field
            ) from error
        raise ConfigurationError(
            "config_invalid", f"cannot listen on {host} port {port}: {error.strerror}", field=field
        ) from error
    return made


def url_of(scheme: str, host: str, port: int) -> str:
    """A base URL; IPv6 addresses get their brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_ready_file(path: Path) -> None:
    """Before anything is served: that the file has a folder to stand in.

    Raises:
        ConfigurationError: `config_invalid`, naming the path.
    """
    if not path.parent.is_dir():
        raise ConfigurationError("config_invalid", f"{path}: there is no folder {path.parent}", field="ready_file")
    if path.is_dir():
        raise ConfigurationError("config_invalid", f"{path} is a folder, not a file", field="ready_file")


def write_ready_file(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON so that a reader sees all of it or no file.

    Raises:
        ConfigurationError: `config_invalid`, naming the path, where it can't be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode(content))
        temporary.replace(path)
    except OSError as error:
        raise ConfigurationError(
            "config_invalid", f"{path} cannot be written: {error.strerror}", field="ready_file"
        ) from error
