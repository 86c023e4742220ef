"""The loads of a calibration do what they say, in the amounts they say."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from port_agent.energy.calibration import CalibrationError, WorkClass
from port_agent.prepare import loads
from tests.agent.energy.recordings import ScriptedSource


class Looked(threading.Event):
    """Is set once it was looked at so often; waits for nothing and notes how long it would have."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._left, self.waits = looks, list[float | None]()

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return False


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of the loads' clock, which is stopped."""
    now = [100.0]
    monkeypatch.setattr(loads, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=time.thread_time))
    return now


def repeated(action: Callable[[], object]) -> Callable[[], Callable[[], object]]:
    return lambda: action


@pytest.mark.slow
def test_threads_count_the_time_of_their_cores_and_that_any_was_busy(now_s: list[float]) -> None:
    load = loads.Threads("two", loads._matrices, 2, WorkClass.DENSE)
    for _ in range(2):
        load._stopped = Looked(8)
        load.start()
        now_s[0] += 7.0
        work = load.stop()
        assert work[WorkClass.ACTIVE] == 7.0 and work[WorkClass.DENSE] > 0.0


def test_rest_is_no_work() -> None:
    load = loads.Threads("rest", repeated(lambda: None), 0, WorkClass.DENSE)
    load.start()
    assert load.stop() == {WorkClass.ACTIVE: 0.0, WorkClass.DENSE: 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("counts", [WorkClass.READ, WorkClass.WRITTEN])
def test_flash_transfers_count_their_bytes_and_no_more_are_written_than_a_medium_bears(
    tmp_path: Path, now_s: list[float], counts: WorkClass
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    with path.open("r+b", buffering=0) as file:
        load = loads.FlashTransfers("flash", file.fileno(), counts)
        load._stopped = looked = Looked(4)
        load.start()
        work = load.stop()
    assert work[counts] == 4 << 20 and work[WorkClass.MOVING] >= 0.0
    written_at = [0.02, 0.04, 0.06, 0.08]
    assert looked.waits == (pytest.approx(written_at) if counts is WorkClass.WRITTEN else [])


def test_a_medium_that_refuses_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    with path.open("rb", buffering=0) as file:
        load = loads.FlashTransfers("flash", file.fileno(), WorkClass.WRITTEN)
        load.start()
        with pytest.raises(OSError, match="Bad file descriptor"):
            load.stop()


@pytest.mark.slow
def test_a_meter_that_always_says_the_same_finds_rest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "_RUN_S", 0.02)
    source = ScriptedSource(period_s=0.01)
    source.value = 5.0
    before, shares = torch.get_num_threads(), list[float]()
    found = loads.calibrate(source, tmp_path, 2, shares.append)
    assert found.static_watts.value == pytest.approx(5.0) and found.gaps == ()
    assert all(estimate.value == pytest.approx(0.0, abs=1e-6) for estimate in found.figures.values())
    assert shares[-1] == 1.0 and torch.get_num_threads() == before and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dead_meter_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "_RUN_S", 0.02)
    source = ScriptedSource(period_s=0.01)
    source.value = "no answer"
    with pytest.raises(CalibrationError, match="no answer"):
        loads.calibrate(source, tmp_path, 1, lambda share: None)
