"""A program in a fork of a process that has loaded torch (`tests/forked.py`)."""

import runpy
import sys
from pathlib import Path

__all__ = ["main"]


def main(words: list[str]) -> int:
    """Run a file with its words, as `python WORDS` does."""
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")
    return 0
