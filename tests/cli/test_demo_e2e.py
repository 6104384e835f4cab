"""The demo as a newcomer runs it, with the real model and real processes; and what is left however it ends."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from farfill.engines.hf.demo_model import ensure_demo_model

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def model() -> Path:
    return ensure_demo_model()


@contextmanager
def demo(scratch: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running `farfill demo` whose temporary files go into `scratch`."""
    environment = {**os.environ, "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "farfill", "demo", *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"the demo ended before it said {text!r}:\n{''.join(lines)}")


def rest(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


def assert_nothing_left(scratch: Path, children: list[psutil.Process]) -> None:
    assert children, "the demo had no children to end"
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert list(scratch.iterdir()) == []


def test_all_is_as_promised_and_a_child_that_is_killed_later_is_told(tmp_path: Path) -> None:
    """Rules: remote means bytes moved; greedy output is the single-process run's; no child dies unnoticed."""
    with demo(tmp_path, "--stay", "--port", "0", "--placement", "relay") as process:
        shown = read_until(process, "Ctrl-C stops everything")
        assert "NOT AS PROMISED" not in shown
        rows = [line for line in shown.splitlines() if "_threshold" in line]
        assert [row.split("│")[2].strip() for row in rows] == ["local", "remote", "remote", "remote"]
        tokens = [int(row.split("│")[1].replace(",", "")) for row in rows]
        assert tokens[0] < 100 < tokens[1] < 300 < 900 < tokens[2] < 1200 < 3000 < tokens[3]
        assert [row.split("│")[4].strip() == "-" for row in rows] == [True, False, False, False]
        assert [row.split("│")[9].strip() for row in rows] == ["yes"] * 4

        url = shown.split("curl -i ")[1].split("/v1/")[0]
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
            assert json.load(response)["data"][0]["id"] == "SmolLM2-135M-Instruct"

        children = psutil.Process(process.pid).children(recursive=True)
        victim = next(child for child in children if "decode-west.yaml" in " ".join(child.cmdline()))
        victim.kill()
        said = rest(process)
        assert process.wait() == 1
        assert "farfill: [engine_failed] decode-west ended (SIGKILL)" in said
        assert "Traceback" not in said
        assert_nothing_left(tmp_path, children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path) as process:
        read_until(process, "request 1 of 4")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        said = rest(process)
        assert process.wait() == 130
        assert "farfill: interrupted" in said
        assert "Traceback" not in said
        assert_nothing_left(tmp_path, children)


def test_a_taken_port_is_told_not_hidden(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with demo(tmp_path, "--port", port) as process:
            said = rest(process)
            assert process.wait() == 1
            assert "[port_in_use]" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_model_is_told_before_anything_starts(tmp_path: Path) -> None:
    with demo(tmp_path, "--model", str(tmp_path)) as process:
        assert "farfill: [model_not_found]" in rest(process)
        assert process.wait() == 2
