"""`farfill certs`: a development CA and the certificates that it signs, and a look at a certificate."""

from pathlib import Path

import click

from farfill import tls


@click.group(short_help="A development CA and certificates.")
def certs() -> None:
    """A development CA and certificates, for mutual TLS between gateway, workers and relays.

    \b
    Examples:
      farfill certs init certs
      farfill certs issue certs prefill-east --host east.example --host 10.0.0.7
      farfill certs issue certs gateway --role gateway
      farfill certs check certs/ca.pem certs/prefill-east.pem certs/prefill-east.key
    """


@certs.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="How long it is valid.")
def init(folder: Path, days: int) -> None:
    """Make a CA in FOLDER: ca.pem and ca.key. An existing one is never overwritten."""
    certificate, key = tls.write_development_ca(folder, days=days)
    click.echo(f"{certificate}\n{key} (keep it secret: whoever has it can be any peer)")


@certs.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("name")
@click.option("--host", "hosts", multiple=True, help="DNS name or IP address at which peers reach it. Repeatable.")
@click.option(
    "--role",
    type=click.Choice([one.value for one in tls.PeerRole]),
    default=tls.PeerRole.WORKER.value,
    show_default=True,
    help="What it may act as.",
)
@click.option("--days", type=click.IntRange(1, 3650), default=90, show_default=True, help="How long it is valid.")
def issue(folder: Path, name: str, hosts: tuple[str, ...], role: str, days: int) -> None:
    """Sign a certificate for the peer NAME with the CA in FOLDER: NAME.pem and NAME.key.

    NAME is the peer's identity: it must be the same as its `name` in the configuration.
    """
    files = tls.write_certificate(folder, name, hosts, days, role=tls.PeerRole(role))
    click.echo(f"{files.certificate}\n{files.key}")


@certs.command()
@click.argument("ca", type=click.Path(path_type=Path))
@click.argument("certificate", type=click.Path(path_type=Path))
@click.argument("key", type=click.Path(path_type=Path))
def check(ca: Path, certificate: Path, key: Path) -> None:
    """Check that three files belong together and are valid now; say whose identity they prove."""
    identity = tls.check_files(tls.TlsFiles(ca, certificate, key))
    click.echo(f"{identity.name}, role {identity.role.value if identity.role else 'not stated'}")
