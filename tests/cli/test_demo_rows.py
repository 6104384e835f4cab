"""The demo's judgement: each way in which a row can fall short is said, and only then."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from farfill.cli.demo.ask import Answer
from farfill.cli.demo.measure import Moved
from farfill.cli.demo.prompts import prompts
from farfill.cli.demo.reference import Reference
from farfill.cli.demo.table import Row, print_result, result_table

REMOTE = Row(
    expects_remote=True,
    answer=Answer(
        "the same", {"x-farfill-path": "remote", "x-farfill-reason": "above_threshold"}, 0.5, 1.0, {"prompt_tokens": 9}
    ),
    moved=Moved(1_000_000, 0.25, 0.5),
    reference=Reference(9, "the same"),
)
LOCAL = replace(
    REMOTE,
    expects_remote=False,
    answer=replace(REMOTE.answer, headers={"x-farfill-path": "local", "x-farfill-reason": "below_threshold"}),
    moved=Moved(0, 0.0, 0.0),
)


@pytest.mark.parametrize("row", [REMOTE, LOCAL])
def test_as_promised_is_no_problem(row: Row) -> None:
    assert row.problems() == []
    assert row.identical


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (replace(REMOTE, answer=LOCAL.answer), "went local (below_threshold), not remote"),
        (replace(LOCAL, answer=REMOTE.answer), "went remote (above_threshold), not local"),
        (replace(REMOTE, moved=LOCAL.moved), "received no bytes"),
        (replace(LOCAL, moved=REMOTE.moved), "1000000 bytes moved"),
        (replace(REMOTE, reference=Reference(9, "other")), "differs from the single-process run, which says 'other'"),
        (replace(REMOTE, reference=Reference(8, "the same")), "has 8 prompt tokens in the single-process run"),
        (replace(REMOTE, answer=replace(REMOTE.answer, headers={})), "went not stated"),
    ],
)
def test_each_shortcoming_is_said(row: Row, problem: str) -> None:
    assert any(problem in one for one in row.problems())


def test_not_identical_shows_in_the_table() -> None:
    table = result_table([REMOTE, replace(REMOTE, reference=Reference(9, "other"))])
    assert [str(cell) for cell in table.columns[-1].cells] == ["yes", "NO"]
    assert [str(cell) for cell in table.columns[3].cells] == ["1.0 MB", "1.0 MB"]


@pytest.mark.parametrize("width", [80, 160])
def test_the_output_is_readable_on_a_narrow_terminal_too(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    row = replace(REMOTE, answer=replace(REMOTE.answer, text="one line of\n prose [of] some length"))
    print_result([row], console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "one line of prose [of] some length" in shown
    assert max(len(line) for line in shown.splitlines()) <= width


def test_prompts_are_one_short_and_three_long_and_share_no_beginning() -> None:
    texts = [prompt.text for prompt in prompts()]
    assert [prompt.expects_remote for prompt in prompts()] == [False, True, True, True]
    words = [len(text.split()) for text in texts]
    assert words[0] < 20 < 100 < words[1] < 200 < 600 < words[2] < 1000 < 2400 < words[3]
    assert len({text[:40] for text in texts}) == 4
