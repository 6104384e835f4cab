"""What the operator sees while something takes longer than two seconds: a bar where steps are known, else a spinner.

Where no terminal is, each step is a line.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

err_console = Console(stderr=True, highlight=False)


@contextmanager
def activity(text: str, console: Console = err_console) -> Iterator[Callable[[str], None]]:
    """Shows `text` while the block runs; the yielded function changes it."""
    if console.is_terminal:
        with console.status(f"{text} ...") as status:
            yield lambda new: status.update(f"{new} ...")
    else:
        console.print(f"{text} ...")
        yield lambda new: console.print(f"{new} ...")


class Steps:
    """A known number of steps, shown as a bar; `begin` says which one runs, `done` that it has ended."""

    def __init__(self, console: Console, total: int, bar: Progress | None) -> None:
        self._console = console
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=total)

    def begin(self, text: str) -> None:
        if self._bar is None or self._task is None:
            self._console.print(f"{text} ...")
        else:
            self._bar.update(self._task, description=f"{text} ...")

    def done(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)


@contextmanager
def steps(total: int, console: Console = err_console) -> Iterator[Steps]:
    """Shows a bar of `total` steps while the block runs, with the time that has passed."""
    if not console.is_terminal:
        yield Steps(console, total, None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Steps(console, total, bar)


def demo_model() -> Path:
    """The folder of the demo model, made if need be, with progress.

    Raises:
        ConfigurationError: as `ensure_demo_model`.
    """
    from farfill.engines.hf.demo_model import default_cache_folder, ensure_demo_model

    if default_cache_folder().joinpath("SmolLM2-135M-Instruct").is_dir():
        return ensure_demo_model()
    with activity("getting the demo model") as tell:
        return ensure_demo_model(progress=tell)
