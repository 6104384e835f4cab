"""Who a peer is: certificates, TLS 1.3 contexts with mutual authentication, and a development CA.

Not a production CA: `farfill certs` exists so that a laptop and the tests run the real, authenticated path. In
production the three files of `TlsFiles` come from the operator's own CA. Nor is this the sealing of chunks
(`farfill.kv.sealing`): TLS protects the control connections, on which the keys of the chunks travel.

A certificate's common name is the peer's name (the worker's, the relay's), its organizational unit the role it may
act in: `gateway`, `worker` or `relay`. Host names and addresses are only where it may be reached.
"""

import ipaddress
import itertools
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from farfill.errors import ClientError, ConfigurationError, PeerError

# RFC 5280 allows a common name 64 characters; the characters are those that need no quoting in logs, URLs and labels.
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
# Clocks of two machines differ; a certificate made just now must hold on the one that is behind.
CLOCK_SKEW: Final = timedelta(minutes=5)


class PeerRole(StrEnum):
    GATEWAY = "gateway"
    WORKER = "worker"
    RELAY = "relay"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A process's TLS identity as PEM files: the CA whose peers it trusts, its own certificate (chain) and key."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who stands at the other end of an authenticated connection. `role` is None where the certificate states none."""

    name: str
    role: PeerRole | None


# --- making certificates -------------------------------------------------------------------------------------------


def write_development_ca(folder: Path, *, days: float = 365) -> tuple[Path, Path]:
    """Makes a CA in `folder`: `ca.pem` and `ca.key` (mode 0600). Returns both paths. Never overwrites a CA.

    Raises:
        ConfigurationError: `certificate_invalid` where `folder` already holds a CA or cannot be written.
    """
    certificate_path, key_path = folder / "ca.pem", folder / "ca.key"
    for path in (certificate_path, key_path):
        if path.exists():
            raise ConfigurationError(
                "certificate_invalid", f"{path} exists; a new CA there would orphan every certificate it has signed"
            )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "farfill development CA")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(key_path, _pem(key), secret=True)
    _write(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), secret=False)
    return certificate_path, key_path


