"""The line of a program that changes something, found by running it again line by line."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from port_planner.base.errors import of_the_program


def line_of_change(run: Callable[[], object], look: Callable[[], object]) -> str:
    """Run code and return the program's line after which `look` first returns another value; "" if none does.

    Whatever the code raises ends the search.
    """
    watch = _Watch(look)
    before = sys.gettrace()
    sys.settrace(watch.trace)
    try:
        run()
    except Exception:  # the user's code may raise anything; why it runs is already an error
        return watch.found
    finally:
        sys.settrace(before)
    return watch.found


class _Watch:
    """Compares a value after each line of the program."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.found = ""
        self._look, self._first = look, look()
        self._lines: dict[FrameType, int] = {}
        """The line that each frame of the program runs."""

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace functions of the program only."""
        if self.found or not of_the_program(frame.f_code.co_filename):
            return None
        caller = frame.f_back
        while caller is not None and caller not in self._lines:
            caller = caller.f_back
        if caller is not None:
            self._compare(caller)
        return self._traced

    def _traced(self, frame: FrameType, event: str, _: Any) -> Any:
        if event in ("line", "return"):
            self._compare(frame)
            self._lines[frame] = frame.f_lineno
        if event == "return":
            del self._lines[frame]
        return None if self.found else self._traced

    def _compare(self, frame: FrameType) -> None:
        line = self._lines.get(frame)
        if line is not None and not self.found and self._look() != self._first:
            self.found = f"{Path(frame.f_code.co_filename).name}:{line}"
