"""The loads of a calibration do what they say, in the amounts they say."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from port_agent.energy.calibration import CalibrationError, WorkClass
from port_agent.prepare import loads
from tests.agent.energy.recordings import ScriptedSource

SHORT_S = 0.2


def repeated(action: Callable[[], object]) -> Callable[[], Callable[[], object]]:
    return lambda: action


def test_threads_count_the_time_of_their_cores_and_that_any_was_busy() -> None:
    load = loads.Threads("two", loads._matrices, 2, WorkClass.DENSE)
    for _ in range(2):
        begin = time.monotonic()
        load.start()
        time.sleep(SHORT_S)
        work = load.stop()
        lasted = time.monotonic() - begin
        assert SHORT_S <= work[WorkClass.ACTIVE] <= lasted
        assert 0.0 < work[WorkClass.DENSE] <= 2 * lasted


def test_rest_is_no_work() -> None:
    load = loads.Threads("rest", repeated(lambda: None), 0, WorkClass.DENSE)
    load.start()
    assert load.stop() == {WorkClass.ACTIVE: 0.0, WorkClass.DENSE: 0.0}


@pytest.mark.parametrize("counts", [WorkClass.READ, WorkClass.WRITTEN])
def test_flash_transfers_count_their_bytes_and_no_more_are_written_than_a_medium_bears(
    tmp_path: Path, counts: WorkClass
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    with path.open("r+b", buffering=0) as file:
        load = loads.FlashTransfers("flash", file.fileno(), counts)
        begin = time.monotonic()
        load.start()
        time.sleep(SHORT_S)
        work = load.stop()
        lasted = time.monotonic() - begin
    assert work[counts] > 0 and work[counts] % (1 << 20) == 0 and work[WorkClass.MOVING] >= 0.0
    if counts is WorkClass.WRITTEN:
        assert work[counts] <= (1 + 50 * lasted) * (1 << 20)


def test_a_medium_that_refuses_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    with path.open("rb", buffering=0) as file:
        load = loads.FlashTransfers("flash", file.fileno(), WorkClass.WRITTEN)
        load.start()
        with pytest.raises(OSError, match="Bad file descriptor"):
            load.stop()


def test_a_meter_that_always_says_the_same_finds_rest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "_RUN_S", 0.02)
    source = ScriptedSource(period_s=0.01)
    source.value = 5.0
    before, shares = torch.get_num_threads(), list[float]()
    found = loads.calibrate(source, tmp_path, 2, shares.append)
    assert found.static_watts.value == pytest.approx(5.0) and found.gaps == ()
    assert all(estimate.value == pytest.approx(0.0, abs=1e-6) for estimate in found.figures.values())
    assert shares[-1] == 1.0 and torch.get_num_threads() == before and list(tmp_path.iterdir()) == []


def test_a_dead_meter_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "_RUN_S", 0.02)
    source = ScriptedSource(period_s=0.01)
    source.value = "no answer"
    with pytest.raises(CalibrationError, match="no answer"):
        loads.calibrate(source, tmp_path, 1, lambda share: None)
