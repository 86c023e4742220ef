"""Where the benchmarks print their tables."""

import sys

from rich.console import Console

FILE_COLUMNS = 150
"""Width of a table in a file or a pipe: rich would take 80 columns and cut off figures."""


def table_console(columns: int = FILE_COLUMNS) -> Console:
    """Return the standard output: as wide as the terminal, or this wide if it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else columns)
