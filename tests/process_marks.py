"""Tests that start a process have the mark `process`, so that `make fast` can leave them out;
one without it fails there.

What starts one is heard from Python itself (its audit hooks), whoever calls it: the test, a fixture or the product.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_MARK = "process"
_HAVE_A_MARK_OF_THEIR_OWN = ("own_process", "long", "root", "attack")
"""Left out of `make fast`, too."""
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})


class ProcessWatch:
    """Fails tests that start a process without the mark for it."""

    def __init__(self) -> None:
        self._started: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in _STARTS:
            self._started.append(f"{event} {arguments[1:2] or ''}")

    @contextmanager
    def over(self, item: pytest.Item) -> Iterator[None]:
        """Watch a phase of a test; fail it where it has started a process and has no mark for that."""
        self._started.clear()
        yield
        if self._started and _leaves_processes_out(item) and not _may_start_one(item):
            first = self._started[0][:200]
            pytest.fail(f"it starts a process ({first}) and lacks @pytest.mark.process", pytrace=False)


def mark_own_processes(item: pytest.Item) -> None:
    """Give the mark to tests that run in an interpreter of their own."""
    if item.get_closest_marker("own_process") is not None:
        item.add_marker(_MARK)


def _leaves_processes_out(item: pytest.Item) -> bool:
    return f"not {_MARK}" in str(item.config.option.markexpr)


def _may_start_one(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in (_MARK, *_HAVE_A_MARK_OF_THEIR_OWN))
