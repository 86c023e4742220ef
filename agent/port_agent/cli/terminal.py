"""Output to the terminal: control characters in names, paths and logs from outside are shown, never executed.

Inside `guarded`, all output passes through this module. Only the colours of `terminal()` and of `draw` bypass it.
"""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_OBEYED = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal acts on: control characters except tab and line ends, marks that change the direction of
text, and lone surrogates.
"""


def printable(text: str) -> str:
    """Return `text` with everything that a terminal would execute made visible, such as `\x1b`; tabs and line ends
    stay.
    """
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


class _Guard:
    """A stream whose text passes through `printable`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Guard standard output and standard error inside the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Guard(before[0]), _Guard(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def terminal(*, stderr: bool = False) -> "Console":
    """Return the terminal, which prints the words of workers, boards and other agents unchanged.

    By default, Rich fails on `[/dev/ttyACM0]`, which it takes for the end of a style, drops
    `[float32]`, and replaces `:key:`.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return PlainConsole(
        file=_unguarded(sys.stderr if stderr else sys.stdout), markup=False, emoji=False, highlight=False
    )


def draw(picture: str) -> None:
    """Print one of our plots, whose colours are escape sequences."""
    _unguarded(sys.stdout).write(f"{picture}\n")


def _unguarded(stream: TextIO) -> TextIO:
    return stream.stream if isinstance(stream, _Guard) else stream
