"""`farfill config`: check a file, show what is in force and where it came from, print a documented example."""

from pathlib import Path

import click

from farfill import tls
from farfill.config import check_gateway, check_relay, check_worker, effective_yaml, example_yaml, load

_CHECKS = {"gateway": check_gateway, "worker": check_worker, "relay": check_relay}


@click.group(short_help="Check, show and explain settings.")
def config() -> None:
    """Settings: one typed tree from a file, then the environment, then flags.

    \b
    Examples:
      farfill config example > farfill.yaml
      farfill config check farfill.yaml
      FARFILL_GATEWAY__PORT=9000 farfill config show farfill.yaml
    """


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--certificates", is_flag=True, help="Also read the files of section tls; they may be elsewhere.")
def check(file: Path, certificates: bool) -> None:
    """Check FILE: names, types, ranges, and the rules between fields of each section in it.

    The environment is left out: what is checked is what is written.
    """
    loaded = load(file, environ={})
    checked = [section for section in _CHECKS if section in loaded.sections()]
    for section in checked:
        _CHECKS[section](loaded.config)
    if certificates and loaded.config.tls is not None:
        tls.check_files(loaded.config.tls.files())
        checked.append("certificates")
    click.echo(f"{file}: good ({', '.join(checked) or 'nothing set: all defaults'})")


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
def show(file: Path | None) -> None:
    """Show the configuration in force, with FILE or without, and where each value came from. Secrets are masked."""
    click.echo(effective_yaml(load(file)), nl=False)


@config.command()
def example() -> None:
    """Print a file with every field, its default, its meaning and what it may be."""
    click.echo(example_yaml(), nl=False)
