"""A worker process over the tests' small engine: `python tiny_worker.py READY_FILE [FIELD=JSON ...]`.

With `hold="line"` the engine waits before its first decode step until a line comes on standard input; with
`hold="stop"` until it is stopped.
"""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from tiny_engine import TinyEngine

from farfill.engines.serving.serve import serve_worker
from farfill.engines.serving.settings import WorkerSettings
from farfill.errors import ConfigurationError


def main() -> int:
    given = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in sys.argv[2:])}
    waits_for = given.pop("hold", None)

    def hold(request_id: str, phase: str) -> None:
        nonlocal waits_for
        if phase != "decode" or waits_for is None:
            return
        print("held", flush=True)
        if waits_for == "line":
            sys.stdin.readline()
        else:
            engine.has_aborted_all.wait()
        waits_for = None

    settings = dataclasses.replace(WorkerSettings(ready_file=Path(sys.argv[1])), **given)
    engine = TinyEngine(before_step=hold)
    try:
        asyncio.run(serve_worker(settings, engine))
    except ConfigurationError as error:
        print(f"{error.code} {error.field} {error.message}", flush=True)
        return 2
    print("stopped", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
