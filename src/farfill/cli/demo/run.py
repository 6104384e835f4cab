"""Runs the demo from start to end, and leaves nothing behind whichever way it ends.

Not here: the processes (`children`, `sites`), the requests (`ask`), the judgement (`table`).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console

from farfill.cli.demo.ask import Answer, ask
from farfill.cli.demo.children import Children
from farfill.cli.demo.measure import Meter, Moved
from farfill.cli.demo.prompts import MAX_TOKENS, Prompt, prompts
from farfill.cli.demo.reference import Reference
from farfill.cli.demo.sites import PROCESSES, Sites, SiteSettings, is_free, start_sites, threads_per_worker
from farfill.cli.demo.table import Row, print_result
from farfill.cli.progress import Steps, demo_model, steps
from farfill.errors import ConfigurationError, FarfillError, OperationError
from farfill.router.policy import Placement

STAY_PORT: Final = 8000
DTYPE: Final = "float32"  # the workers' default, so the single-process run's too
_CHECK_S: Final = 0.5
_MIN_WIDTH: Final = 132  # narrower than this the output column is a few letters wide


def run_demo(*, stay: bool, model: Path | None, placement: Placement, threshold_tokens: int, port: int | None) -> int:
    """Returns the exit code: 0 where everything was as promised, else 1.

    Raises:
        FarfillError: something could not be started or a request failed.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, _MIN_WIDTH))
    folder = model if model is not None else demo_model()
    if not (folder / "config.json").is_file():
        raise ConfigurationError("model_not_found", f"{folder} has no config.json: name a Hugging Face model folder")
    settings = SiteSettings(
        folder.resolve(), placement, threshold_tokens, _gateway_port(stay, port, console), threads_per_worker()
    )
    with (
        _interruptible(),
        tempfile.TemporaryDirectory(prefix="farfill-demo-") as scratch,
        Children(Path(scratch)) as children,
    ):
        with steps(PROCESSES, console) as shown:
            sites = start_sites(children, Path(scratch), settings, shown)
        asked = prompts()
        try:
            answers = _ask_all(sites, folder.resolve().name, asked, console)
        except FarfillError as error:
            children.check()
            error.args = (f"{error.message}\n{children.logs()}",)
            error.message = error.args[0]
            raise
        with steps(len(asked), console) as shown:
            references = _reference(Path(scratch), settings, asked, shown)
        rows = [
            Row(prompt.expects_remote, answer, moved, reference)
            for prompt, (answer, moved), reference in zip(asked, answers, references, strict=True)
        ]
        console.print()
        print_result(rows, console)
        problems = [problem for row in rows for problem in row.problems()]
        for problem in problems:
            console.print(f"NOT AS PROMISED: {problem}", style="bold red")
        if stay:
            _stay(children, sites, folder.resolve().name, console)
    if not problems:
        remote = sum(row.expects_remote for row in rows)
        console.print(
            f"{remote} prompts were prefilled in site east and decoded in site west, {len(rows) - remote} stayed in "
            "west; all answers are identical. Everything is stopped."
        )
    return 1 if problems else 0


def _gateway_port(stay: bool, port: int | None, console: Console) -> int:
    if port is not None:
        return port
    if not stay:
        return 0
    if is_free(STAY_PORT):
        return STAY_PORT
    console.print(f"Port {STAY_PORT} is taken; taking a free one.")
    return 0


def _ask_all(sites: Sites, model: str, asked: list[Prompt], console: Console) -> list[tuple[Answer, Moved]]:
    meter = Meter(sites.prefill_url, sites.decode_url, sites.context)
    found = []
    with steps(len(asked), console) as shown:
        for number, prompt in enumerate(asked, 1):
            shown.begin(f"request {number} of {len(asked)} ({len(prompt.text.split()):,} words)")
            answer = ask(sites.gateway_port, model, prompt.messages, MAX_TOKENS)
            prefilled = answer.headers.get("x-farfill-path") in ("remote", "near")
            found.append((answer, meter.since_last(prefilled=prefilled)))
            shown.done()
    return found


def _reference(scratch: Path, settings: SiteSettings, asked: list[Prompt], shown: Steps) -> list[Reference]:
    job = {
        "model": str(settings.model),
        "dtype": DTYPE,
        "threads": settings.threads,
        "conversations": [prompt.messages for prompt in asked],
        "max_tokens": MAX_TOKENS,
    }
    shown.begin("running the same prompts in a single process, without farfill's engine")
    log = scratch / "reference.log"
    found = []
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "farfill.cli.demo.reference"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(scratch)},
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it is dead already: its exit status and its log say why
                process.stdin.write(json.dumps(job).encode())
                process.stdin.close()
            for line in process.stdout:
                found.append(Reference(**json.loads(line)))
                shown.done()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0 or len(found) != len(asked):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise OperationError("engine_failed", f"the single-process run ended with {process.returncode}\n{tail}")
    return found


def _stay(children: Children, sites: Sites, model: str, console: Console) -> None:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "What is a lighthouse?"}], "max_tokens": 48}
    )
    console.print("\nStill running. Try, in another terminal:\n")
    console.print(
        f"  curl -i http://127.0.0.1:{sites.gateway_port}/v1/chat/completions "
        f"-H 'Content-Type: application/json' -d '{body}'\n",
        soft_wrap=True,
    )
    console.print("Ctrl-C stops everything.")
    never = threading.Event()
    try:
        while not never.wait(_CHECK_S):
            children.check()
    except KeyboardInterrupt:
        console.print("\nStopping.")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does, so that they too leave nothing behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {one: signal.signal(one, interrupt) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
