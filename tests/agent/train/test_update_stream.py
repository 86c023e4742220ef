"""Updates behind the compute thread: they pause, end early and fail as the step does."""

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from agent.train.pager import PageError
from agent.train.update_stream import SlicedUpdate, UpdateThread


class Slices:
    """Stands in for an update: counts the slices it was let through to."""

    def __init__(self, index: int, count: int, error: Exception | None = None) -> None:
        self.index, self.count, self.error = index, count, error
        self.started = 0
        self.reached = threading.Semaphore(0)

    def run(self, gate: Callable[[], None]) -> float:
        for _ in range(self.count):
            self.reached.release()
            gate()
            self.started += 1
        if self.error:
            raise self.error
        return float(self.count)


def start(updates: UpdateThread, slices: Any) -> None:
    updates.start(cast(SlicedUpdate, slices))


def test_updates_run_one_after_the_other_and_tell_what_they_computed() -> None:
    updates = UpdateThread()
    first, second = Slices(3, 2), Slices(5, 4)
    start(updates, first)
    start(updates, second)
    assert updates.result(5, 30.0) == 4.0
    assert updates.result(3, 0.0) == 2.0
    updates.close()


def test_no_slice_starts_while_held() -> None:
    updates = UpdateThread()
    updates.hold()
    slices = Slices(0, 3)
    start(updates, slices)
    assert slices.reached.acquire(timeout=30)
    assert updates.result(0, 0.01) is None and slices.started == 0
    updates.go_on()
    assert updates.result(0, 30.0) == 3.0
    updates.close()


def test_a_step_that_is_left_takes_its_updates_along() -> None:
    """Held in the middle, then closed: the thread ends, what was queued behind it never starts."""
    updates = UpdateThread()
    updates.hold()
    running, queued = Slices(0, 3), Slices(1, 3)
    start(updates, running)
    start(updates, queued)
    assert running.reached.acquire(timeout=30)
    updates.close()
    assert running.started == 0 and queued.started == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("update-thread")]


def test_what_an_update_raises_reaches_who_waits_for_it() -> None:
    updates = UpdateThread()
    start(updates, Slices(0, 1, PageError("the medium reports an error")))
    with pytest.raises(PageError, match="medium"):
        updates.result(0, 30.0)
    updates.close()
