"""The commands and their help, as a newcomer reads them."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from farfill.cli import certs_command, config_command
from farfill.config import Loaded, Role, load
from farfill.router.policy import Placement

Command = Callable[..., Any]


def configured(command: Command) -> Command:
    """Adds what every serving command takes: --config, --set, --ready-file, --stop-with-stdin."""
    for option in (
        click.option(
            "--stop-with-stdin", is_flag=True, help="Stop when standard input ends: with the parent that holds it."
        ),
        click.option(
            "--ready-file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write name, addresses and ports there, as JSON, once requests are accepted.",
        ),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="FIELD=VALUE",
            help="Set any field, for example --set gateway.clocks.stall_s=5. Repeatable.",
        ),
        click.option(
            "-c",
            "--config",
            "file",
            type=click.Path(path_type=Path),
            envvar="FARFILL_CONFIG",
            help="YAML or TOML file. `farfill config example` prints one with every field.",
        ),
    ):
        command = option(command)
    return command


def effective(file: Path | None, settings: tuple[str, ...], flags: dict[str, Any]) -> Loaded:
    """File, then environment, then --set, then named flags."""
    merged: dict[str, Any] = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals:
            raise click.UsageError(f"--set takes FIELD=VALUE, for example --set gateway.port=9000; got {setting!r}")
        merged[path.strip()] = value.strip()
    merged |= {path: value for path, value in flags.items() if value is not None}
    return load(file, flags=merged)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("farfill"), prog_name="farfill", message="%(prog)s %(version)s")
def farfill() -> None:
    """Prefill a long prompt in one place, decode it in another; the KV cache travels between them.

    \b
    Start here:    farfill demo
    Then:          farfill certs init certs        a development CA
                   farfill worker --help           one engine: prefill, decode, or both
                   farfill gateway --help          the OpenAI-compatible front door
                   farfill config example          every setting, explained
    """


@farfill.command(short_help="The OpenAI-compatible front door.")
@configured
@click.option("--host", help="Address to listen on.")
@click.option("--port", help="Port; 0 takes a free one.")
@click.option("--threshold", help="More uncached prompt tokens than this go to a prefill worker.")
@click.option("--placement", type=click.Choice([one.value for one in Placement]), help="Which store transfers use.")
def gateway(
    file: Path | None,
    settings: tuple[str, ...],
    ready_file: Path | None,
    stop_with_stdin: bool,
    host: str | None,
    port: str | None,
    threshold: str | None,
    placement: str | None,
) -> None:
    """The OpenAI-compatible front door: takes requests, chooses local or remote prefill, streams the answer.

    It needs to know its workers, so it needs a configuration file (section gateway.workers).
    SIGTERM drains: no new requests, those in flight end. Ctrl-C stops at once.

    \b
    Examples:
      farfill gateway --config site.yaml
      farfill gateway --config site.yaml --port 9000 --threshold 2048
      curl localhost:8000/v1/models
    """
    from farfill.cli import serve

    flags = {
        "gateway.host": host,
        "gateway.port": port,
        "gateway.threshold_tokens": threshold,
        "gateway.placement": placement,
    }
    serve.gateway(effective(file, settings, flags).config, ready_file, stop_with_stdin)


@farfill.command(short_help="One engine: prefill, decode, or both.")
@configured
@click.argument("vllm_arguments", nargs=-1, metavar="[-- VLLM_SERVE_ARGUMENTS]")
@click.option("--engine", type=click.Choice(["hf", "vllm"]), help="What computes; vllm must be installed by you.")
@click.option("--name", help="Its name; must be the common name of its certificate.")
@click.option("--role", type=click.Choice([one.value for one in Role]), help="What it does.")
@click.option("--site", help="The datacenter or machine room it stands in.")
@click.option("--model", help="A local Hugging Face folder; without it the small demo model.")
@click.option("--host", help="Address to listen on; off loopback it needs tls.")
@click.option("--port", help="Port of the API; 0 takes a free one.")
@click.option("--data-port", help="Port of the store's data plane; 0 takes a free one.")
def worker(
    file: Path | None,
    settings: tuple[str, ...],
    ready_file: Path | None,
    stop_with_stdin: bool,
    vllm_arguments: tuple[str, ...],
    engine: str | None,
    name: str | None,
    role: str | None,
    site: str | None,
    model: str | None,
    host: str | None,
    port: str | None,
    data_port: str | None,
) -> None:
    """One engine in a role, and the store in it.

    A prefill worker computes KV caches and publishes them; it serves no client. A decode worker reads them and
    generates. A worker of role both does either. SIGTERM drains; Ctrl-C stops at once.

    \b
    Examples:
      farfill worker --role both --model ~/models/my-model
      farfill worker --config east.yaml --role prefill --site east
      farfill worker --engine vllm --role decode -- MODEL --port 8000 --max-model-len 32768
    """
    from farfill.cli import serve

    flags = {
        "worker.engine": engine,
        "worker.name": name,
        "worker.role": role,
        "worker.site": site,
        "worker.model": model,
        "worker.host": host,
        "worker.port": port,
        "worker.data_port": data_port,
    }
    config = effective(file, settings, flags).config
    if config.worker.engine == "vllm":
        if stop_with_stdin:
            raise click.UsageError("--stop-with-stdin is not for --engine vllm: the process becomes vLLM's own")
        serve.vllm_worker(config, ready_file, vllm_arguments)
        return
    if vllm_arguments:
        raise click.UsageError(f"{vllm_arguments[0]!r}: arguments after -- are for --engine vllm")
    serve.worker(config, ready_file, stop_with_stdin)


@farfill.command(short_help="A store between two sites.")
@configured
@click.option("--name", help="Its name; must be the common name of its certificate.")
@click.option("--host", help="Address to listen on; off loopback it needs tls.")
@click.option("--port", help="Port of the control API; 0 takes a free one.")
@click.option("--data-port", help="Port of the data plane; 0 takes a free one.")
def relay(
    file: Path | None,
    settings: tuple[str, ...],
    ready_file: Path | None,
    stop_with_stdin: bool,
    name: str | None,
    host: str | None,
    port: str | None,
    data_port: str | None,
) -> None:
    """A store alone, between two sites that cannot reach each other. It cannot read what it holds.

    \b
    Examples:
      farfill relay --config relay.yaml
    """
    from farfill.cli import serve

    flags = {"relay.name": name, "relay.host": host, "relay.port": port, "relay.data_port": data_port}
    serve.relay(effective(file, settings, flags).config, ready_file, stop_with_stdin)


@farfill.command(short_help="Two sites on this machine, real requests, a table.")
@click.option("--stay", is_flag=True, help="Keep everything running afterwards, for your own requests, until Ctrl-C.")
@click.option("--model", type=click.Path(path_type=Path), help="A local Hugging Face folder instead of SmolLM2-135M.")
@click.option(
    "--placement",
    type=click.Choice([one.value for one in Placement]),
    default=Placement.RELAY.value,
    show_default=True,
    help="Which store the KV cache goes through: the prefill side's, the decode side's, or a relay.",
)
@click.option(
    "--threshold", type=click.IntRange(1), default=128, show_default=True, help="Longer prompts (in tokens) go remote."
)
@click.option("--port", type=click.IntRange(0, 65535), help="The gateway's port. Default: any; with --stay 8000.")
def demo(stay: bool, model: Path | None, placement: str, threshold: int, port: int | None) -> int:
    """Two sites on this machine: real processes, sockets, TLS and weights. Prints what happened, leaves nothing.

    Starts a prefill worker (site east), a relay, a decode worker (site west) and a gateway; sends one short request
    and three long ones; compares every answer with a plain single-process run of the same model. Exit code 0 means
    that the long prompts were prefilled remotely, that bytes moved, and that all answers are identical.

    \b
    Examples:
      farfill demo
      farfill demo --stay                     then: curl localhost:8000/v1/models
      farfill demo --placement producer
    """
    from farfill.cli.demo.run import run_demo

    return run_demo(stay=stay, model=model, placement=Placement(placement), threshold_tokens=threshold, port=port)


@farfill.group()
def model() -> None:
    """The small model of the demo (SmolLM2-135M-Instruct, Apache-2.0)."""


@model.command(name="get")
def model_get() -> None:
    """Make the demo model's folder if it is not there yet, and print where it is."""
    from farfill.cli.progress import demo_model

    click.echo(demo_model())


farfill.add_command(certs_command.certs)
farfill.add_command(config_command.config)
