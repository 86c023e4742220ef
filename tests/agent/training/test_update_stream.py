"""Updates behind the compute thread: they pause, end early and fail as the step does."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_agent.paging.pager import CHUNK, PageError
from port_agent.training.step_paging import StepPaging, Wait
from port_agent.training.update_stream import SlicedUpdate, UpdateThread
from port_planner.capture.step import capture_step
from tests.agent.exactness import OPTIMIZERS, differences, plain, planned, random_plan
from tests.waiting import PATIENCE_S


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
    assert slices.reached.acquire(timeout=PATIENCE_S)
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
    assert running.reached.acquire(timeout=PATIENCE_S)
    updates.close()
    assert running.started == 0 and queued.started == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("update-thread")]


def test_what_an_update_raises_reaches_who_waits_for_it() -> None:
    updates = UpdateThread()
    start(updates, Slices(0, 1, PageError("the medium reports an error")))
    with pytest.raises(PageError, match="medium"):
        updates.result(0, 30.0)
    updates.close()


@pytest.mark.slow
def test_a_buffer_is_filled_again_once_what_was_in_it_is_written_and_no_write_outlives_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither shows in the numbers, for one thread reads and writes in turn: a write that fails, and
    memory that is held, would.
    """
    torch.manual_seed(0)
    model = nn.Linear(CHUNK // 1024, 3 * 256)  # three slices of a chunk each: the third takes the first one's buffer
    data = [(torch.randn(2, model.in_features), torch.randn(2, model.out_features)) for _ in range(2)]
    loss = lambda model, x, y: functional.mse_loss(model(x), y)  # noqa: E731
    capture = capture_step(model, loss, OPTIMIZERS["adamw"](model.parameters()), data[0])
    leaving, filled, ended = list[torch.Tensor](), list[int](), list[float]()
    run, reads, writes = SlicedUpdate.run, StepPaging.slices_from, StepPaging.slices_to

    def slices_to(paging: StepPaging, s: int) -> Callable[[torch.Tensor, int], Wait]:
        write = writes(paging, s)

        def begin(contents: torch.Tensor, start: int) -> Wait:
            wait = write(contents, start)
            leaving.append(contents)

            def waited() -> None:
                wait()
                leaving[:] = [other for other in leaving if other is not contents]

            return waited

        return begin

    def slices_from(paging: StepPaging, s: int) -> Callable[[torch.Tensor, int], Wait]:
        read = reads(paging, s)

        def begin(into: torch.Tensor, start: int) -> Wait:
            assert into.data_ptr() not in [contents.data_ptr() for contents in leaving]
            filled.append(start)
            return read(into, start)

        return begin

    def whole(update: SlicedUpdate, gate: Callable[[], None]) -> float:
        ended.append(run(update, gate))
        assert not leaving
        return ended[-1]

    monkeypatch.setattr(StepPaging, "slices_to", slices_to)
    monkeypatch.setattr(StepPaging, "slices_from", slices_from)
    monkeypatch.setattr(SlicedUpdate, "run", whole)
    expected = plain(model, loss, OPTIMIZERS["adamw"], data)
    plan = random_plan(capture.graphs["step"], 1, page=0.9, recompute=0.0, slices=1.0)
    plan = replace(plan, sliced=tuple((group, 3) for group, _ in plan.sliced))
    assert not differences(expected, planned(capture, {"step": plan}, data, tmp_path))
    assert len(ended) >= len(data) and set(filled) == {0, CHUNK, 2 * CHUNK}
