"""Whether pages in shared memory are copied on their way is measured, and costs follow: on the simulated
device, made slow either way.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from port_agent.prepare.page_routes import measured_page_routes
from port_planner.ir.costs import DeviceCosts, Flash
from tests.simulated_device import SimBackend

pytestmark = pytest.mark.own_process

FAST = Flash("disk", 1e12, 1e12, 1e-4, 1e-9, 1e-9)
SLOW = Flash("card", 1e6, 1e6, 1e-4, 1e-9, 1e-9)
DEVICE = DeviceCosts("test", 200 << 20, 1.0, 2.0, FAST, scratch_targets=(SLOW,))
LONG_S = 0.02
"""For each MiB."""


@pytest.fixture
def backend() -> Iterator[SimBackend]:
    made = SimBackend()
    made.unified = True
    made.races()
    yield made
    assert made.races() == []
    made.take_times(0.0, 0.0)


def test_slow_copies_are_left_out(backend: SimBackend, tmp_path: Path) -> None:
    backend.take_times(LONG_S, 0.0)
    found = measured_page_routes(backend, tmp_path)
    assert found.shared_s is not None and found.shares and found.copied_s > found.out_s + found.into_s > found.shared_s
    device = found.applied(DEVICE)
    assert device.shares_pages and device.targets == DEVICE.targets
    assert not list(tmp_path.iterdir())


def test_slow_computing_in_shared_memory_leaves_copies_and_no_medium_is_faster_than_they(
    backend: SimBackend, tmp_path: Path
) -> None:
    backend.take_times(LONG_S / 10, LONG_S)
    found = measured_page_routes(backend, tmp_path)
    assert found.shared_s is not None and not found.shares
    device = found.applied(DEVICE)
    assert not device.shares_pages
    fast, slow = device.targets
    out_s, into_s = found.out_s / found.nbytes, found.into_s / found.nbytes
    assert (fast.write_bytes_per_s, fast.read_bytes_per_s) == (1 / out_s, 1 / into_s)
    assert fast.write_joules_per_byte == pytest.approx(1e-9 + 2.0 * out_s)
    assert slow.write_bytes_per_s == slow.read_bytes_per_s == 1e6


def test_memory_that_the_host_does_not_reach_is_copied(backend: SimBackend, tmp_path: Path) -> None:
    backend.unified = False
    backend.take_times(LONG_S, 0.0)
    found = measured_page_routes(backend, tmp_path)
    assert found.shared_s is None and not found.shares


def test_memory_that_no_file_takes_is_copied(
    backend: SimBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def refuses(*_: object) -> int:
        raise OSError(14, "Bad address")

    backend.take_times(LONG_S, 0.0)
    monkeypatch.setattr(os, "pwrite", refuses)
    assert measured_page_routes(backend, tmp_path).shared_s is None
