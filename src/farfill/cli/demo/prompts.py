"""What the demo asks: questions about a short story that comes with farfill, cut to about the lengths it is to show.

The model is tiny, so its answers are poor prose; what matters is that both ways give the same ones.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Final

MAX_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class Prompt:
    """`expects_remote`: whether its length is over the demo's threshold."""

    text: str
    expects_remote: bool

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def prompts() -> list[Prompt]:
    """One short prompt (about 40 tokens) and three long ones (about 200, 1,000 and over 3,000 tokens)."""
    paragraphs = files("farfill.cli.demo").joinpath("story.txt").read_text(encoding="utf-8").strip().split("\n\n")
    return [
        Prompt("What is a lighthouse for? Answer in one sentence.", expects_remote=False),
        Prompt(_ask(paragraphs[1:2], "What did Ida do on the first evening?"), expects_remote=True),
        # Each begins elsewhere in the story: none is a prefix of another.
        Prompt(_ask(paragraphs[8:14], "What did the experiments show?"), expects_remote=True),
        Prompt(_ask(paragraphs, "Who is the story about, and what did she do?"), expects_remote=True),
    ]


def _ask(paragraphs: list[str], question: str) -> str:
    return "\n\n".join([*paragraphs, question])
