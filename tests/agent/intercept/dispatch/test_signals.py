"""Handlers of the program's signals, at any moment, raising or using tensors."""

import contextlib
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch

from port_agent import budget
from port_agent.intercept.dispatch.signals import SignalSafeLock
from tests.agent.intercept.page_files import TWO_LAYERS, layers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no interval timers")

INTERRUPTIONS = 200


class Interrupted(Exception):
    """What the handler of these tests raises, as Python's own raises KeyboardInterrupt."""


def test_an_exception_from_a_signal_leaves_every_tensor_whole(tmp_path: Path) -> None:
    """Hundreds of them, each between some two lines of the follower."""
    model, x = layers(6), torch.ones(4, 256)
    with torch.no_grad():
        expected = model(x)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    caught = 0
    try:
        with torch.no_grad(), budget(tensors=TWO_LAYERS, page_dir=tmp_path).resizing():
            assert signal.getsignal(signal.SIGALRM) is interrupt
            for i in range(INTERRUPTIONS):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + (i % 97) * 1e-5)
                    model(x)
                    model(x)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    caught += 1
            assert torch.equal(model(x), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert signal.signal(signal.SIGALRM, before) is interrupt
    assert caught > INTERRUPTIONS // 4
    for p, q in zip(model.parameters(), layers(6).parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_handler_may_save_a_checkpoint(tmp_path: Path) -> None:
    model, seen = layers(4), []

    def save(number: int, frame: FrameType | None) -> None:
        torch.save(model.state_dict(), tmp_path / "checkpoint")
        seen.append(
            all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / "checkpoint").values(), kept, strict=True))
        )

    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad(), budget(tensors=TWO_LAYERS, page_dir=tmp_path).resizing():
        before = signal.signal(signal.SIGALRM, save)
        try:
            for _ in range(5):
                signal.setitimer(signal.ITIMER_REAL, 2e-3)
                count = len(seen)
                while len(seen) == count:
                    model(torch.ones(4, 256))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert seen == [True] * 5


def test_the_lock_is_taken_only_if_nobody_has_it() -> None:
    lock = SignalSafeLock(contextlib.nullcontext)
    assert lock.acquire_if_free()
    assert not lock.acquire_if_free(), "this thread has it"
    taken: list[bool] = []
    other = threading.Thread(target=lambda: taken.append(lock.acquire_if_free()))
    other.start()
    other.join()
    assert taken == [False]
    lock.release()
