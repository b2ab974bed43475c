"""What commands print: `rich` on a terminal, plain when piped, JSON when asked.

Results go to stdout, everything else to stderr. Text from files and servers passes `printable`.
"""

import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from llamay.hub import Progress


def printable(text: str) -> str:
    """`text` on one line, with everything that a terminal might obey or hide as an escape.

    Those are control and format characters (escape sequences, text direction), line and paragraph
    separators, surrogates, and what Unicode has not assigned.
    """
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")
        else char
        for char in text
    )


# Marks that turn the direction of what follows; the other format characters join letters and emoji.
_DIRECTION_MARKS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def terminal_text(text: str) -> str:
    """A model's text, its lines and tabs kept, without anything that a terminal obeys."""
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if char in _DIRECTION_MARKS
        or (char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp"))
        else char
        for char in text
    )


def fail(message: str, code: int) -> int:
    """Prints one sentence on stderr and returns `code`."""
    say(f"error: {message}")
    return code


def say(message: str) -> None:
    """Prints a line that is no result, on stderr."""
    print(printable(message), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Prints a result as JSON in ASCII, so that no character of it can disturb a terminal."""
    print(json.dumps(value, allow_nan=False, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints aligned columns under their headings; a terminal gets colour and wrapped cells."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich_table(columns, cells)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def format_bytes(count: int) -> str:
    """A size in decimal units, as file managers on macOS give it."""
    if count < 1000:
        return f"{count} B"
    size, units = count / 1000, ["kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}"


def format_time(seconds: float) -> str:
    """A duration with three digits or so."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"


@contextmanager
def progress_line() -> Iterator[Callable[[str, float], None]]:
    """Gives a function that shows a line on stderr, if that is a terminal; it is gone at the end.

    Its arguments are the line and the seconds that are left: a wait of under half a second in all
    shows nothing.
    """
    shown = False

    def show(line: str, seconds_left: float) -> None:
        nonlocal shown
        if sys.stderr.isatty() and (shown or seconds_left > 0.5):
            shown = True
            print(f"\r\x1b[K{printable(line)}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress_bar() -> Iterator["Progress"]:
    """Gives a callback for the hub that draws a bar on stderr, if that is a terminal.

    Nothing is drawn, nor `rich` imported, before there is progress.
    """
    if not sys.stderr.isatty():
        yield lambda label, done, total: None
        return
    with ExitStack() as stack:
        bar: Bar | None = None
        tasks: dict[str, Any] = {}

        def show(label: str, done: int, total: int | None) -> None:
            nonlocal bar
            bar = bar or stack.enter_context(_new_bar())
            if label not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[label] = bar.add_task(printable(label), total=total)
            bar.update(tasks[label], completed=done, total=total)

        yield show


def _new_bar() -> "Bar":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _print_rich_table(columns: Sequence[str], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)