def write_certificate(
    folder: Path,
    name: str,
    hosts: Sequence[str] = (),
    days: float = 90,
    *,
    role: PeerRole = PeerRole.WORKER,
    valid_from: datetime | None = None,
) -> TlsFiles:
    """Signs a certificate for the peer `name` with the CA in `folder`: `NAME.pem`, `NAME.key` (mode 0600).

    Args:
        hosts: DNS names and IP addresses, besides localhost, 127.0.0.1 and ::1, at which clients reach the peer.
        days: validity, never beyond the CA's own.
        valid_from: start of the validity; now (minus five minutes for clocks that differ) if None.

    Raises:
        ConfigurationError: `config_invalid` for a name or host that cannot be in a certificate,
            `certificate_invalid` where the folder holds no usable CA.
    """
    if not NAME_PATTERN.fullmatch(name) or name == "ca":
        raise ConfigurationError(
            "config_invalid",
            f"a peer's name is 1 to 64 letters, digits, '.', '_' or '-', begins with a letter or digit "
            f"and is not 'ca'; got {name!r}",
            field="name",
        )
    ca_path = folder / "ca.pem"
    ca, ca_key = _load_certificates(ca_path)[0], _load_key(folder / "ca.key")
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or ca.public_key() != ca_key.public_key():
        raise ConfigurationError("certificate_invalid", f"{folder / 'ca.key'} is not the key of {ca_path}")
    key = ec.generate_private_key(ec.SECP256R1())
    start = valid_from if valid_from is not None else datetime.now(UTC) - CLOCK_SKEW
    start = max(start, ca.not_valid_before_utc)
    end = min(start + timedelta(days=days), ca.not_valid_after_utc)
    if end <= start:
        raise ConfigurationError(
            "certificate_invalid",
            f"{ca_path} ends on {ca.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, before the certificate would begin",
        )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(
            x509.Name(
                [
                    x509.NameAttribute(NameOID.COMMON_NAME, name),
                    x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role.value),
                ]
            )
        )
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        # Workers serve the gateway and call stores: every peer is at times a client and at times a server.
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in (*LOCAL_HOSTS, *hosts)]), False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    files = TlsFiles(ca_path, folder / f"{name}.pem", folder / f"{name}.key")
    _write(files.key, _pem(key), secret=True)
    _write(files.certificate, certificate.public_bytes(serialization.Encoding.PEM), secret=False)
    return files


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", host):
            raise ConfigurationError(
                "config_invalid", f"{host!r} is neither a DNS name nor an IP address", field="hosts"
            ) from None
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, *, secret: bool) -> None:
    """Writes a new inode, so that a secret never stands in a file that others had open, or with a wider mode."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        raise ConfigurationError("certificate_invalid", f"{path}: cannot be written: {error.strerror}") from error


# --- checking and using them ---------------------------------------------------------------------------------------


def check_files(files: TlsFiles, *, now: datetime | None = None) -> PeerIdentity:
    """Checks that the three files exist, belong together and are valid now; returns the identity they prove.

    Raises:
        ConfigurationError: `certificate_invalid`, naming the file and the reason: missing, unreadable, not PEM,
            expired, not yet valid, signed by another CA, a key of another certificate, no usable name.
    """
    now = now or datetime.now(UTC)
    authorities = _load_certificates(files.ca)
    chain = _load_certificates(files.certificate)
    key = _load_key(files.key)
    leaf = chain[0]
    for path, certificate in ((files.ca, authorities[0]), *((files.certificate, one) for one in chain)):
        if now < certificate.not_valid_before_utc:
            _refuse(path, f"is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")
        if now > certificate.not_valid_after_utc:
            _refuse(path, f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if leaf.public_key() != key.public_key():
        _refuse(files.key, f"is not the key of {files.certificate}")
    if not _leads_to(chain, authorities):
        _refuse(files.certificate, f"is not signed by the CA in {files.ca}")
    return _identity_of(files.certificate, leaf)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """The context of a listener: TLS 1.3, every client must show a certificate of our CA.

    Raises:
        ConfigurationError: `certificate_invalid` (see `check_files`).
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    # Without tickets there is no resumption, so each connection proves again that its certificate is still valid.
    context.num_tickets = 0
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """The context of a client: TLS 1.3, shows our certificate, checks the server's CA and its host name.

    Raises:
        ConfigurationError: `certificate_invalid` (see `check_files`).
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    context.check_hostname = True
    return context


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener on `host`: where one may do without TLS or keys.

    A name other than localhost may resolve to anything: no.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def peer_identity(connection: Any) -> PeerIdentity:
    """The proven identity of a connection's peer.

    Args:
        connection: an `ssl.SSLSocket` or `ssl.SSLObject` (asyncio: `transport.get_extra_info("ssl_object")`).

    Raises:
        PeerError: `peer_unauthenticated` where there is no TLS, no certificate, or no usable name in it.
    """
    subject = (connection.getpeercert() or {}).get("subject", ()) if connection is not None else ()
    fields: dict[str, str] = {}
    for relative_name in subject:
        for field, value in relative_name:
            if field in fields:
                raise PeerError("peer_unauthenticated", f"the peer's certificate has more than one {field}")
            fields[field] = value
    name = fields.get("commonName", "")
    if not NAME_PATTERN.fullmatch(name):
        raise PeerError("peer_unauthenticated", "the peer showed no certificate with a usable common name")
    return PeerIdentity(name, _role(fields.get("organizationalUnitName")))


def peer_name(connection: Any) -> str:
    """The proven name of a connection's peer: its certificate's common name. Raises as `peer_identity`."""
    return peer_identity(connection).name


def require_role(connection: Any, role: PeerRole, what: str) -> None:
    """A peer whose certificate states another role than `role` is refused; one whose certificate states none may.

    Args:
        connection: as `peer_identity`'s.
        what: what only that role does, for the message: "gateways reserve staging".

    Raises:
        ClientError: `forbidden`. PeerError: `peer_unauthenticated` (see `peer_identity`).
    """
    peer = peer_identity(connection)
    if peer.role not in (None, role):
        raise ClientError("forbidden", f"{peer.name} has a {peer.role}'s certificate; {what}")


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    check_files(files)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(files.ca)
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        _refuse(files.certificate, f"is refused by OpenSSL: {error}")
    return context


def _identity_of(path: Path, certificate: x509.Certificate) -> PeerIdentity:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    units = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    if len(names) != 1 or len(units) > 1 or not NAME_PATTERN.fullmatch(str(names[0].value)):
        _refuse(path, "must have one common name (the peer's name: letters, digits, '.', '_', '-') and at most one OU")
    return PeerIdentity(str(names[0].value), _role(str(units[0].value) if units else None))


def _role(unit: str | None) -> PeerRole | None:
    return next((role for role in PeerRole if role.value == unit), None)


def _leads_to(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Whether the chain's certificates sign each other and the last one is signed by one of the authorities."""
    for child, parent in itertools.pairwise(chain):
        if not _issued(child, parent):
            return False
    return any(_issued(chain[-1], authority) or chain[-1] == authority for authority in authorities)


def _issued(child: x509.Certificate, parent: x509.Certificate) -> bool:
    try:
        child.verify_directly_issued_by(parent)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _load_certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError:
        _refuse(path, "holds no PEM certificate")


def _load_key(path: Path) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(_read(path), password=None)
    except TypeError:
        _refuse(path, "is encrypted; farfill needs a key without a password")
    except ValueError:
        _refuse(path, "holds no PEM private key")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        _refuse(path, "does not exist (`farfill certs` makes development certificates)")
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ConfigurationError("certificate_invalid", f"{path} {reason}", field="tls")
