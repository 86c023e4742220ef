"""A step's device is found by its kind, in a package of its own if need be, or refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.backend.base import DeviceAbsentError
from port_agent.backend.choose import backend_of
from port_agent.backend.cpu import CpuBackend
from tests.simulated_device import NAME, installed


def test_the_cpu_is_everywhere() -> None:
    assert isinstance(backend_of("cpu"), CpuBackend)


def test_a_device_that_this_agent_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(DeviceAbsentError, match=r"'xla'.*cpu, cuda, mps"):
        backend_of("xla")


@pytest.mark.process
def test_a_device_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    program = f"from port_agent.backend.choose import backend_of; print(backend_of({NAME!r}).kind)"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=installed(tmp_path), capture_output=True, text=True, cwd="/", check=False)
    assert done.stdout == f"{NAME}\n", done.stderr
