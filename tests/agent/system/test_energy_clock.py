"""The clock of metering, which goes on while the machine sleeps."""

import time

import pytest

from port_agent.system.clock import SystemClock
from port_agent.system.energy_clock import now_s, slept_s


def test_it_counts_from_boot_sleep_included() -> None:
    assert now_s() == pytest.approx(SystemClock().uptime_s(), abs=1.0)
    assert slept_s() == pytest.approx(now_s() - time.monotonic(), abs=1.0) and slept_s() >= -0.01
