"""The demo's result: one row for each request, and in words what is not as promised."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from farfill.cli.demo.ask import Answer
from farfill.cli.demo.measure import Moved
from farfill.cli.demo.reference import Reference

# The other columns take 80; less than this leaves the output a few letters a line.
_WIDE_COLUMNS: Final = 110


@dataclass(frozen=True, slots=True)
class Row:
    """One request: what was expected, the gateway's answer, what the workers counted, what the model alone says."""

    expects_remote: bool
    answer: Answer
    moved: Moved
    reference: Reference

    @property
    def path(self) -> str:
        return self.answer.headers.get("x-farfill-path", "not stated")

    @property
    def reason(self) -> str:
        return self.answer.headers.get("x-farfill-reason", "not stated")

    @property
    def identical(self) -> bool:
        return self.answer.text == self.reference.text and self.answer.prompt_tokens == self.reference.prompt_tokens

    def problems(self) -> list[str]:
        """What is not as promised, each in a sentence."""
        found = []
        expected = "remote" if self.expects_remote else "local"
        if self.path != expected:
            found.append(f"went {self.path} ({self.reason}), not {expected}")
        if self.expects_remote and self.moved.received_bytes <= 0:
            found.append("was to be prefilled remotely, but the decode worker received no bytes")
        if not self.expects_remote and self.moved.received_bytes != 0:
            found.append(f"was to stay local, but {self.moved.received_bytes} bytes moved")
        if self.answer.prompt_tokens != self.reference.prompt_tokens:
            found.append(f"has {self.reference.prompt_tokens} prompt tokens in the single-process run")
        if self.answer.text != self.reference.text:
            found.append(f"differs from the single-process run, which says {self.reference.text!r}")
        return [f"the request of {self.answer.prompt_tokens} prompt tokens {problem}" for problem in found]


def print_result(rows: Sequence[Row], console: Console) -> None:
    """The table; where the terminal is too narrow for a column of prose, the outputs stand below it."""
    wide = console.width >= _WIDE_COLUMNS
    console.print(result_table(rows, with_output=wide))
    if not wide:
        for row in rows:
            console.print(f"{row.answer.prompt_tokens:,} tokens: {_one_line(row)}", markup=False)


def result_table(rows: Sequence[Row], *, with_output: bool = True) -> Table:
    """A line for each request."""
    table = Table(
        title="Every answer beside a single-process run of the same model", title_justify="left", pad_edge=False
    )
    for heading in ("prompt\ntokens", "path", "reason", "KV\nmoved", "prefill\ns", "transfer\ns", "first\ntoken s"):
        table.add_column(heading, justify="left" if heading in ("path", "reason") else "right", overflow="fold")
    if with_output:
        table.add_column("output (greedy)", ratio=1, overflow="fold")
    table.add_column("iden-\ntical")
    for row in rows:
        remote = row.moved.received_bytes > 0
        table.add_row(
            f"{row.answer.prompt_tokens:,}",
            Text(row.path),
            Text(row.reason),
            f"{row.moved.received_bytes / 1e6:.1f} MB" if remote else "-",
            f"{row.moved.prefill_s:.2f}" if remote else "-",
            f"{row.moved.transfer_s:.2f}" if remote else "-",
            f"{row.answer.first_token_s:.2f}",
            *([Text(_one_line(row))] if with_output else []),
            Text("yes", style="green") if row.identical else Text("NO", style="bold red"),
        )
    return table


def _one_line(row: Row) -> str:
    return " ".join(row.answer.text.split())
