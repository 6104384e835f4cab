"""The command `farfill`: parses what the operator typed, calls the part that does it, prints its error in a line.

No decision about requests or transfers is made here. Commands import their parts when they run, so that
`farfill --help` is quick and works without the hf extra.
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from farfill.errors import ConfigurationError, FarfillError

EXIT_CONFIGURATION = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 1 (it failed), 2 (wrong usage or configuration), 130 (Ctrl-C)."""
    from farfill.cli.commands import farfill

    try:
        result = farfill.main(args=arguments, prog_name="farfill", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("farfill: interrupted", err=True)
        return EXIT_INTERRUPTED
    except FarfillError as error:
        click.echo(f"farfill: {error}", err=True)
        return EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_FAILURE
    except BrokenPipeError:
        # Whoever read our output has gone (`farfill config show | head`); Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return result if isinstance(result, int) else 0


def main() -> NoReturn:
    """The console script."""
    sys.exit(run())
