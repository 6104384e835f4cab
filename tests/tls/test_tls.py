"""Certificates and contexts: who may connect, who may not, and what the operator is told."""

import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from farfill import tls
from farfill.errors import ConfigurationError, PeerError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    tls.write_development_ca(folder)
    return folder


@pytest.fixture(scope="module")
def east(folder: Path) -> tls.TlsFiles:
    return tls.write_certificate(folder, "prefill-east", ["east.example", "10.0.0.7"])


@pytest.fixture(scope="module")
def gateway(folder: Path) -> tls.TlsFiles:
    return tls.write_certificate(folder, "front", role=tls.PeerRole.GATEWAY)


def handshake(
    server: ssl.SSLContext, client: ssl.SSLContext, server_hostname: str = "localhost"
) -> tuple[tls.PeerIdentity, tls.PeerIdentity, str | None]:
    """Both ends' view of the other over a real socket pair; raises the error of whichever end refused."""
    ours, theirs = socket.socketpair()
    seen: list[tls.PeerIdentity] = []
    refused: list[Exception] = []

    def accept() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as connection:
                seen.append(tls.peer_identity(connection))
                connection.sendall(b"!")
        except OSError as error:
            refused.append(error)
            theirs.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=server_hostname) as connection:
            # In TLS 1.3 the client learns that it was refused only when it reads.
            assert connection.recv(1) == b"!"
            return tls.peer_identity(connection), seen[0], connection.version()
    finally:
        ours.close()
        thread.join()
        if refused:
            raise refused[0]


def test_both_ends_learn_name_and_role(east: tls.TlsFiles, gateway: tls.TlsFiles) -> None:
    server, client, version = handshake(tls.server_context(east), tls.client_context(gateway))
    assert server == tls.PeerIdentity("prefill-east", tls.PeerRole.WORKER)
    assert client == tls.PeerIdentity("front", tls.PeerRole.GATEWAY)
    assert version == "TLSv1.3"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "east.example", "10.0.0.7"])
def test_every_stated_host_is_accepted(east: tls.TlsFiles, gateway: tls.TlsFiles, host: str) -> None:
    assert handshake(tls.server_context(east), tls.client_context(gateway), host)[0].name == "prefill-east"


def test_another_host_is_refused(east: tls.TlsFiles, gateway: tls.TlsFiles) -> None:
    with pytest.raises(OSError, match=r"(?i)hostname mismatch|certificate|alert|EOF|reset|broken"):
        handshake(tls.server_context(east), tls.client_context(gateway), "west.example")


def test_client_without_certificate_is_refused(east: tls.TlsFiles) -> None:
    client = ssl.create_default_context(cafile=str(east.ca))
    with pytest.raises(ssl.SSLError, match="(?i)certificate"):
        handshake(tls.server_context(east), client)


def test_client_below_tls_1_3_is_refused(east: tls.TlsFiles, gateway: tls.TlsFiles) -> None:
    client = tls.client_context(gateway)
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)unsupported protocol|version"):
        handshake(tls.server_context(east), client)


def test_client_of_a_foreign_ca_is_refused(east: tls.TlsFiles, tmp_path: Path) -> None:
    tls.write_development_ca(tmp_path)
    stranger = tls.write_certificate(tmp_path, "prefill-east")
    client = tls.client_context(stranger)
    client.load_verify_locations(east.ca)  # it trusts us; we must not trust it
    with pytest.raises(ssl.SSLError, match="(?i)certificate"):
        handshake(tls.server_context(east), client)


def test_expired_client_is_refused_by_the_server(folder: Path, east: tls.TlsFiles) -> None:
    files = tls.write_certificate(folder, "late", days=1e-5)  # begins five minutes ago, lasts a second
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(files.ca)
    with pytest.raises(ConfigurationError, match="expired on"):
        tls.client_context(files)
    client.load_cert_chain(files.certificate, files.key)
    with pytest.raises(ssl.SSLError, match="(?i)certificate.*expired"):
        handshake(tls.server_context(east), client)


