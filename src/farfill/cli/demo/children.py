"""The demo's child processes: started, waited for, ended, and nobody else's ever touched.

Not a process supervisor: a child that dies is an error with the tail of its log, never started again.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from farfill.errors import OperationError

READY_TIMEOUT_S: Final = 180.0  # a model from a slow disk; a dead child is noticed at once
STOP_TIMEOUT_S: Final = 10.0
LOG_TAIL_LINES: Final = 15
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready_file: Path

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"  {self.name} | {line}" for line in lines) or f"  {self.name} | (it wrote nothing)"


class Children:
    """Starts `python -m farfill ...` processes and ends exactly these when the block is left, the last one first.

    Each child holds the read end of a pipe whose write end is ours, so that it stops by itself (`--stop-with-stdin`)
    even where we are killed and cannot stop it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, arguments: Sequence[str], environment: dict[str, str]) -> Child:
        """Starts `farfill ARGUMENTS --ready-file ... --stop-with-stdin`; its output goes to a log in the folder."""
        log, ready_file = self._folder / f"{name}.log", self._folder / f"{name}.ready.json"
        command = [sys.executable, "-m", "farfill", *arguments, "--ready-file", str(ready_file), "--stop-with-stdin"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # What their libraries leave in the temporary folder goes away with ours.
                env={**os.environ, "TMPDIR": str(self._folder), **environment},
                # A Ctrl-C in the terminal is for us; we then stop the children in order.
                start_new_session=True,
            )
        child = Child(name, process, log, ready_file)
        self._children.append(child)
        return child

    def wait_ready(self, child: Child) -> dict[str, Any]:
        """What the child wrote into its ready file.

        Raises:
            OperationError: `engine_failed` where it died, `setup_timeout` where it took too long; with its log's tail.
        """
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        while not child.ready_file.exists():
            self.check()
            if time.monotonic() > give_up_at:
                raise OperationError(
                    "setup_timeout", f"{child.name} was not ready after {READY_TIMEOUT_S:.0f} s\n{child.log_tail()}"
                )
            time.sleep(_POLL_S)
        facts = json.loads(child.ready_file.read_text())
        assert isinstance(facts, dict)
        return facts

    def check(self) -> None:
        """Raises OperationError `engine_failed`, with the tail of its log, where a child has died."""
        for child in self._children:
            status = child.process.poll()
            if status is not None:
                how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
                raise OperationError("engine_failed", f"{child.name} ended ({how})\n{child.log_tail()}")

    def logs(self) -> str:
        """The tails of all logs."""
        return "\n".join(child.log_tail() for child in self._children)

    def stop(self) -> None:
        """SIGTERM to the last started first, so that nobody loses a peer it still needs; SIGKILL to who does not go.

        A second Ctrl-C does not cut this short; it is bounded anyway.
        """
        with _uninterrupted():
            self._stop_all()

    def _stop_all(self) -> None:
        while self._children:
            process = self._children[-1].process
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            assert process.stdin is not None
            process.stdin.close()
            self._children.pop()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
