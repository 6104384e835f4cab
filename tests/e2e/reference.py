"""What plain Transformers says to the tests' prompts, in a process of its own; nothing of farfill's engine in it."""

import json
import subprocess
import sys
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from farfill.cli.demo.reference import Reference

MAX_TOKENS = 16
LONG_QUESTION = "Who is the story about, and what did she do?"


def paragraphs() -> list[str]:
    return files("farfill.cli.demo").joinpath("story.txt").read_text(encoding="utf-8").strip().split("\n\n")


def prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def eight_prompts() -> list[list[dict[str, str]]]:
    """Eight of about 150 to 600 tokens, none a prefix of another."""
    story = paragraphs()
    return [
        prompt("\n\n".join([*story[first : first + 1 + first % 4], "What happens here? Answer briefly."]))
        for first in range(8)
    ]


def long_prompt() -> list[dict[str, str]]:
    """Over 3,000 tokens: some ten seconds of prefill, so that things can happen in the middle of it."""
    return prompt("\n\n".join([*paragraphs(), LONG_QUESTION]))


@lru_cache
def references(model: Path) -> tuple[list[Reference], Reference]:
    """Of the eight prompts and of the long one; computed once for a test run."""
    job = {
        "model": str(model),
        "dtype": "float32",
        "threads": 1,
        "conversations": [*eight_prompts(), long_prompt()],
        "max_tokens": MAX_TOKENS,
    }
    done = subprocess.run(
        [sys.executable, "-m", "farfill.cli.demo.reference"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = [Reference(**json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == 9
    assert all(one.text for one in found)
    return found[:-1], found[-1]