def test_keys_are_for_their_owner_only(east: tls.TlsFiles) -> None:
    for key in (east.key, east.ca.with_name("ca.key")):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(east.certificate.stat().st_mode) & 0o444 == 0o444


def test_renewed_key_does_not_inherit_a_wide_mode(folder: Path) -> None:
    files = tls.write_certificate(folder, "renewed")
    files.key.chmod(0o644)
    tls.write_certificate(folder, "renewed")
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600


def test_a_ca_is_never_overwritten(folder: Path) -> None:
    before = (folder / "ca.key").read_bytes()
    with pytest.raises(ConfigurationError, match="exists"):
        tls.write_development_ca(folder)
    assert (folder / "ca.key").read_bytes() == before


def test_a_certificate_never_outlives_its_ca(tmp_path: Path) -> None:
    tls.write_development_ca(tmp_path, days=10)
    files = tls.write_certificate(tmp_path, "worker", days=90)
    tls.check_files(files)
    with pytest.raises(ConfigurationError, match="expired on"):
        tls.check_files(files, now=datetime.now(UTC) + timedelta(days=11))


@pytest.mark.parametrize("name", ["", "ca", "../evil", "a b", ".hidden", "é", "x" * 65, "a/b", "a\nb"])
def test_bad_names_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        tls.write_certificate(folder, name)
    assert refusal.value.code == "config_invalid"
    assert refusal.value.field == "name"


def test_bad_host_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="neither a DNS name nor an IP address"):
        tls.write_certificate(folder, "w", ["not a host"])


def refusal(files: tls.TlsFiles, now: datetime | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        tls.check_files(files, now=now)
    assert caught.value.code == "certificate_invalid"
    return caught.value.message


def test_each_wrong_file_gets_its_own_reason(folder: Path, east: tls.TlsFiles, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    other = tls.write_certificate(folder, "other")
    tls.write_development_ca(tmp_path)
    absent, garbage = tmp_path / "absent.pem", tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    future = tls.write_certificate(folder, "future", valid_from=now + timedelta(days=2))

    assert refusal(tls.TlsFiles(absent, east.certificate, east.key)).startswith(f"{absent} does not exist")
    assert refusal(tls.TlsFiles(east.ca, absent, east.key)).startswith(f"{absent} does not exist")
    assert refusal(tls.TlsFiles(east.ca, east.certificate, absent)).startswith(f"{absent} does not exist")
    assert refusal(tls.TlsFiles(garbage, east.certificate, east.key)) == f"{garbage} holds no PEM certificate"
    assert refusal(tls.TlsFiles(east.ca, east.certificate, garbage)) == f"{garbage} holds no PEM private key"
    assert refusal(tls.TlsFiles(tmp_path, east.certificate, east.key)).startswith(f"{tmp_path} cannot be read")
    assert f"{other.key} is not the key of {east.certificate}" in refusal(
        tls.TlsFiles(east.ca, east.certificate, other.key)
    )
    assert "is not signed by the CA in" in refusal(tls.TlsFiles(tmp_path / "ca.pem", east.certificate, east.key))
    assert f"{future.certificate} is not valid before" in refusal(future)
    assert f"{east.certificate} expired on" in refusal(east, now + timedelta(days=91))


def test_the_same_checks_stand_before_both_contexts(east: tls.TlsFiles, tmp_path: Path) -> None:
    broken = tls.TlsFiles(east.ca, east.certificate, tmp_path / "absent.key")
    for make in (tls.server_context, tls.client_context):
        with pytest.raises(ConfigurationError, match="does not exist"):
            make(broken)


def test_check_returns_the_identity(gateway: tls.TlsFiles) -> None:
    assert tls.check_files(gateway) == tls.PeerIdentity("front", tls.PeerRole.GATEWAY)


def test_no_tls_is_no_identity() -> None:
    with pytest.raises(PeerError) as caught:
        tls.peer_name(None)
    assert caught.value.code == "peer_unauthenticated"
