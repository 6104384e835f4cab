"""The demo's children: one that dies is told with its log, and none outlives its parent, however that ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from farfill.cli.demo.children import Children
from farfill.errors import OperationError

RELAY = ["relay", "--port", "0", "--data-port", "0"]


def test_a_child_that_dies_is_told_with_its_log(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("relay", ["relay", "--host", "10.1.2.3"], {})
        with pytest.raises(OperationError) as caught:
            children.wait_ready(child)
    assert caught.value.code == "engine_failed"
    assert "relay ended (exit code 2)" in caught.value.message
    assert "[insecure_listener]" in caught.value.message


def test_leaving_ends_exactly_its_own(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        with pytest.raises(KeyboardInterrupt), Children(tmp_path) as children:
            child = children.start("relay", RELAY, {})
            facts = children.wait_ready(child)
            assert facts["url"].startswith("http://127.0.0.1:")
            raise KeyboardInterrupt
        assert child.process.returncode is not None
        assert stranger.poll() is None
        assert stranger.stdin is not None
        stranger.stdin.close()


PARENT = """
import sys, time
from pathlib import Path
from farfill.cli.demo.children import Children
children = Children(Path(sys.argv[1]))
child = children.start("relay", sys.argv[2:], {})
children.wait_ready(child)
print(child.process.pid, flush=True)
sys.stdin.read()
"""


def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    """Rule: the demo leaves a clean machine, even where it had no chance to clean."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), *RELAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    # Not our child, so there is nothing to wait on but its disappearance; init may leave it a zombie in a container.
    give_up_at = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up_at, "the child outlived its killed parent"
        os.sched_yield()
