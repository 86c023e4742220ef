"""A fine-tuning in a terminal writes checkpoints by the clock and ends after the update at a signal."""

import os
import signal
import time

import pytest

from port_agent.finetuning import steering as module
from port_agent.finetuning.steering import Steering


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_a_second_one_is_the_process_own(number: signal.Signals) -> None:
    own: list[int] = []
    before = signal.signal(number, lambda number, frame: own.append(number))
    try:
        steering = Steering()
        with steering.watching():
            assert not steering.leaving
            os.kill(os.getpid(), number)
            assert steering.leaving and own == []
            os.kill(os.getpid(), number)
            assert own == [number]
        os.kill(os.getpid(), number)
        assert own == [number, number]
    finally:
        signal.signal(number, before)


def test_a_checkpoint_is_due_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    steering = Steering()
    assert not steering.checkpoint_due() and steering.has_time_to_write(1 << 40)
    monkeypatch.setattr(time, "monotonic", lambda: now_s + module.CHECKPOINT_S + 1)
    assert steering.checkpoint_due()
    steering.wrote(1, 100, 0.1)
    assert not steering.checkpoint_due()
