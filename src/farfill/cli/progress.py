"""What the operator sees while something takes longer than two seconds: a spinner, or a line where no terminal is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

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
